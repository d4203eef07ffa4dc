"""Pools of workers: where they are, how prompts are read for them and how they are treated."""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from gateway.allowed import check_allowed_host
from gateway.config.discovery import DiscoveryConfig, StaticDiscovery
from gateway.config.section import (
    NUMBER,
    WORKER_ID,
    EnvName,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Section,
    Share,
    check_worker_url,
    check_zmq_address,
)

Auto = Literal["auto"]
AffinityKind = Literal["document", "knowledge_base", "session", "tenant", "prefix"]


class WorkerConfig(Section):
    """One engine endpoint."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=WORKER_ID)]
    """Its name in metrics, logs and decisions."""
    url: str
    """Where it serves, without /v1."""
    kv_events: str | list[str] | None = None
    """A list where several data-parallel ranks publish, each on its own address."""
    kv_replay: str | list[str] | None = None
    """Where it replays KV events after a gap."""
    kv_topic: str | None = None
    """Topic its KV events carry; null = any."""

    @field_validator("url")
    @classmethod
    def _http_url(cls, value: str) -> str:
        return check_worker_url(value)

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _zmq_addresses(cls, value: str | list[str] | None) -> str | list[str] | None:
        addresses = [value] if isinstance(value, str) else value or []
        for address in addresses:
            check_zmq_address(address)
        return value

    @model_validator(mode="after")
    def _one_replay_per_publisher(self) -> WorkerConfig:
        events = len(self.kv_events) if isinstance(self.kv_events, list) else 1
        replays = len(self.kv_replay) if isinstance(self.kv_replay, list) else 1
        if self.kv_replay is not None and self.kv_events is not None and events != replays:
            raise ValueError(f"kv_replay: expected {events} as in kv_events, got {replays}")
        return self


class AffinityConfig(Section):
    """Which identity a request's home on the ring is computed from."""

    keys: tuple[AffinityKind, ...] = ("document", "knowledge_base", "session", "tenant", "prefix")
    """Kinds of identity; the first that a request has counts, prompt_cache_key before all."""
    set_size: PositiveInt = 2
    """Workers that share a key."""
    mode: Literal["soft", "strict"] = "soft"
    """soft = a home breaks ties; strict = requests stay at their homes, bounded by load."""


class CanonicalizeConfig(Section):
    """Whether prompts may be rewritten so that their prefixes agree."""

    mode: Literal["off", "observe", "rewrite"] = "observe"
    """off; observe = only say what rules would save; rewrite = apply them."""
    rules: tuple[Literal["stable-tools", "attribution-header", "volatile-tail"], ...] = ()
    """Rules to apply, in this order."""


class OffloadConfig(Section):
    """How much of a prompt a worker may write to lower tiers."""

    max_offload_tokens: NonNegativeInt | None = None
    """Most leading tokens that a worker may write to lower tiers; null = no cap."""
    scope: Literal["knowledge", "history"] = "knowledge"
    """Which stable boundary is the most that is sent."""


class KeepWarmConfig(Section):
    """Re-warming of hot documents on workers that join or restart."""

    enabled: bool = False
    """Fill workers that joined, restarted or were cleared before they get their share."""
    store: bool = False
    """Keep token ids of hot prompts for it, in this process alone."""
    budget_tokens: NonNegativeInt = 100_000
    """Most tokens computed for one worker."""


class AdmissionConfig(Section):
    """How many requests may wait, and how long."""

    max_queue: PositiveInt = 1000
    """Most requests that wait for a worker; more are refused with 429."""
    deadline_s: Seconds = 30
    """Longest wait of one request."""


class RetryConfig(Section):
    """Retries before the first byte: share of recent requests, and tries per request."""

    budget: Share = 0.2
    """Retries as a share of recent requests."""
    attempts: Annotated[int, Field(ge=1, le=10), NUMBER] = 2
    """Tries per request, the first one included."""


class PoolConfig(Section):
    """The workers that serve one set of model names, and how to read prompts for them."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Its name in routes, metrics and logs."""
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names that clients may ask for."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names for them."""
    engine: Literal["runner", "vllm", "sglang", "openai"] = "openai"
    """Dialect of its workers."""
    tokenizer: str | None = None
    """Folder with tokenizer.json and tokenizer_config.json; may be left out for engine runner."""
    workers: tuple[WorkerConfig, ...] = ()
    """Fixed workers."""
    discovery: DiscoveryConfig = StaticDiscovery()
    """How workers are found."""
    affinity: AffinityConfig = AffinityConfig()
    """Which identity finds a request's home."""
    canonicalize: CanonicalizeConfig = CanonicalizeConfig()
    """Whether prompts may be rewritten so that their prefixes agree."""
    offload: OffloadConfig = OffloadConfig()
    """How much of a prompt workers may write to lower tiers."""
    template: str | None = None
    """File with the chat template; null = the tokenizer's."""
    timezone: str = "UTC"
    """Of dates that templates print."""
    block_size: PositiveInt | Auto = "auto"
    """Tokens of a KV block; auto = as the workers say."""
    max_batched_tokens: PositiveInt = 8192
    """Tokens that a worker computes in one step, at most."""
    capacity_tokens: PositiveInt | Auto = "auto"
    """Tokens that a worker's device pool holds; auto = as it says."""
    worker_allow: tuple[str, ...] = ()
    """Where workers may be that are registered or discovered: networks and host names with *."""
    api_key_env: EnvName | None = None
    """Variable with the key that its workers ask for."""
    worker_ca: str | None = None
    """PEM file of the authorities that sign https workers; None = the system's."""
    weight: NonNegativeInt | None = None
    """Share of its models' traffic among the pools that have a weight and serve the same name."""
    fallback: str | None = None
    """Pool that takes requests while this one has no worker."""
    peer_pull: Literal["auto", "off", "llm-d"] = "auto"
    """auto: between bundled runners that say they can."""
    keep_warm: KeepWarmConfig = KeepWarmConfig()
    """Re-warming of workers."""
    admission: AdmissionConfig = AdmissionConfig()
    """How many requests may wait, and how long."""
    retry: RetryConfig = RetryConfig()
    """Retries before the first byte."""

    @field_validator("timezone")
    @classmethod
    def _zone(cls, value: str) -> str:
        if value == "UTC":  # is known where no zones are installed
            return value
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"expected a time zone such as UTC or Europe/Berlin, got {value!r}"
            ) from error
        return value

    @field_validator("worker_allow")
    @classmethod
    def _hosts(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            check_allowed_host(value)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> PoolConfig:
        ids = [worker.id for worker in self.workers]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"worker ids must differ, these stand twice: {', '.join(twice)}")
        for alias, target in self.aliases.items():
            if target not in self.models:
                known = ", ".join(self.models)
                raise ValueError(f"alias {alias!r} points to {target!r}, expected one of {known}")
        return self

"""The one Settings object of the gateway: its shape, its defaults and what they mean.

The schema is closed: a key that is not here is an error. Where values come from (file, environment,
flags) and which line they stand on is ``gateway/settings.py``'s business; this file is only shape.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gateway.allowed import check_allowed_host
from gateway.discovery_config import DiscoveryConfig, StaticDiscovery
from gateway.pass_through import check_pass_through
from gateway.section import (
    NonNegativeInt,
    Port,
    PositiveInt,
    Seconds,
    Section,
    Share,
    check_collector_url,
    check_worker_url,
    check_zmq_address,
)

Auto = Literal["auto"]
# The name of an environment variable. A secret put here by mistake is none, and is not shown.
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
AffinityKind = Literal["document", "knowledge_base", "session", "tenant", "prefix"]

_SENTINEL_URL = re.compile(
    r"redis\+sentinel://(?:[^@/\s]*@)?[^@/,:\s]+:\d{1,5}(?:,[^@/,:\s]+:\d{1,5})*/[^/\s]+(?:/\d+)?"
)


class AccessConfig(Section):
    """Who may operate the gateway and whose identity headers count."""

    admin_token_env: EnvName | None = None
    # Addresses and networks whose x-tenant-id is believed: a proxy that has checked who sends.
    trusted_peers: tuple[str, ...] = ()

    @field_validator("trusted_peers")
    @classmethod
    def _networks(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            try:
                ip_network(value)
            except ValueError as error:
                raise ValueError(f"expected addresses or networks: {error}") from error
        return values


class TlsConfig(Section):
    """Certificate and key files of the client port, in PEM; read again when they change."""

    cert: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _both(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; expected both or none")
        return self


class LimitsConfig(Section):
    """Bounds on what a client may send and how long it may take."""

    head_kb: PositiveInt = 64
    headers: PositiveInt = 128
    decompressed_mb: PositiveInt = 64
    head_s: Seconds = 10
    body_s: Seconds = 60
    idle_s: Seconds = 75
    # A long prefill is not a dead worker: ten minutes before the first byte are legitimate.
    first_byte_s: Seconds = 600
    request_s: Seconds = 1800


class ServerConfig(Section):
    """The client port."""

    host: str = "0.0.0.0"  # noqa: S104  # a gateway is there to be reached
    port: Port = 8080
    admin_port: Port | None = None
    processes: PositiveInt = 1
    max_body_mb: PositiveInt = 32
    drain_s: Seconds = 30
    # More inference paths that are passed on to a worker of the model's pool; /* = all below.
    pass_through: tuple[str, ...] = ()
    front: Literal["aiohttp", "raw"] = "raw"
    access: AccessConfig = AccessConfig()
    tls: TlsConfig = TlsConfig()
    limits: LimitsConfig = LimitsConfig()

    @field_validator("pass_through")
    @classmethod
    def _paths(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_pass_through(value) for value in values)


class RoutingConfig(Section):
    """How a worker is chosen."""

    mode: Literal["observe", "cost", "least_load"] = "cost"
    share: Annotated[int, Field(ge=0, le=100)] = 100
    max_wait_s: Seconds = 2
    seed: int | None = None


class IndexConfig(Section):
    """Where the prefix index lives and how much of it is kept."""

    backend: Literal["memory", "redis"] = "memory"
    url: str | None = None
    timeout_ms: PositiveInt = 50
    max_blocks: PositiveInt = 5_000_000
    namespace: str = "warmlane"
    tls: bool = False

    @field_validator("url")
    @classmethod
    def _redis_url(cls, value: str | None) -> str | None:
        return None if value is None else check_redis_url(value)


class WorkerConfig(Section):
    """One engine endpoint."""

    id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]
    url: str
    # A list where several data-parallel ranks publish, each on its own address.
    kv_events: str | list[str] | None = None
    kv_replay: str | list[str] | None = None
    kv_topic: str | None = None

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
    set_size: PositiveInt = 2
    mode: Literal["soft", "strict"] = "soft"


class CanonicalizeConfig(Section):
    """Whether prompts may be rewritten so that their prefixes agree."""

    mode: Literal["off", "observe", "rewrite"] = "observe"
    rules: tuple[Literal["stable-tools", "attribution-header", "volatile-tail"], ...] = ()


class OffloadConfig(Section):
    """How much of a prompt a worker may write to lower tiers."""

    max_offload_tokens: NonNegativeInt | None = None
    scope: Literal["knowledge", "history"] = "knowledge"


class KeepWarmConfig(Section):
    """Re-warming of hot documents on workers that join or restart."""

    enabled: bool = False
    store: bool = False
    budget_tokens: NonNegativeInt = 100_000


class AdmissionConfig(Section):
    """How many requests may wait, and how long."""

    max_queue: PositiveInt = 1000
    deadline_s: Seconds = 30


class RetryConfig(Section):
    """Retries before the first byte: share of recent requests, and tries per request."""

    budget: Share = 0.2
    attempts: Annotated[int, Field(ge=1, le=10)] = 2


class PoolConfig(Section):
    """The workers that serve one set of model names, and how to read prompts for them."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    aliases: dict[str, str] = Field(default_factory=dict)
    engine: Literal["runner", "vllm", "sglang", "openai"] = "openai"
    tokenizer: str | None = None
    workers: tuple[WorkerConfig, ...] = ()
    discovery: DiscoveryConfig = StaticDiscovery()
    affinity: AffinityConfig = AffinityConfig()
    canonicalize: CanonicalizeConfig = CanonicalizeConfig()
    offload: OffloadConfig = OffloadConfig()
    template: str | None = None
    timezone: str = "UTC"
    block_size: PositiveInt | Auto = "auto"
    max_batched_tokens: PositiveInt = 8192
    capacity_tokens: PositiveInt | Auto = "auto"
    # Where workers may be that are registered or discovered: networks and host names with *.
    worker_allow: tuple[str, ...] = ()
    # Variable with the key that its workers ask for.
    api_key_env: EnvName | None = None
    # PEM file of the authorities that sign https workers; None = the system's.
    worker_ca: str | None = None
    # Share of its models' traffic among the pools that have a weight and serve the same name.
    weight: NonNegativeInt | None = None
    fallback: str | None = None
    # auto: between bundled runners that say they can.
    peer_pull: Literal["auto", "off", "llm-d"] = "auto"
    keep_warm: KeepWarmConfig = KeepWarmConfig()
    admission: AdmissionConfig = AdmissionConfig()
    retry: RetryConfig = RetryConfig()

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


class MatchConfig(Section):
    """Which requests a route takes: those of which everything that is said here is true."""

    tenant: str | None = None
    model: str | None = None
    header: dict[str, str] = Field(default_factory=dict)
    prompt_tokens_min: NonNegativeInt | None = None
    prompt_tokens_max: NonNegativeInt | None = None
    # Share of the prompt that a worker holds, of the pool where it would go otherwise.
    known_reuse_min: Share | None = None
    known_reuse_max: Share | None = None

    @field_validator("header")
    @classmethod
    def _lower_case(cls, value: dict[str, str]) -> dict[str, str]:
        return {name.lower(): text for name, text in value.items()}

    @model_validator(mode="after")
    def _possible(self) -> MatchConfig:
        for name in ("prompt_tokens", "known_reuse"):
            least, most = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if least is not None and most is not None and least > most:
                raise ValueError(f"{name}_min {least:g} is above {name}_max {most:g}")
        return self


class RouteConfig(Section):
    """Sends matching requests to a pool, if that serves their model; the first match counts."""

    match: MatchConfig = MatchConfig()
    pool: str
    offload: OffloadConfig | None = None


class TenantConfig(Section):
    """A group of API keys with its budgets."""

    # A label of metrics and a part of every key; what trusted peers may send as x-tenant-id.
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[ -+\-.-~]+$")]
    # API keys, or sha256:HASH, with commas between them.
    key_env: EnvName | None = None
    # One SHA-256 in hex a line; read again when it changes.
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    # Names its clients may ask for; none = all.
    models: tuple[str, ...] = ()
    requests_per_min: PositiveInt | None = None
    tokens_per_min: PositiveInt | None = None
    weight: PositiveInt = 1
    priority: int = 0
    isolate_cache: bool = False
    offload: OffloadConfig | None = None


class SecurityConfig(Section):
    """Secrets, by the name of the environment variable that holds them."""

    salt_secret_env: EnvName | None = None


class TelemetryConfig(Section):
    """Logs and traces."""

    otlp_endpoint: str | None = None
    log_prompts: bool = False
    decision_log: str | None = None
    trace_sample: Share = 0.01
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector_url(cls, value: str | None) -> str | None:
        return None if value is None else check_collector_url(value)


class Settings(Section):
    """Everything the gateway reads at start."""

    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()
    index: IndexConfig = IndexConfig()
    pools: Annotated[tuple[PoolConfig, ...], Field(min_length=1)]
    routes: tuple[RouteConfig, ...] = ()
    tenants: tuple[TenantConfig, ...] = ()
    security: SecurityConfig = SecurityConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _names_differ(self) -> Settings:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, got {', '.join(names)}")
        ids = [worker.id for pool in self.pools for worker in pool.workers]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"worker ids must differ between pools: {', '.join(twice)}")
        return self


def check_redis_url(value: str) -> str:
    """Return ``value`` if it names a Redis server as the index takes it.

    Raises:
        ValueError: If it does not; the message says what was expected.
    """
    expected = (
        "expected redis://HOST[:PORT][/DB], rediss://..., unix://PATH or "
        "redis+sentinel://HOST:PORT[,HOST:PORT]/SERVICE[/DB]"
    )
    try:
        parts = urlsplit(value)
        if parts.scheme in ("redis", "rediss"):
            # Reading the port checks it.
            valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        elif parts.scheme == "unix":
            valid = parts.path.startswith("/") and len(parts.path) > 1
        else:
            valid = bool(_SENTINEL_URL.fullmatch(value))
    except ValueError:
        valid = False
    if not valid:
        # The URL itself may carry a password.
        raise ValueError(expected)
    return value

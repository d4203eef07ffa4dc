"""Who sends, which requests go elsewhere, and secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from gateway.config.pools import OffloadConfig
from gateway.config.section import NUMBER, EnvName, NonNegativeInt, PositiveInt, Section, Share

# A name is a label, and stands in lists with commas.
TENANT_NAME = r"^[ -+\-.-~]+$"


class MatchConfig(Section):
    """Which requests a route takes: those of which everything that is said here is true."""

    tenant: str | None = None
    """Name of a tenant."""
    model: str | None = None
    """Name that the client asked for."""
    header: dict[str, str] = Field(default_factory=dict)
    """Request headers with these values."""
    prompt_tokens_min: NonNegativeInt | None = None
    """Shortest prompt."""
    prompt_tokens_max: NonNegativeInt | None = None
    """Longest prompt."""
    known_reuse_min: Share | None = None
    """Share of the prompt that a worker holds, of the pool where it would go otherwise."""
    known_reuse_max: Share | None = None
    """Most of that share."""

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
    """Which requests it takes."""
    pool: str
    """Where they go."""
    offload: OffloadConfig | None = None
    """Offload cap of these requests."""


class TenantConfig(Section):
    """A group of API keys with its budgets."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=TENANT_NAME)]
    """A label of metrics and a part of every key; what trusted peers may send as x-tenant-id."""
    key_env: EnvName | None = None
    """API keys, or sha256:HASH, with commas between them."""
    keys_file: Annotated[str, Field(min_length=1)] | None = None
    """One SHA-256 in hex a line; read again when it changes."""
    models: tuple[str, ...] = ()
    """Names its clients may ask for; none = all."""
    requests_per_min: PositiveInt | None = None
    """Request budget; null = none."""
    tokens_per_min: PositiveInt | None = None
    """Token budget, prompt and output; null = none."""
    weight: PositiveInt = 1
    """Share of the queue beside other tenants."""
    priority: Annotated[int, NUMBER] = 0
    """Higher goes first in the queue."""
    isolate_cache: bool = False
    """Keep its cached prefixes apart from everybody else's, by a salt."""
    offload: OffloadConfig | None = None
    """Offload cap of its requests."""


class SecurityConfig(Section):
    """Secrets, by the name of the environment variable that holds them."""

    salt_secret_env: EnvName | None = None
    """Variable with the secret that tenants' cache salts are made from."""

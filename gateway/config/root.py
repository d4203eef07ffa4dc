"""The one Settings object: everything that the gateway reads at start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gateway.config.index import IndexConfig
from gateway.config.pools import PoolConfig
from gateway.config.section import NUMBER, Seconds, Section, Share, check_collector_url
from gateway.config.server import ServerConfig
from gateway.config.tenants import RouteConfig, SecurityConfig, TenantConfig


class RoutingConfig(Section):
    """How a worker is chosen."""

    mode: Literal["observe", "cost", "least_load"] = "cost"
    """cost = by estimated cost; observe = by load, noting what cost had done; least_load = by
    load alone: the kill switch."""
    share: Annotated[int, Field(ge=0, le=100), NUMBER] = 100
    """Percent of the traffic that is routed by cost."""
    max_wait_s: Seconds = 2
    """Longest wait in the gateway for a worker that is worth it."""
    seed: Annotated[int, NUMBER] | None = None
    """Of the draws that break ties; null = random."""


class TelemetryConfig(Section):
    """Logs and traces."""

    otlp_endpoint: str | None = None
    """OTLP/HTTP collector, or its .../v1/traces; null = no traces."""
    log_prompts: bool = False
    """Allow prompt text in reports and traces; warns at start."""
    decision_log: str | None = None
    """File that every decision is appended to; null = none."""
    trace_sample: Share = 0.01
    """Share of requests traced that came without a traceparent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of log lines; info includes one line per request."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector_url(cls, value: str | None) -> str | None:
        return None if value is None else check_collector_url(value)


class Settings(Section):
    """Everything the gateway reads at start."""

    server: ServerConfig = ServerConfig()
    """The client port."""
    routing: RoutingConfig = RoutingConfig()
    """How a worker is chosen."""
    index: IndexConfig = IndexConfig()
    """Where the prefix index lives."""
    pools: Annotated[tuple[PoolConfig, ...], Field(min_length=1)]
    """The workers, by the models they serve."""
    routes: tuple[RouteConfig, ...] = ()
    """Which requests go to another pool than their model's; the first match counts."""
    tenants: tuple[TenantConfig, ...] = ()
    """API keys and their budgets; none = everybody may use the gateway."""
    security: SecurityConfig = SecurityConfig()
    """Secrets."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and traces."""

    @model_validator(mode="after")
    def _names_differ(self) -> Settings:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, got {', '.join(names)}")
        ids = [worker.id for pool in self.pools for worker in pool.workers]
        if twice := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"worker ids must differ between pools: {', '.join(twice)}")
        return self

"""The client port and who may use it."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Literal

from pydantic import field_validator, model_validator

from gateway.config.section import EnvName, Port, PositiveInt, Seconds, Section
from gateway.pass_through import check_pass_through


class AccessConfig(Section):
    """Who may operate the gateway and whose identity headers count."""

    admin_token_env: EnvName | None = None
    """Variable with the operators' token; without one, admin and console answer loopback alone."""
    trusted_peers: tuple[str, ...] = ()
    """Addresses and networks whose x-tenant-id is believed: a proxy that has checked who sends."""

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
    """Certificate chain in PEM."""
    key: str | None = None
    """Its private key in PEM."""

    @model_validator(mode="after")
    def _both(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; expected both or none")
        return self


class LimitsConfig(Section):
    """Bounds on what a client may send and how long it may take."""

    head_kb: PositiveInt = 64
    """Largest request head, KiB."""
    headers: PositiveInt = 128
    """Most header lines."""
    decompressed_mb: PositiveInt = 64
    """Largest body once its content coding is undone, MiB."""
    head_s: Seconds = 10
    """Longest wait for a whole request head."""
    body_s: Seconds = 60
    """Longest wait for more of a body."""
    idle_s: Seconds = 75
    """How long an idle connection is kept."""
    first_byte_s: Seconds = 600
    """A long prefill is not a dead worker: ten minutes before the first byte are legitimate."""
    request_s: Seconds = 1800
    """Longest time a worker may take for a whole answer."""


class ServerConfig(Section):
    """The client port."""

    host: str = "0.0.0.0"  # noqa: S104  # a gateway is there to be reached
    """Address to listen on."""
    port: Port = 8080
    """Client port; 0 = any free one."""
    admin_port: Port | None = None
    """Port of its own for metrics, console and admin; null = on the client port."""
    admin_tls: bool = False
    """Whether that port speaks TLS too, with the client port's certificate."""
    processes: PositiveInt = 1
    """Processes that share the client port; more than one needs index.backend redis."""
    max_body_mb: PositiveInt = 32
    """Largest request body, MiB."""
    drain_s: Seconds = 30
    """How long running requests may go on after SIGTERM."""
    pass_through: tuple[str, ...] = ()
    """More inference paths that are passed on to a worker of the model's pool; /* = all below."""
    front: Literal["aiohttp", "raw"] = "raw"
    """raw = our own HTTP front; aiohttp = its reference."""
    access: AccessConfig = AccessConfig()
    """Who may operate the gateway and whose identity headers count."""
    tls: TlsConfig = TlsConfig()
    """Certificate of the client port."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds on what clients send and how long things take."""

    @model_validator(mode="after")
    def _admin_tls(self) -> ServerConfig:
        if self.admin_tls and (self.admin_port is None or self.tls.cert is None):
            raise ValueError("admin_tls is set; expected admin_port and tls.cert beside it")
        return self

    @field_validator("pass_through")
    @classmethod
    def _paths(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_pass_through(value) for value in values)

"""The shape of ``pools[].discovery``: one closed section for each way to find workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gateway.config.section import NUMBER, PositiveInt, Seconds, Section, check_zmq_address

RealPort = Annotated[int, Field(ge=1, le=65535), NUMBER]


class StaticDiscovery(Section):
    """The workers are those of ``pools[].workers``."""

    type: Literal["static"] = "static"
    """How workers are found."""


class FileDiscovery(Section):
    """Workers stand in a file of their own, which is read again when it changes."""

    type: Literal["file"]
    """How workers are found."""
    path: Annotated[str, Field(min_length=1)]
    """The file."""


class _Addressed(Section):
    """What is to be said of workers of which only the host is found."""

    scheme: Literal["http", "https"] = "http"
    """How workers are spoken to."""
    kv_events: str | None = None
    """Where a worker publishes KV events, {ip} being its address; null = as it says itself."""
    kv_replay: str | None = None
    """Where a worker replays them, in the same form."""

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            check_zmq_address(filled(value, "127.0.0.1"))
        return value


class DnsDiscovery(_Addressed):
    """Each address that a name resolves to is a worker."""

    type: Literal["dns"]
    """How workers are found."""
    name: Annotated[str, Field(min_length=1)]
    """Host name that resolves to the workers, or whose SRV records name them."""
    port: RealPort | None = None
    """Port of all workers; SRV records carry their own."""
    srv: bool = False
    """Ask for SRV records."""
    interval_s: Seconds = 10
    """How often the name is asked for, unless its records say."""
    absent_answers: PositiveInt = 3
    """A worker leaves once so many answers in a row are without it."""
    keep_s: Seconds = 600
    """How long the last answer holds while the resolver fails."""

    @model_validator(mode="after")
    def _one_port(self) -> DnsDiscovery:
        if self.srv == (self.port is not None):
            raise ValueError("expected port, or srv: true whose records carry it")
        return self


class KubernetesDiscovery(_Addressed):
    """Workers are the pods that a label selector or a Service names."""

    type: Literal["kubernetes"]
    """How workers are found."""
    selector: str | None = None
    """Label selector of the pods."""
    service: str | None = None
    """Service whose EndpointSlices name the pods."""
    namespace: str | None = None
    """null: the gateway's own, or the one of the kubeconfig's context."""
    kubeconfig: str | None = None
    """null: the service account that the cluster gave this pod."""
    context: str | None = None
    """Context of the kubeconfig; null = its current one."""
    port: RealPort | str = 8000
    """Port of the workers, or the name that their pods give it."""
    pool_label: str = "warmlane.io/pool"
    """Label that names a pod's pool."""
    model_label: str = "warmlane.io/model"
    """Label that names a pod's model."""
    relist_s: Seconds = 600
    """Everything is listed anew so often, should a change have been missed."""

    @model_validator(mode="after")
    def _one_of(self) -> KubernetesDiscovery:
        if (self.selector is None) == (self.service is None):
            raise ValueError("expected either selector (of pods) or service (its EndpointSlices)")
        if self.context is not None and self.kubeconfig is None:
            raise ValueError("context needs kubeconfig, the file that it stands in")
        return self


DiscoveryConfig = Annotated[
    StaticDiscovery | FileDiscovery | DnsDiscovery | KubernetesDiscovery,
    Field(discriminator="type"),
]


def filled(template: str, host: str) -> str:
    """Put a worker's address into a template; an IPv6 one in brackets."""
    return template.replace("{ip}", f"[{host}]" if ":" in host else host)

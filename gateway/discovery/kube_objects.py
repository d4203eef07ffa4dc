"""Workers as pods and EndpointSlices tell of them.

A pod's labels and annotations may say more of it than the configuration: pool, model, port, and
where its KV events are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gateway.config import WorkerConfig
from gateway.config.discovery import filled
from gateway.discovery.listing import Found, host_url, id_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.config.discovery import KubernetesDiscovery

PREFIX = "warmlane.io/"
SERVICE_LABEL = "kubernetes.io/service-name"

Told = tuple[list[Found], dict[str, str]]


class NoWorkerError(ValueError):
    """An object is no worker; the message says what was expected."""


def pods(objects: Iterable[Mapping[str, Any]], config: KubernetesDiscovery) -> Told:
    """Return the workers that pods are, and what cannot be one -> why.

    A pod that has no address yet, or has ended, is neither.
    """
    found: list[Found] = []
    bad: dict[str, str] = {}
    for pod in objects:
        meta, status = pod["metadata"], pod.get("status") or {}
        host = status.get("podIP")
        if not host or status.get("phase") in ("Succeeded", "Failed"):
            continue
        is_ready = "deletionTimestamp" not in meta and any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        try:
            port = _port(config, meta, _container_ports(pod))
            found.append(_found(config, meta["name"], host, port, meta, is_ready=is_ready))
        except ValueError as error:
            bad[meta["name"]] = _why(error)
    return found, bad


def slices(objects: Iterable[Mapping[str, Any]], config: KubernetesDiscovery) -> Told:
    """Return the workers that endpoints are; one that stands in two slices counts once."""
    found: dict[str, Found] = {}
    bad: dict[str, str] = {}
    for part in objects:
        meta = part["metadata"]
        ports = {port.get("name") or "": port.get("port") for port in part.get("ports") or ()}
        for endpoint in part.get("endpoints") or ():
            host = endpoint["addresses"][0]
            target = endpoint.get("targetRef") or {}
            name = target.get("name") if target.get("kind") == "Pod" else None
            try:
                port = _port(config, meta, ports)
                one = _found(
                    config,
                    name or f"{host}:{port}",
                    host,
                    port,
                    meta,
                    is_ready=_is_ready(endpoint.get("conditions") or {}),
                )
            except ValueError as error:
                bad[name or host] = _why(error)
                continue
            # While an endpoint moves from one slice to the next, the one that serves is the truth.
            known = found.get(one.worker.id)
            if known is None or (one.is_ready and not known.is_ready):
                found[one.worker.id] = one
    return list(found.values()), bad


def _is_ready(conditions: Mapping[str, Any]) -> bool:
    # Not said means ready; a Service that publishes endpoints before they are ready calls those
    # ready, too, that are about to end.
    return conditions.get("ready") is not False and conditions.get("terminating") is not True


def _found(
    config: KubernetesDiscovery,
    name: str,
    host: str,
    port: int,
    meta: Mapping[str, Any],
    *,
    is_ready: bool,
) -> Found:
    events = _said(meta, PREFIX + "kv-events") or config.kv_events
    replay = _said(meta, PREFIX + "kv-replay") or config.kv_replay
    worker = WorkerConfig(
        id=id_from(name),
        url=host_url(_said(meta, PREFIX + "scheme") or config.scheme, host, port),
        kv_events=None if events is None else filled(events, host),
        kv_replay=None if replay is None else filled(replay, host),
    )
    pool, model = _said(meta, config.pool_label), _said(meta, config.model_label)
    return Found(worker, pool or "", model or "", is_ready)


def _port(config: KubernetesDiscovery, meta: Mapping[str, Any], named: Mapping[str, Any]) -> int:
    wanted: int | str = _said(meta, PREFIX + "port") or config.port
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    if isinstance(wanted, str):
        if not isinstance(named.get(wanted), int):
            names = ", ".join(name for name in named if name) or "none"
            raise NoWorkerError(f"there is no port {wanted!r}; named ports: {names}")
        wanted = int(named[wanted])
    if not 0 < wanted < 65536:
        raise NoWorkerError(f"expected a port from 1 to 65535, got {wanted}")
    return wanted


def _container_ports(pod: Mapping[str, Any]) -> dict[str, Any]:
    return {
        port["name"]: port.get("containerPort")
        for container in (pod.get("spec") or {}).get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name")
    }


def _said(meta: Mapping[str, Any], key: str) -> str | None:
    """Return what an annotation or a label says; the annotation first, it may hold any text."""
    for place in ("annotations", "labels"):
        text = (meta.get(place) or {}).get(key)
        if isinstance(text, str) and text:
            return text
    return None


def _why(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
    return str(error)

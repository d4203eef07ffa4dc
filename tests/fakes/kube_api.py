"""A Kubernetes API server as far as discovery needs one: two kinds of objects, list and watch.

Real clients (kubectl, kubernetes_asyncio) accept it; see ``test_discovery_kube_clients.py``.
"""

from __future__ import annotations

import asyncio
import copy
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from types import TracebackType

KINDS = {
    "pods": ("v1", "Pod"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
}


class KubeApiServer:
    """Holds objects by kind and name; every change has a version and is watched.

    Attributes:
        token: Accepted bearer token; None = anybody may ask.
        seen: Query and headers of each list or watch.
        failures: Statuses with which the next requests are refused, in order.
        num_watching: Watches under way.
    """

    def __init__(self, namespace: str = "llm", ssl: ssl.SSLContext | None = None) -> None:
        self.namespace = namespace
        self.token: str | None = None
        self.seen: list[tuple[dict[str, str], dict[str, str]]] = []
        self.failures: list[int] = []
        self.num_watching = 0
        self.bookmark_every_s: float | None = None
        self._ssl = ssl
        self._objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []
        self._version = 100
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._epoch = 0
        self._silent = False
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self.port}"

    async def put(self, kind: str, item: dict[str, Any]) -> None:
        """Create or change an object."""
        name = item["metadata"]["name"]
        event = "MODIFIED" if name in self._objects[kind] else "ADDED"
        await self._change(kind, event, item)

    async def delete(self, kind: str, name: str) -> None:
        await self._change(kind, "DELETED", self._objects[kind][name])

    async def lose(self, kind: str, name: str) -> None:
        """Delete an object without telling anybody: a watch that missed something."""
        self._version += 1
        del self._objects[kind][name]

    async def compact(self) -> None:
        """Forget what happened, so that older versions are gone, and end all watches."""
        self._history.clear()
        self._version += 1
        self._oldest = self._version
        await self.end_watches()

    async def end_watches(self) -> None:
        self._epoch += 1
        async with self._changed:
            self._changed.notify_all()

    def fall_silent(self, *, silent: bool = True) -> None:
        """Say nothing more on watches, though they stay open: a network that drops packets."""
        self._silent = silent

    async def __aenter__(self) -> KubeApiServer:
        app = web.Application()
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/api", self._groups)
        app.router.add_get("/apis", self._groups)
        app.router.add_get("/api/v1", self._resources)
        app.router.add_get("/apis/discovery.k8s.io/v1", self._resources)
        app.router.add_get("/api/v1/namespaces/{ns}/{kind}", self._list_or_watch)
        path = "/apis/discovery.k8s.io/v1/namespaces/{ns}/{kind}"
        app.router.add_get(path, self._list_or_watch)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._ssl)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end_watches()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _change(self, kind: str, event: str, item: dict[str, Any]) -> None:
        self._version += 1
        api, name = KINDS[kind]
        item = copy.deepcopy({"apiVersion": api, "kind": name, **item})
        item["metadata"] |= {"namespace": self.namespace, "resourceVersion": str(self._version)}
        if event == "DELETED":
            del self._objects[kind][item["metadata"]["name"]]
        else:
            self._objects[kind][item["metadata"]["name"]] = item
        self._history.append((self._version, kind, event, item))
        async with self._changed:
            self._changed.notify_all()

    async def _get_version(self, _request: web.Request) -> web.Response:
        version = {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "platform": "linux/amd64"}
        return web.json_response(version)

    async def _groups(self, request: web.Request) -> web.Response:
        if request.path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        one = {"groupVersion": "discovery.k8s.io/v1", "version": "v1"}
        group = {"name": "discovery.k8s.io", "versions": [one], "preferredVersion": one}
        groups = {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        return web.json_response(groups)

    async def _resources(self, request: web.Request) -> web.Response:
        kind = "pods" if request.path == "/api/v1" else "endpointslices"
        api, name = KINDS[kind]
        row = {
            "name": kind,
            "singularName": name.lower(),
            "namespaced": True,
            "kind": name,
            "verbs": ["get", "list", "watch"],
        }
        document = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api}
        return web.json_response(document | {"resources": [row]})

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.seen.append((query, dict(request.headers)))
        if self.failures:
            return _status(self.failures.pop(0), "as told")
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if request.match_info["ns"] != self.namespace:
            return _status(403, f"cannot list in namespace {request.match_info['ns']}")
        kind = request.match_info["kind"]
        if query.get("watch", "").lower() in ("true", "1"):
            return await self._watch(request, kind, query)
        return self._list(kind, query)

    def _list(self, kind: str, query: dict[str, str]) -> web.Response:
        found = [item for item in self._objects[kind].values() if _matches(item, query)]
        start = 0
        version = self._version
        if query.get("continue"):
            start, version = (int(part) for part in query["continue"].split("-"))
            if version < self._oldest:
                return _status(410, "The provided continue parameter is too old")
        limit = int(query.get("limit") or 0) or len(found)
        meta = {"resourceVersion": str(version)}
        if start + limit < len(found):
            meta["continue"] = f"{start + limit}-{version}"
        api, name = KINDS[kind]
        document = {"kind": f"{name}List", "apiVersion": api, "metadata": meta}
        return web.json_response(document | {"items": found[start : start + limit]})

    async def _watch(
        self, request: web.Request, kind: str, query: dict[str, str]
    ) -> web.StreamResponse:
        version = int(query.get("resourceVersion") or self._version)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if version < self._oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(_line("ERROR", gone))
            return response
        epoch, loop = self._epoch, asyncio.get_running_loop()
        end_s = loop.time() + float(query.get("timeoutSeconds") or 60)
        self.num_watching += 1
        try:
            while epoch == self._epoch and loop.time() < end_s:
                for number, event, item in self._after(version, kind):
                    version = number
                    if _matches(item, query) and not self._silent:
                        await response.write(_line(event, item))
                wait_s = self.bookmark_every_s or min(1.0, end_s - loop.time())
                try:
                    async with asyncio.timeout(max(0.0, wait_s)), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    if self.bookmark_every_s and "allowWatchBookmarks" in query:
                        version = self._version
                        api, name = KINDS[kind]
                        mark = {"kind": name, "apiVersion": api}
                        mark["metadata"] = {"resourceVersion": str(version)}  # type: ignore[assignment]
                        await response.write(_line("BOOKMARK", mark))
        finally:
            self.num_watching -= 1
        return response

    def _after(self, version: int, kind: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
        for number, of, event, item in self._history:
            if number > version and of == kind:
                yield number, event, item


def pod(
    name: str,
    ip: str | None,
    *,
    ready: bool = True,
    terminating: bool = False,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ports: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Return a pod as the API shows one."""
    meta: dict[str, Any] = {"name": name, "labels": {"app": "vllm", **(labels or {})}}
    if annotations:
        meta["annotations"] = annotations
    if terminating:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    declared = [{"name": n, "containerPort": p} for n, p in (ports or {}).items()]
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    if ip is not None:
        status["podIP"] = ip
    container = {"name": "engine", "image": "engine", "ports": declared}
    return {"metadata": meta, "spec": {"containers": [container]}, "status": status}


def endpoint(ip: str, pod: str | None = None, **conditions: bool | None) -> dict[str, Any]:
    """Return one endpoint of a slice."""
    found: dict[str, Any] = {"addresses": [ip], "conditions": conditions}
    if pod is not None:
        found["targetRef"] = {"kind": "Pod", "name": pod}
    return found


def endpoint_slice(
    name: str, endpoints: list[dict[str, Any]], *, service: str = "vllm", port: int = 8000
) -> dict[str, Any]:
    """Return an EndpointSlice as the API shows one."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def _matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part]
    return all(labels.get(key) == value for key, value in wanted)


def _line(event: str, item: dict[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": item}).encode() + b"\n"


def _status(code: int, message: str) -> web.Response:
    document = {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}
    return web.json_response(document | {"status": "Failure"}, status=code)

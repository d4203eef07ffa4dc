"""What operators see of several processes: metrics and admin endpoints, merged."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gateway.proxy.shape import in_shape
from gateway.supervisor.console import merge_console
from gateway.supervisor.documents import merge_index, merge_misses, merge_workers, merge_worth
from gateway.supervisor.exposition import merging, rendering
from gateway.supervisor.peers import PEER_HEADER, STREAMED, Answer, passed_on
from gateway.supervisor.usage import NOBODY_ELSE, USAGE_PATH, merged_usage
from gateway.supervisor.windows import merging_windows
from gateway.telemetry.exposition import content_type, wants_open_metrics, write
from gateway.telemetry.observed import gauges
from gateway.telemetry.slices import in_slices
from gateway.usage.document import CSV_CONTENT_TYPE, usage_csv, wants_csv
from gateway.warm.merge import merge_documents, merge_purges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from gateway.supervisor.child import Child
    from gateway.supervisor.exposition import Snapshot
    from gateway.telemetry.observed import Recent

# Answered by all processes together; every other document comes from one of them.
MERGED: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "/admin/v1/workers": merge_workers,
    "/admin/v1/index": merge_index,
    "/admin/v1/misses": merge_misses,
    "/admin/v1/worth": merge_worth,
    "/admin/v1/documents": merge_documents,
}
# Likewise, for what all processes do.
MERGED_POSTS: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
    "/admin/v1/purge": merge_purges,
}
# One process is enough: they change nothing, or what they do is done once.
BY_ONE = frozenset(("/admin/v1/explain", "/admin/v1/warm"))
# Likewise, of any worker.
BY_ONE_SUFFIX = "/selftest"


class Operations:
    """The handlers of the supervisor; used from its event loop.

    Args:
        children: All of them, running or not.
        ended: What the ones that died had counted.
        clock: Monotonic seconds, the children's.
        max_body_bytes: Bound on what an operator may send.
        own: More metrics, of the supervisor itself.
        clock_unix: Seconds since 1970.
        is_reloaded: Whether the configuration that was read last holds.
    """

    def __init__(
        self,
        children: Sequence[Child],
        ended: Snapshot,
        clock: Callable[[], float],
        max_body_bytes: int,
        own: Callable[[], Iterator[Metric]] = lambda: iter(()),
        clock_unix: Callable[[], float] = time.time,
        is_reloaded: Callable[[], bool] = lambda: True,
    ) -> None:
        self._children = children
        self._ended = ended
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._own = own
        self._since_unix_s = clock_unix()
        self._is_reloaded = is_reloaded

    def app(self, *, is_internal: bool) -> web.Application:
        """Build the application of the admin port, or of the children's socket.

        Args:
            is_internal: Whether only this gateway's own processes can reach it.
        """
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=(in_shape,))

        async def admin(request: web.Request) -> web.StreamResponse:
            peer = request.headers.get(PEER_HEADER) if is_internal else request.remote
            return await self._admin(request, passed_on(request, peer))

        async def usage(request: web.Request) -> web.StreamResponse:
            peer = request.headers.get(PEER_HEADER) if is_internal else request.remote
            return await self._usage(request, passed_on(request, peer))

        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/health", self.live),
                web.get("/health/live", self.live),
                web.get("/health/ready", self.ready),
                web.get(USAGE_PATH, usage),
                web.route("*", "/admin/v1/{tail:.*}", admin),
                web.get("/console", admin),
                web.get("/console/data", admin),
            ]
        )
        return app

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics``: all processes as one gateway."""
        await asyncio.gather(*(child.scrape() for child in self._children if child.is_ready))
        living = [child.snapshot for child in self._children if child.snapshot is not None]
        windows = [child.windows for child in self._children if child.windows is not None]
        merged: Snapshot = {}
        # From here on a process that dies changes nothing of what is merged.
        await in_slices(merging(living, dict(self._ended), merged))
        scopes: dict[tuple[str, str], Recent] = {}
        await in_slices(merging_windows(windows, self._clock(), scopes))
        is_open = wants_open_metrics(request.headers.get("accept", ""))
        own = chain(gauges(scopes), self.own_metrics())
        pieces = chain(rendering(merged, open_metrics=is_open), write(own, open_metrics=is_open))
        return web.Response(
            body="".join(await in_slices(pieces)).encode(),
            headers={"content-type": content_type(open_metrics=is_open)},
        )

    async def live(self, _request: web.Request) -> web.Response:
        """``GET /health/live``: the supervisor answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """``GET /health/ready``: 200 while any process takes requests."""
        num_ready = sum(child.is_ready for child in self._children)
        status = {"status": "ready" if num_ready else "not_ready", "processes": num_ready}
        return web.json_response(status, status=200 if num_ready else 503)

    async def _admin(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        body = await request.read()
        living = [child for child in self._children if child.is_ready]
        if living and (request.method, request.path) in STREAMED:
            try:
                return await living[0].peer.stream(request, headers)
            except ConnectionError:
                return _unavailable()
        merged = (MERGED if request.method == "GET" else MERGED_POSTS).get(request.path)
        if request.path == "/console/data":
            merged = partial(merge_console, is_reloaded=self._is_reloaded())
        is_one = request.path in BY_ONE or request.path.endswith(BY_ONE_SUFFIX)
        if merged is None and (request.method == "GET" or is_one):
            living = living[:1]
        answers = await _asked(living, request.method, request.path_qs, headers, body)
        if (refusal := _refusal(answers)) is not None:
            return refusal
        if merged is not None:
            documents = [orjson.loads(answer.body) for answer in answers]
            answers[0].body = orjson.dumps(merged(documents))
        return answers[0].response()

    async def _usage(self, request: web.Request, headers: dict[str, str]) -> web.Response:
        """``GET /admin/v1/usage``: what tenants used in all processes, those that died included."""
        wanted = headers.pop("accept", "")
        living = [child for child in self._children if child.is_ready]
        # So that what is told here stays counted when a process dies.
        await asyncio.gather(*(child.scrape() for child in living))
        answers = await _asked(living, "GET", f"{USAGE_PATH}?scope=process", headers)
        elsewhere = await _asked(living[:1], "GET", f"{USAGE_PATH}?scope=others", headers)
        if (refusal := _refusal([*answers, *elsewhere])) is not None:
            return refusal
        documents = [orjson.loads(answer.body) for answer in answers]
        others = orjson.loads(elsewhere[0].body) if elsewhere else NOBODY_ELSE
        document = merged_usage(documents, others, self._ended, self._since_unix_s)
        if wants_csv(request.query, wanted):
            return web.Response(
                body=usage_csv(document), headers={"content-type": CSV_CONTENT_TYPE}
            )
        answers[0].body = orjson.dumps(document)
        return answers[0].response()

    def own_metrics(self) -> Iterator[Metric]:
        """Yield what only the supervisor knows."""
        yield GaugeMetricFamily(
            "warmlane_processes",
            "Processes that take requests",
            value=sum(child.is_ready for child in self._children),
        )
        yield CounterMetricFamily(
            "warmlane_process_restarts",
            "Times a process was started again",
            value=sum(child.num_restarts for child in self._children),
        )
        yield from self._own()


async def _asked(
    living: Sequence[Child], method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> list[Answer]:
    """Return what those processes answer that do."""
    asked = await asyncio.gather(
        *(child.peer.ask(method, path, headers, body) for child in living), return_exceptions=True
    )
    return [answer for answer in asked if isinstance(answer, Answer)]


def _refusal(answers: Sequence[Answer]) -> web.Response | None:
    """Return the first answer that is an error, one of our own where nobody answers, or None."""
    for answer in answers:
        if answer.status >= 400:
            return answer.response()
    return None if answers else _unavailable()


def _unavailable() -> web.Response:
    error = {"message": "No process answers; they are starting or were stopped.",
             "type": "server_error", "param": None, "code": "unavailable"}  # fmt: skip
    return web.json_response({"error": error}, status=503, headers={"retry-after": "1"})

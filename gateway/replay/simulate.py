"""The event loop of the fleet simulator: arrivals, engine steps, shared load, failures, scaling."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.replay.engine import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.replay.fleet import Fleet, Placement, Router
    from gateway.replay.traces import Request
    from gateway.replay.transfers import Links

# How far a jittered draw moves an open-loop arrival, in seconds of the trace.
JITTER_S = 5.0
# What is urgent is told at most this often, as a share of the regular time: 5 ms of 50 ms in the
# product.
URGENT_SHARE = 0.1
# Requests between two calls of the progress function.
PROGRESS_ROWS = 200


class Failure(NamedTuple):
    """Workers that lose everything at ``at_s`` and take requests again ``down_s`` later."""

    at_s: float
    down_s: float
    num_workers: int


class Scaling(NamedTuple):
    """Workers added (or, negative, drained) at ``at_s``."""

    at_s: float
    num_workers: int


class Load(msgspec.Struct, frozen=True):
    """How a trace is played.

    Attributes:
        scale: How much faster than recorded requests come; think times stay.
        num_gateways: Gateways that share the traffic at random.
        share_every_s: How often each tells the others its books; infinite = never.
        seed: For ties, gateways and jitter.
        jitter: Number of the jittered draw; 0 = arrivals as recorded.
        failures: Workers that fail.
        scalings: Workers that come and go.
    """

    scale: float = 1.0
    num_gateways: int = 1
    share_every_s: float = inf
    seed: int = 0
    jitter: int = 0
    failures: Sequence[Failure] = ()
    scalings: Sequence[Scaling] = ()


class Served:
    """What became of one request.

    Attributes:
        request: As in the trace.
        number: Its place in the order of arrival.
        arrived_s: When it came.
        gateway: Which gateway took it.
        first_token_s: When its first token came; None until then.
        placement: Where it was sent, at last.
        job: As the engine saw it, at last.
        is_lost: Its worker failed after the first token.
        pulled: Tokens moved for it, and the seconds that took; until its first token.
    """

    __slots__ = (
        "arrived_s",
        "first_token_s",
        "gateway",
        "is_lost",
        "job",
        "number",
        "placement",
        "pulled",
        "request",
    )

    def __init__(self, request: Request, number: int, arrived_s: float, gateway: int) -> None:
        self.request = request
        self.number = number
        self.arrived_s = arrived_s
        self.gateway = gateway
        self.first_token_s: float | None = None
        self.placement: Placement | None = None
        self.job: Job | None = None
        self.is_lost = False
        self.pulled = (0, 0.0)


class Simulation:
    """One run of one trace with one router.

    Args:
        requests: The trace.
        fleet: The engines.
        router: Who routes.
        load: How the trace is played.
        links: Transfers between workers; None = there are none.
        progress: Told how many requests have come, now and then.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        fleet: Fleet,
        router: Router,
        load: Load,
        *,
        links: Links | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._load = load
        self._links = links
        self._progress = progress
        self._rng = Random(load.seed * 7919 + 1)
        self._served: list[Served] = []
        self._children: dict[int, list[Request]] = {}
        self._in_flight: list[dict[Job, Served]] = [{} for _ in fleet.engines]
        self._homeless: list[Served] = []
        self._scheduled: list[float] = [inf for _ in fleet.engines]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        # When each gateway last told the others something, or is about to.
        self._told_s = [0.0] * load.num_gateways
        self._num_events = 0
        self._num_open = len(requests)
        if router.wants_events:
            fleet.listen(fleet.events.announce)
        self._schedule_trace(requests)

    def run(self) -> list[Served]:
        """Play the whole trace; returns all requests in order of arrival."""
        fleet, heap = self._fleet, self._heap
        while heap and self._num_open:
            fleet.now_s, _, act = heapq.heappop(heap)
            act()
        return self._served

    # -- events

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (at_s, self._num_events, act))

    def _schedule_trace(self, requests: Sequence[Request]) -> None:
        load = self._load
        jitter = Random(load.jitter)
        for request in requests:
            if request.parent is not None:
                self._children.setdefault(request.parent, []).append(request)
                continue
            at_s = request.arrival_s
            if load.jitter:
                at_s = max(0.0, at_s + jitter.uniform(-JITTER_S, JITTER_S))
            self._at(at_s / load.scale, partial(self._arrive, request))
        for failure in load.failures:
            self._at(failure.at_s, partial(self._fail, failure))
        for scaling in load.scalings:
            self._at(scaling.at_s, partial(self._rescale, scaling))
        if load.num_gateways > 1 and load.share_every_s < inf:
            for gateway in range(load.num_gateways):
                first_s = load.share_every_s * gateway / load.num_gateways
                self._at(first_s, partial(self._share, gateway))

    def _share(self, gateway: int) -> None:
        self._tell(gateway)
        self._at(self._fleet.now_s + self._load.share_every_s, partial(self._share, gateway))

    def _share_soon(self, gateway: int) -> None:
        """Share before the next regular time, unless that is about to happen anyway."""
        load, now_s = self._load, self._fleet.now_s
        if load.num_gateways == 1 or load.share_every_s == inf or self._told_s[gateway] > now_s:
            return
        at_s = max(now_s, self._told_s[gateway] + URGENT_SHARE * load.share_every_s)
        self._told_s[gateway] = at_s
        self._at(at_s, partial(self._tell, gateway))

    def _tell(self, gateway: int) -> None:
        self._told_s[gateway] = max(self._told_s[gateway], self._fleet.now_s)
        self._router.share(gateway, self._fleet.now_s)

    def _arrive(self, request: Request) -> None:
        gateways = self._load.num_gateways
        gateway = self._rng.randrange(gateways) if gateways > 1 else 0
        served = Served(request, len(self._served), self._fleet.now_s, gateway)
        self._served.append(served)
        if self._progress is not None and len(self._served) % PROGRESS_ROWS == 0:
            self._progress(len(self._served))
        self._send(served)

    def _send(self, served: Served) -> None:
        fleet, request = self._fleet, served.request
        now_s = fleet.now_s
        if not fleet.routable:
            self._homeless.append(served)
            return
        placement = served.placement = self._router.route(request, served.gateway, now_s)
        job = served.job = Job(request.blocks, request.prompt_tokens, request.output_tokens, served)
        worker = placement.worker
        if placement.pull is not None and placement.pull.is_free:
            job.pulled_blocks, job.pulled_s = placement.pull.num_blocks, now_s
        elif placement.pull is not None and self._links is not None:
            served.pulled = self._links.start(placement, job, now_s)
        if placement.is_urgent:
            self._share_soon(served.gateway)
        self._in_flight[worker][job] = served
        # Steps that end at this very moment come first.
        self._advance(worker)
        fleet.engines[worker].submit(job, now_s)
        self._watch(worker)

    def _watch(self, worker: int) -> None:
        """Have the engine's next end looked at."""
        next_s = self._fleet.engines[worker].next_s
        if next_s != self._scheduled[worker]:
            self._scheduled[worker] = next_s
            if next_s < inf:
                self._at(next_s, partial(self._step, worker))

    def _step(self, worker: int) -> None:
        if self._scheduled[worker] != self._fleet.now_s:
            return  # the stretch was cut, or its engine is gone
        self._advance(worker)
        self._scheduled[worker] = inf
        self._watch(worker)

    def _advance(self, worker: int) -> None:
        now_s = self._fleet.now_s
        for job in self._fleet.engines[worker].advance(now_s):
            served = self._in_flight[worker][job]
            placement = served.placement
            assert placement is not None
            if served.first_token_s is None:
                served.first_token_s = job.first_token_s
                if self._links is not None:
                    self._links.computed(job)
            if served.pulled[0]:  # the worker reports it with its answer
                self._router.pulled(placement, *served.pulled)
                served.pulled = (0, 0.0)
            self._router.first_token(placement, now_s)
            if job.finished_s is not None:
                del self._in_flight[worker][job]
                self._router.finished(placement, job, now_s)
                self._end(served)

    def _end(self, served: Served) -> None:
        self._num_open -= 1
        for child in self._children.pop(served.request.row, ()):
            at_s = self._fleet.now_s + child.think_s
            self._at(at_s, partial(self._arrive, child))

    # -- workers that come and go

    def _fail(self, failure: Failure) -> None:
        fleet = self._fleet
        lost: list[Served] = []
        for worker in fleet.routable[: failure.num_workers]:
            fleet.stop(worker)
            self._scheduled[worker] = inf
            self._router.down(worker, fleet.now_s)
            lost += self._in_flight[worker].values()
            self._in_flight[worker] = {}
            self._at(fleet.now_s + failure.down_s, partial(self._recover, worker))
        for served in lost:
            assert served.placement is not None
            self._router.failed(served.placement, fleet.now_s)
            if served.first_token_s is None:
                self._send(served)
            else:
                served.is_lost = True
                self._end(served)

    def _recover(self, worker: int) -> None:
        self._fleet.start(worker)
        self._router.up(worker, self._fleet.now_s)
        self._send_homeless()

    def _send_homeless(self) -> None:
        homeless, self._homeless = self._homeless, []
        for served in homeless:
            self._send(served)

    def _rescale(self, scaling: Scaling) -> None:
        fleet = self._fleet
        for _ in range(scaling.num_workers):
            worker = fleet.add()
            self._in_flight.append({})
            self._scheduled.append(inf)
            self._router.up(worker, fleet.now_s)
            self._send_homeless()
        for _ in range(-scaling.num_workers):
            worker = fleet.routable[-1]
            fleet.drain(worker)
            self._router.draining(worker, fleet.now_s)

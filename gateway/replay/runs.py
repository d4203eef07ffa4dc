"""One policy on one trace, end to end: set up a fleet, play the trace, sum up what was served."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from gateway.replay.engine import EngineModel
from gateway.replay.fleet import EVENT_DELAY_S, Fleet
from gateway.replay.registry import make_router
from gateway.replay.shared_load import Hub
from gateway.replay.simulate import Load, Simulation
from gateway.replay.summary import Slo, Summary, summarize
from gateway.replay.transfers import Links, Store
from gateway.routing.cost import STORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.replay.simulate import Served
    from gateway.replay.traces import Trace

# The search for the capacity ends when the bounds are this close.
CAPACITY_PRECISION = 1.02
# Loads outside of this range of the first one are not searched.
MAX_CAPACITY_FACTOR = 16.0
# The search goes up or down by this much until the objective is met on one side only.
CAPACITY_STEP = 1.5
# Share of requests that must meet the objective for a load to count as carried.
CAPACITY_GOODPUT = 0.9


class Setup(msgspec.Struct, frozen=True):
    """A fleet and how it is loaded.

    Attributes:
        model: What each engine can do.
        num_workers: How many there are.
        load: How the trace is played.
        slo: What a good answer is.
        peer_bytes_per_s: Between two workers; 0 = they cannot pull.
        store_bytes_per_s: From the shared store; 0 = there is none.
        store_tokens: KV tokens it keeps.
        event_delay_s: How late cache events are.
    """

    model: EngineModel
    num_workers: int = 16
    load: Load = Load()
    slo: Slo = Slo()
    peer_bytes_per_s: float = 0.0
    store_bytes_per_s: float = 0.0
    store_tokens: int = 0
    event_delay_s: float = EVENT_DELAY_S

    def at(self, scale: float) -> Setup:
        """Return the same at another load."""
        return msgspec.structs.replace(self, load=msgspec.structs.replace(self.load, scale=scale))


def check_fits(trace: Trace, model: EngineModel, path: str) -> None:
    """Refuse a trace with a request that no engine of this size can ever serve.

    Raises:
        ValueError: Names the line and both sizes.
    """
    for request in trace.requests:
        needed = model.blocks_needed(request.prompt_tokens, max(1, request.output_tokens))
        if needed > model.gpu_blocks:
            raise ValueError(
                f"{path}:{request.line}: a request of {request.prompt_tokens} + "
                f"{request.output_tokens} tokens never fits: a worker has "
                f"{model.gpu_blocks * model.block_tokens} tokens of KV memory"
            )


def play(
    trace: Trace, policy: str, setup: Setup, progress: Callable[[int], None] | None = None
) -> tuple[list[Served], Links]:
    """Play a trace; returns what was served and what was transferred.

    Raises:
        PolicyError: If the policy does not exist.
        ValueError: If a request never fits.
    """
    load = setup.load
    fleet = Fleet(setup.model, setup.num_workers, event_delay_s=setup.event_delay_s)
    hub = Hub(load.num_gateways, is_shared=load.share_every_s < inf)
    store = None
    if setup.store_tokens:
        blocks = setup.store_tokens // setup.model.block_tokens
        store = Store(blocks, fleet.announcer(STORE))
    links = Links(
        fleet,
        peer_bytes_per_s=setup.peer_bytes_per_s,
        store_bytes_per_s=setup.store_bytes_per_s,
        store=store,
    )
    can_pull = bool(setup.peer_bytes_per_s or store)
    router = make_router(
        policy,
        fleet,
        hub,
        trace.requests,
        seed=load.seed,
        can_pull=can_pull,
        peers_reach=bool(setup.peer_bytes_per_s),
    )
    simulation = Simulation(trace.requests, fleet, router, load, links=links, progress=progress)
    return simulation.run(), links


def run(
    trace: Trace, policy: str, setup: Setup, progress: Callable[[int], None] | None = None
) -> Summary:
    """Play a trace and sum it up."""
    served, links = play(trace, policy, setup, progress)
    return summarize(policy, setup.load, served, setup.slo, links)


def capacity(trace: Trace, policy: str, setup: Setup) -> float | None:
    """Return the largest load scale at which enough requests meet the objective.

    Returns:
        None if no load within ``MAX_CAPACITY_FACTOR`` of the setup's does.
    """

    def is_carried(scale: float) -> bool:
        return run(trace, policy, setup.at(scale)).goodput >= CAPACITY_GOODPUT

    start = setup.load.scale
    low = high = start
    if is_carried(start):
        while is_carried(high := high * CAPACITY_STEP):
            low = high
            if high > start * MAX_CAPACITY_FACTOR:
                return low
    else:
        while not is_carried(low := low / CAPACITY_STEP):
            high = low
            if low < start / MAX_CAPACITY_FACTOR:
                return None
    while high > low * CAPACITY_PRECISION:
        middle = (low * high) ** 0.5
        if is_carried(middle):
            low = middle
        else:
            high = middle
    return low

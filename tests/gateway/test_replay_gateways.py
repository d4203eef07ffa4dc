"""Several simulated gateways: what they tell each other, when, and what it is worth."""

from __future__ import annotations

from math import inf

import pytest

from gateway.replay.fleet import Fleet
from gateway.replay.ours import OursRouter
from gateway.replay.presets import LLAMA_8B
from gateway.replay.runs import run
from gateway.replay.shared_load import Hub
from gateway.replay.simulate import Load
from gateway.routing.books import Books
from gateway.routing.others import WorkerLoad
from tests.gateway.replay_parts import conversation, request, setup

SIZE = 512


def test_a_gateway_sees_the_others_as_they_spoke_last_and_itself_as_it_is() -> None:
    hub = Hub(3, is_shared=True)
    books = [{"w0": Books(SIZE), "w1": Books(SIZE)} for _ in range(3)]
    for gateway, own in enumerate(books):
        charge = own["w0"].charge(
            1.0, prompt_tokens=100 * (gateway + 1), uncached_tokens=50, prefill_s=0.25
        )
        hub.say(gateway, own, 2.0 + gateway)
        if gateway == 1:
            own["w0"].first_token(charge, 9.0)

    assert hub.views[0].of("w0") == WorkerLoad(2, 100, 0.5, 200 + 300 + 2 * 200, 1.0, 0.0)
    assert hub.views[0].of("w1") is None
    assert hub.views[0].age_s(5.0) == 2.0
    assert hub.views[1].age_s(5.0) == 3.0
    hub.say(1, books[1], 10.0)
    assert hub.views[0].of("w0") == WorkerLoad(2, 50, 0.25, 900, 9.0, 0.0)
    assert len(hub.views[0]) == 2


def test_unshared_load_is_of_unknown_age_and_a_single_gateway_has_no_others() -> None:
    assert Hub(2, is_shared=False).views[0].age_s(0.0) == inf
    assert Hub(1, is_shared=True).views[0].age_s(1e9) == 0.0


@pytest.mark.parametrize("policy", ["ours", "least_requests", "dynamo"])
def test_load_shared_often_is_worth_more_than_load_shared_never(policy: str) -> None:
    read = conversation()
    ttfts = [
        run(
            read,
            policy,
            setup(4, load=Load(scale=4.0, num_gateways=8, share_every_s=every_s, seed=1)),
        ).ttft_mean_s
        for every_s in (0.05, inf)
    ]
    alone = run(read, policy, setup(4, load=Load(scale=4.0))).ttft_mean_s

    assert ttfts[0] < ttfts[1]
    assert ttfts[0] < 1.5 * alone


def test_a_cold_prompt_is_told_at_once_and_its_sibling_follows_through_another_gateway() -> None:
    fleet = Fleet(LLAMA_8B, 8)
    router = OursRouter(fleet, Hub(2, is_shared=True), seed=1)
    ids = list(range(80))
    first = router.route(request(0, 0.0, ids), 0, 1.0)
    assert first.is_urgent
    router.share(0, 1.001)
    sibling = router.route(request(1, 0.0, [*ids, 7]), 1, 1.002)
    assert sibling.worker == first.worker

    other = OursRouter(Fleet(LLAMA_8B, 8), Hub(2, is_shared=True), seed=1)
    alone = other.route(request(0, 0.0, ids), 0, 1.0)
    assert other.pools[1].pending.credit(request(1, 0.0, ids).blocks) == {}
    other.share(0, 1.001)
    assert other.pools[1].pending.credit(request(1, 0.0, ids).blocks) == {f"w{alone.worker}": 80}


def test_a_prompt_that_is_held_is_not_urgent() -> None:
    fleet = Fleet(LLAMA_8B, 2)
    router = OursRouter(fleet, Hub(2, is_shared=True), seed=1)
    held = request(0, 0.0, [1, 2, 3, 4])
    fleet.events.index.store("w1", held.blocks, b"\xffroot\xff" + bytes(10))
    placement = router.route(held, 0, 1.0)

    assert (placement.worker, placement.is_urgent) == (1, False)

"""Who comes next of those who wait."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.dispatch import GateFull, GateTimeout
from gateway.routing.fair import FairQueue, Standing
from tests.gateway.gate_parts import Waiters, settled


def served(queue: FairQueue[str], limit: int = 1000) -> list[str]:
    order: list[str] = []
    while len(queue) and len(order) < limit:
        place = next(queue.in_order())
        queue.serve(place)
        order.append(place.item)
    return order


def test_one_tenants_requests_are_served_in_their_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(5):
        queue.add(str(i), "a", 10.0 - i)

    assert served(queue) == ["0", "1", "2", "3", "4"]


def test_a_tenant_with_many_requests_does_not_hold_up_one_with_few() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.add("a", "a", 100.0)
    for _ in range(3):
        queue.add("b", "b", 100.0)

    assert served(queue, 6).count("b") == 3


def test_weights_share_what_is_served() -> None:
    queue: FairQueue[str] = FairQueue({"a": Standing(weight=3.0)})
    for _ in range(200):
        queue.add("a", "a", 50.0)
        queue.add("b", "b", 50.0)
    counts = Counter(served(queue, 100))

    assert abs(counts["a"] - 75) <= 1


def test_long_prompts_count_for_more_than_short_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.add("long", "a", 900.0)
        queue.add("short", "b", 100.0)
    counts = Counter(served(queue, 50))

    assert abs(counts["short"] - 45) <= 1


def test_priority_comes_before_fairness() -> None:
    standings = {"batch": Standing(priority=-1), "chat": Standing(priority=1)}
    queue: FairQueue[str] = FairQueue(standings)
    for tenant in ("batch", "usual", "chat", "batch", "usual", "chat"):
        queue.add(tenant, tenant, 1.0)

    assert served(queue) == ["chat", "chat", "usual", "usual", "batch", "batch"]


def test_a_tenant_that_was_away_has_saved_up_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.add("a", "a", 1.0)
    served(queue, 90)
    for _ in range(10):
        queue.add("b", "b", 1.0)

    assert abs(served(queue, 10).count("b") - 5) <= 1


def test_leaving_costs_a_tenant_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    gone = [queue.add("a", "a", 1000.0) for _ in range(10)]
    for _ in range(5):
        queue.add("b", "b", 1.0)
    for place in gone:
        assert queue.leave(place)
    queue.add("a", "a", 1.0)

    assert "a" in served(queue, 2)
    assert not queue.leave(gone[0])


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(10_000):
        queue.add("x", f"tenant {i}", 1.0)
        served(queue)

    assert len(queue._served) <= 1001
    assert not queue._lines


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 1e6), st.booleans()),
        max_size=40,
    )
)
def test_everybody_is_served_once_or_leaves_and_order_predicts_service(
    requests: list[tuple[str, float, bool]],
) -> None:
    queue: FairQueue[int] = FairQueue({"a": Standing(2.0, 1)})
    places = [queue.add(i, tenant, cost) for i, (tenant, cost, _) in enumerate(requests)]
    left = {i for i, (_, _, leaves) in enumerate(requests) if leaves and queue.leave(places[i])}
    expected = [place.item for place in queue.in_order()]
    assert len(queue) == len(expected) == len(requests) - len(left)
    order = []
    while len(queue):
        place = next(queue.in_order())
        queue.serve(place)
        order.append(place.item)

    assert sorted(order) == sorted(expected)
    # Ties may be taken in another order once a line was begun anew.
    assert [i for i in order if requests[i][0] == "a"] == [
        i for i in expected if requests[i][0] == "a"
    ]


async def test_those_who_wait_are_served_by_priority_and_fairly() -> None:
    w = Waiters(1, standings={"vip": Standing(priority=5), "big": Standing(weight=2.0)})
    w.pool.workers["w0"].capacity_tokens = 1000
    from gateway.routing.dispatch import Outcome

    ticket = await w.send(600)
    names = ["big", "small", "big", "small", "big", "small", "vip"]
    tasks = [(name, await w.wait(600, tenant=name)) for name in names]
    order = []
    while tasks:
        ticket.finish(Outcome.OK)
        await settled(w.timers)
        ((name, task),) = [(name, task) for name, task in tasks if task.done()]
        tasks.remove((name, task))
        order.append(name)
        result = task.result()
        assert result is not None
        ticket = result
    ticket.finish(Outcome.OK)

    assert order[0] == "vip"
    assert Counter(order[1:4]) == Counter({"big": 2, "small": 1})


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=30),
    st.sampled_from("abcd"),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1.0, 2.0, 5.0])),
)
def test_who_makes_room_has_more_than_who_comes(
    waiting: list[str], comes: str, weights: dict[str, float]
) -> None:
    queue: FairQueue[str] = FairQueue({name: Standing(weight) for name, weight in weights.items()})
    for number, tenant in enumerate(waiting):
        queue.add(f"{tenant}{number}", tenant, 1.0)

    place = queue.surplus(comes)

    counts = Counter(waiting)
    mine = (counts[comes] + 1) / weights.get(comes, 1.0)
    shares = {name: (n - 1) / weights.get(name, 1.0) for name, n in counts.items()}
    others = {name: share for name, share in shares.items() if name != comes}
    if place is None:
        fullest = max(counts, key=lambda name: counts[name] / weights.get(name, 1.0))
        assert fullest == comes or shares[fullest] < mine
    else:
        assert others[place.tenant] >= mine
        last = max(i for i, tenant in enumerate(waiting) if tenant == place.tenant)
        assert place.item == f"{place.tenant}{last}"


def test_a_higher_rank_never_makes_room_for_a_lower_one_and_a_lower_one_always_does() -> None:
    queue: FairQueue[str] = FairQueue({"vip": Standing(priority=1)})
    for number in range(3):
        queue.add(f"v{number}", "vip", 1.0)

    assert queue.surplus("usual") is None

    queue.add("u0", "usual", 1.0)
    place = queue.surplus("vip")
    assert place is not None
    assert place.item == "u0"


async def test_a_full_queue_makes_room_for_a_tenant_that_has_less_of_it() -> None:
    waiters = Waiters()
    waiters.pool.max_queue = 4
    await waiters.send()
    flood = [await waiters.wait(tenant="flood") for _ in range(4)]

    few = await waiters.wait(tenant="few")
    await settled(waiters.timers)

    refused = [task for task in flood if task.done()]
    assert len(refused) == 1
    with pytest.raises(GateFull):
        refused[0].result()
    assert refused[0] is flood[-1]
    # It has its share now, and the flood no more to give.
    more = [await waiters.wait(tenant="few") for _ in range(2)]
    assert waiters.num_waiting == 4
    assert [task.done() for task in (few, *more)] == [False, False, True]
    await settled(waiters.timers, 31.0)
    ends = await asyncio.gather(*flood, few, *more, return_exceptions=True)
    assert sum(isinstance(end, GateFull) for end in ends) == 3


async def test_a_request_waits_no_longer_than_its_client() -> None:
    waiters = Waiters()
    await waiters.send()
    plan = await waiters.plan()
    plan.inbound.deadline_s = waiters.clock.now_s + 0.5
    task = asyncio.create_task(waiters.routes.wait(plan, waiters.routes.choose(plan)))
    await asyncio.sleep(0)
    await settled(waiters.timers, 0.4)
    assert not task.done()

    await settled(waiters.timers, 0.2)

    with pytest.raises(GateTimeout) as late:
        task.result()
    assert late.value.waited_s == pytest.approx(0.5)


async def test_a_request_whose_client_has_given_up_already_does_not_wait() -> None:
    waiters = Waiters()
    await waiters.send()
    plan = await waiters.plan()
    plan.inbound.deadline_s = waiters.clock.now_s - 1.0
    task = asyncio.create_task(waiters.routes.wait(plan, waiters.routes.choose(plan)))
    await settled(waiters.timers)
    await settled(waiters.timers)

    with pytest.raises(GateTimeout):
        await task

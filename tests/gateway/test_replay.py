"""The fleet simulator: every policy plays real traffic, and nothing is lost, doubled or leaked."""

from __future__ import annotations

from collections import Counter
from math import inf

import msgspec
import pytest

from gateway.replay.fleet import Fleet
from gateway.replay.ours import OursRouter, without_term
from gateway.replay.peers import PeerRouter
from gateway.replay.presets import LLAMA_8B
from gateway.replay.registry import NAMES, PolicyError, check_policy, make_router
from gateway.replay.residency import EventIndex, History, worker_id
from gateway.replay.rules import common_depth
from gateway.replay.runs import Setup, capacity, check_fits, play, run
from gateway.replay.shared_load import Hub
from gateway.replay.simulate import Failure, Load, Scaling, Served, Simulation
from gateway.replay.summary import Slo, mean_summary
from gateway.routing.choose import choose
from tests.gateway.replay_parts import (
    agentic,
    chain,
    conversation,
    request,
    setup,
    trace,
)

SIZE = 512


def ttft_s(served: Served) -> float:
    assert served.first_token_s is not None
    return served.first_token_s - served.arrived_s


def busy(scale: float = 2.0, **load: object) -> Setup:
    """Four workers with so little memory that they evict."""
    return setup(4, load=Load(scale=scale, **load), gpu_tokens=130_000)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [*NAMES, "dynamo:prefill_load_scale=8", "ours:learn=1"])
def test_every_policy_serves_every_request_once(policy: str) -> None:
    read = conversation()
    del read.requests[150:]
    served, _ = play(read, policy, busy())

    assert sorted(one.request.row for one in served) == list(range(150))
    for one in served:
        assert one.job is not None
        assert one.arrived_s <= (one.first_token_s or -1) <= (one.job.finished_s or -1)
        assert one.job.hit_tokens < one.request.prompt_tokens


@pytest.mark.parametrize("policy", ["ours", "sglang", "llmd", "power_of_two"])
def test_equal_seeds_are_equal_runs_and_jitter_makes_another(policy: str) -> None:
    read = conversation()
    same = [run(read, policy, busy(seed=3)) for _ in range(2)]
    other = run(read, policy, busy(seed=3, jitter=1))

    assert same[0] == same[1]
    assert other.ttft_mean_s != same[0].ttft_mean_s


def test_warm_routing_beats_blind_routing_on_agents_and_the_oracle_beats_both() -> None:
    read = agentic()
    load = Load(scale=10.0)
    by_policy = {
        policy: run(read, policy, setup(4, load=load))
        for policy in ("round_robin", "ours", "oracle", "oracle_infinite")
    }
    ours, oracle = by_policy["ours"], by_policy["oracle"]

    assert ours.ttft_mean_s < 0.5 * by_policy["round_robin"].ttft_mean_s
    assert ours.hit_rate > by_policy["round_robin"].hit_rate + 0.1
    assert oracle.ttft_mean_s <= 1.01 * ours.ttft_mean_s
    assert by_policy["oracle_infinite"].hit_rate >= oracle.hit_rate >= ours.hit_rate - 0.01


def test_a_closed_loop_request_comes_its_think_time_after_its_parent_ended() -> None:
    served, _ = play(agentic(), "ours", setup(4, load=Load(scale=5.0)))
    by_row = {one.request.row: one for one in served}
    children = [one for one in served if one.request.parent is not None]

    assert len(children) > 200
    for one in children:
        parent = by_row[one.request.parent or 0]
        assert parent.job is not None
        ended_s = parent.job.finished_s or inf
        assert one.arrived_s == pytest.approx(ended_s + one.request.think_s)
    assert all(
        one.arrived_s == pytest.approx(one.request.arrival_s / 5.0)
        for one in served
        if one.request.parent is None
    )


def parts(policy: str, num_workers: int, load: Load, model: object = LLAMA_8B) -> tuple[Fleet, Hub]:
    fleet = Fleet(model, num_workers)  # type: ignore[arg-type]
    return fleet, Hub(load.num_gateways, is_shared=load.share_every_s < inf)


@pytest.mark.parametrize("policy", ["ours", "dynamo"])
def test_books_index_and_engines_agree_when_nothing_is_in_flight(policy: str) -> None:
    read, load = conversation(), Load(scale=3.0, failures=(Failure(60.0, 5.0, 2),))
    model = msgspec.structs.replace(LLAMA_8B, gpu_tokens=130_000, cpu_tokens=60_000)
    fleet, hub = parts(policy, 4, load, model)
    router = make_router(policy, fleet, hub, read.requests)
    Simulation(read.requests, fleet, router, load).run()
    fleet.events.sync(inf)

    for worker, engine in enumerate(fleet.engines):
        assert engine.cache.num_pinned == 0
        assert fleet.events.index.held_blocks(worker_id(worker)) == engine.cache.num_cached
    if isinstance(router, OursRouter):
        books = [w.books for pool in router.pools for w in pool.workers.values()]
    else:
        assert isinstance(router, PeerRouter)
        books = list(router.books[0].values())
    assert {(b.in_flight, b.queued_tokens, b.queued_s, b.active_tokens) for b in books} == {
        (0, 0, 0.0, 0)
    }


@pytest.mark.parametrize("policy", NAMES)
def test_requests_of_a_failed_worker_are_served_elsewhere_or_counted_as_lost(policy: str) -> None:
    requests = [request(i, 0.02 * i, [i, 100 + i], output_tokens=400) for i in range(60)]
    load = Load(failures=(Failure(0.6, 2.0, 2),))
    served, _ = play(trace(*requests), policy, setup(3, load=load))

    assert sorted(one.request.row for one in served) == list(range(60))
    assert all(one.first_token_s is not None for one in served)
    lost = [one for one in served if one.is_lost]
    assert lost
    assert all(one.placement is not None and one.placement.worker in (0, 1) for one in lost)
    away = [one.placement.worker for one in served if one.placement and 0.6 < one.arrived_s < 2.6]
    assert set(away) == {2}


def test_lost_answers_are_no_good_answers() -> None:
    requests = [request(i, 0.02 * i, [i], output_tokens=400) for i in range(60)]
    summary = run(trace(*requests), "ours", setup(3, load=Load(failures=(Failure(0.9, 2.0, 3),))))

    assert summary.num_lost > 20
    assert summary.goodput <= 1 - summary.num_lost / summary.num_requests


def test_requests_wait_while_every_worker_is_down() -> None:
    requests = [request(0, 0.0, [1]), request(1, 1.0, [2])]
    served, _ = play(
        trace(*requests), "ours", setup(1, load=Load(failures=(Failure(0.9, 3.0, 1),)))
    )

    assert (served[1].first_token_s or 0) > 3.9


@pytest.mark.parametrize("policy", NAMES)
def test_new_workers_are_used_and_drained_ones_are_not(policy: str) -> None:
    requests = [request(i, 0.05 * i, [i]) for i in range(200)]
    scalings = (Scaling(3.0, 2), Scaling(7.0, -2))
    served, _ = play(trace(*requests), policy, setup(2, load=Load(scalings=scalings)))
    used = {
        name: {
            one.placement.worker for one in served if one.placement and low < one.arrived_s < high
        }
        for name, low, high in (("before", 0, 3), ("wide", 3, 7), ("after", 7, 99))
    }

    assert used["before"] <= {0, 1}
    assert used["wide"] & {2, 3}
    assert used["after"] <= {0, 1}


def test_a_prompt_goes_to_the_worker_that_holds_it_once_its_events_are_there() -> None:
    ids = list(range(40))
    requests = [request(i, 5.0 * i, ids) for i in range(4)]
    served, _ = play(trace(*requests), "ours", setup(8))

    assert len({one.placement.worker for one in served if one.placement}) == 1
    assert [one.job.hit_tokens for one in served if one.job] == [0, *[40 * SIZE] * 3]
    assert [one.placement.predicted_hit_tokens for one in served if one.placement] == [
        one.job.hit_tokens for one in served if one.job
    ]


def test_events_count_from_their_delay_on() -> None:
    index = EventIndex(SIZE, 0.005)
    fleet = Fleet(LLAMA_8B, 1)
    fleet.listen(index.announce)
    fleet.engines[0].cache.pin([], 2)
    fleet.now_s = 1.0
    fleet.engines[0].cache.publish(chain(1, 2), b"")

    index.sync(1.004)
    assert index.index.match(chain(1, 2)) == {}
    index.sync(1.005)
    assert index.index.match(chain(1, 2))["w0"].gpu == 2 * SIZE
    index.clear(0)
    assert index.index.match(chain(1, 2)) == {}


def test_a_history_forgets_the_deepest_block_of_the_oldest_prompt() -> None:
    history = History(4_000_000)  # four blocks a worker
    history.routed(0, chain(1, 2, 3))
    history.routed(0, chain(1, 9))
    assert history.index.match(chain(1, 2, 3))["w0"].total == 3 * 4_000_000
    history.routed(0, chain(5))

    assert history.index.match(chain(1, 2, 3))["w0"].total == 2 * 4_000_000
    assert history.index.match(chain(1, 9))["w0"].total == 2 * 4_000_000
    history.clear(0)
    assert history.index.match(chain(1)) == {}


# -- moving KV


def hot_document() -> list[object]:
    ids = list(range(60))
    first = request(0, 0.0, ids)
    # Its holder computes long new prompts when the document is asked for again.
    return [first, *(request(i, 5.0, [*ids, 1000 * i, 1000 * i + 1]) for i in range(1, 40))]


@pytest.mark.parametrize("where", ["peer_bytes_per_s", "store_bytes_per_s"])
def test_a_prefix_is_pulled_where_its_holder_is_busy(where: str) -> None:
    read = trace(*hot_document())  # type: ignore[arg-type]
    still = run(read, "ours", setup(4))
    moving = msgspec.structs.replace(
        setup(4), **{where: 50e9}, store_tokens=1_000_000 if where.startswith("store") else 0
    )
    summary = run(read, "ours", moving)

    assert (still.num_pulls, still.pulled_gb) == (0, 0.0)
    if where.startswith("peer"):
        assert summary.num_pulls > 0
        assert summary.pulled_gb >= 60 * SIZE * LLAMA_8B.kv_bytes_per_token / 1e9
    assert summary.ttft_mean_s <= 1.02 * still.ttft_mean_s


def test_a_slow_network_is_found_out_and_left_alone() -> None:
    read = agentic()
    load = Load(scale=20.0)
    still = run(read, "ours", setup(4, load=load))
    slow = run(read, "ours", msgspec.structs.replace(setup(4, load=load), peer_bytes_per_s=0.2e9))

    assert slow.ttft_mean_s < 1.1 * still.ttft_mean_s


# -- policies and settings


def test_a_decision_without_a_term_is_the_least_sum_of_the_others() -> None:
    read = conversation()
    fleet, hub = parts("ours", 4, Load())
    router = OursRouter(fleet, hub, seed=1)
    decisions = []
    for one in read.requests[:80]:
        placement = router.route(one, 0, one.arrival_s)
        decisions.append(placement.token.ticket.decision)  # type: ignore[attr-defined]
    changed = 0
    for decision in decisions:
        again = without_term(decision, "W")
        costs = [e.cost - e.queue_s for e in decision.candidates]
        assert costs[again.position] == min(costs)
        assert again.estimate().worker == again.worker
        changed += again.worker != decision.worker
    assert changed > 0


def test_the_decisions_in_the_simulation_are_the_products_own() -> None:
    fleet, hub = parts("ours", 4, Load())
    router = OursRouter(fleet, hub, seed=1)
    for one in conversation().requests[:50]:
        decision = router.route(one, 0, one.arrival_s).token.ticket.decision  # type: ignore[attr-defined]
        assert choose(decision.input, rotation=decision.rotation) == decision


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("best", "unknown policy 'best': expected one of ours, ours-W"),
        ("ours-X", "unknown policy"),
        ("least_requests:a=1", "has no setting 'a'; it has: none"),
        ("dynamo:speed=1", "it has: overlap_credit, prefill_load_scale"),
        ("dynamo:disk=x", "disk must be a number, not 'x'"),
        ("", "unknown policy ''"),
    ],
)
def test_an_unknown_policy_or_setting_is_refused_with_the_known_ones(
    policy: str, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        check_policy(policy)


def test_the_block_after_the_system_prompt_tells_prompts_apart() -> None:
    requests = [request(i, 0.0, [0, 1, 100 + i % 40, 1000 + i]) for i in range(200)]
    assert common_depth(requests) == 2
    assert common_depth(conversation().requests) == 1


def test_a_trace_that_can_never_fit_is_refused_with_its_line() -> None:
    requests = [request(0, 0.0, [1]), request(1, 0.0, list(range(10)), output_tokens=600)]
    model = setup(1, gpu_tokens=10 * SIZE).model
    with pytest.raises(ValueError, match=r"t\.gz:2: a request of 5130 \+ 600 tokens never fits"):
        check_fits(trace(*requests), model, "t.gz")


def test_the_capacity_is_a_load_that_meets_the_objective_and_little_more_does_not() -> None:
    read = conversation()
    del read.requests[120:]
    small = setup(2)
    scale = capacity(read, "ours", small)
    assert scale is not None
    assert run(read, "ours", small.at(scale)).goodput >= 0.9
    assert run(read, "ours", small.at(scale * 1.3)).goodput < 0.9
    hopeless = msgspec.structs.replace(small, slo=Slo(1e-6, 1e-6))
    assert capacity(read, "ours", hopeless) is None


def test_several_draws_are_averaged() -> None:
    read = conversation()
    both = [run(read, "ours", busy(jitter=draw)) for draw in (1, 2)]
    mean = mean_summary(both)

    assert mean.ttft_mean_s == pytest.approx(sum(s.ttft_mean_s for s in both) / 2)
    assert mean.policy == "ours"


def test_two_random_workers_and_round_robin_use_all() -> None:
    for policy in ("random", "round_robin", "power_of_two"):
        served, _ = play(conversation(), policy, setup(4))
        counts = Counter(one.placement.worker for one in served if one.placement)
        assert set(counts) == {0, 1, 2, 3}
        if policy == "round_robin":
            assert set(counts.values()) == {100}

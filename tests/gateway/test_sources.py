"""Fetching KV from a peer or the shared store: when it is chosen, what it books, what is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.routing.choose import Decision, RouteInput, choose
from gateway.routing.cost import STORE, Candidate, CostModel, Estimate, Source, prefill_s
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, Usage
from gateway.routing.explain import decide_again, explain_json
from gateway.routing.pool import Pool
from gateway.routing.pull import MIN_PULL_TOKENS, PULL_LATENCY_S, PULL_START
from gateway.routing.sources import PullRequest, find_sources, pull_request
from prefix_index.index import Hit
from tests.gateway.routing_parts import (
    BLOCK,
    Clock,
    dispatcher,
    hold,
    ids,
    is_idle,
    let_pull,
    make_pool,
)

# A token is a millisecond of prefill; links are twenty times faster where nothing else is said.
MODEL = CostModel(1e-3, 0.0, 0.01, 0.0, 4000.0, 500.0, 500.0)
NOW_S = 100.0
PROMPT_TOKENS = 10_000
RATE = 20_000.0


def worker(k: int, **options: Any) -> Candidate:
    options = {"model": MODEL, "can_pull": True, "pull_rates": {"": RATE}} | options
    return Candidate(f"w{k}", **options)


def busy(k: int, wait_s: float, **options: Any) -> Candidate:
    return worker(k, queued_s=wait_s, progress_at_s=NOW_S, **options)


def decide(*candidates: Candidate, sources: list[Source]) -> Decision:
    return choose(RouteInput(NOW_S, PROMPT_TOKENS, list(candidates), sources=sources))


def of(decision: Decision, k: int) -> Estimate:
    return decision.candidates[k]


def test_while_the_holder_is_free_nothing_is_moved() -> None:
    decision = decide(worker(0, hit_gpu=8000), worker(1), sources=[Source("w0", 8000)])

    assert (decision.worker, decision.source, decision.pull_tokens) == ("w0", "own", 0)


def test_behind_a_busy_holder_the_prefix_is_pulled_by_another_worker() -> None:
    decision = decide(busy(0, 5.0, hit_gpu=8000), worker(1), sources=[Source("w0", 8000)])

    assert (decision.worker, decision.source) == ("w1", "peer:w0")
    assert (decision.pull_tokens, decision.hit_tokens) == (8000, 8000)
    pull_s = PULL_LATENCY_S + 8000 / RATE
    assert decision.ttft_s == pytest.approx(pull_s + prefill_s(MODEL, 2000, PROMPT_TOKENS) + 0.01)
    assert decision.estimate().pull_link_s == pytest.approx(8000 / RATE)


def test_a_pull_is_waited_for_only_as_far_as_it_outlasts_the_queue() -> None:
    source = [Source("w0", 8000)]
    for wait_s in (0.1, 0.42, 2.0):
        decision = decide(busy(0, 50.0, hit_gpu=8000), busy(1, wait_s), sources=source)
        e = of(decision, 1)

        assert e.queue_s + e.restore_s == pytest.approx(max(wait_s, PULL_LATENCY_S + 0.4))


def test_own_blocks_are_not_pulled_and_short_pulls_not_made() -> None:
    source = [Source("w0", 8000)]
    decision = decide(busy(0, 50.0, hit_gpu=8000), worker(1, hit_gpu=3000), sources=source)
    assert of(decision, 1).pull_tokens == 5000
    short = decide(busy(0, 50.0, hit_gpu=8000), worker(1, hit_gpu=5953), sources=source)
    assert (of(short, 1).pull_tokens, of(short, 1).source) == (0, "own")
    assert MIN_PULL_TOKENS - 1 == 8000 - 5953


def test_links_that_are_busy_are_waited_for() -> None:
    for out_s, in_s in ((3.0, 0.0), (0.0, 3.0), (3.0, 1.0)):
        decision = decide(
            busy(0, 50.0, hit_gpu=8000),
            worker(1, in_busy_until_s=NOW_S + in_s),
            sources=[Source("w0", 8000, NOW_S + out_s)],
        )

        assert of(decision, 1).restore_s == pytest.approx(PULL_LATENCY_S + 0.4 + 3.0)


def test_of_several_sources_the_cheapest_for_this_worker_is_taken() -> None:
    rates = {"": RATE, "w3": 100.0}
    sources = [Source("w3", 9000), Source("w0", 8000, NOW_S + 60.0), Source("w2", 7000)]
    decision = decide(
        busy(0, 50.0, hit_gpu=8000),
        worker(1, pull_rates=rates),
        busy(2, 50.0, hit_gpu=7000),
        busy(3, 50.0, hit_gpu=9000),
        sources=sources,
    )

    assert (decision.worker, decision.source) == ("w1", "peer:w2")


def test_the_shared_store_is_one_more_source() -> None:
    decision = decide(worker(0), worker(1), sources=[Source(STORE, 8000)])

    assert (decision.source, decision.pull_tokens) == ("store", 8000)


def test_a_slow_link_is_left_alone() -> None:
    slow = {"": 500.0}
    decision = decide(
        busy(0, 5.0, hit_gpu=8000), worker(1, pull_rates=slow), sources=[Source("w0", 8000)]
    )

    assert (decision.worker, decision.source) == ("w0", "own")


def test_an_unmeasured_link_is_believed_to_be_little_faster_than_computing() -> None:
    decision = decide(
        busy(0, 50.0, hit_gpu=8000), worker(1, pull_rates={}), sources=[Source("w0", 8000)]
    )

    assert of(decision, 1).pull_link_s == pytest.approx(8000 * MODEL.token_s / PULL_START)


def test_what_is_pulled_takes_memory_like_what_is_computed() -> None:
    full = {"capacity_tokens": 12_000, "held_tokens": 12_000, "lru_age_s": 10.0}
    source = [Source("w0", 8000)]
    pulling = decide(busy(0, 50.0, hit_gpu=8000), worker(1, **full), sources=source)
    computing = decide(busy(0, 50.0, hit_gpu=8000), worker(1, **full), sources=[])

    assert of(pulling, 1).pull_tokens
    assert of(pulling, 1).eviction_s == of(computing, 1).eviction_s > 0.0
    assert of(pulling, 1).memory_s == of(computing, 1).memory_s


def test_a_worker_that_cannot_pull_is_priced_as_ever() -> None:
    candidates = [busy(0, 5.0, hit_gpu=8000), worker(1, can_pull=False, hit_cpu=4000)]
    without = decide(*candidates, sources=[])
    decision = decide(*candidates, sources=[Source("w0", 8000)])

    assert decision.candidates[1] == without.candidates[1]


def test_computing_again_is_chosen_where_the_own_lower_tier_is_too_slow() -> None:
    slow_disk = {"hit_gpu": 1000, "hit_disk": 4000}
    told = choose(RouteInput(NOW_S, PROMPT_TOKENS, [worker(0, **slow_disk)]))
    assert (told.source, told.hit_tokens) == ("recompute", 1000)
    # Nobody can tell the others, so they are priced as they will behave.
    others = choose(RouteInput(NOW_S, PROMPT_TOKENS, [worker(0, can_pull=False, **slow_disk)]))
    assert (others.source, others.hit_tokens) == ("own", 5000)


# Through the dispatcher


def pulling_pool(num_workers: int = 3, **options: Any) -> Pool:
    pool = make_pool(num_workers, model=MODEL, **options)
    let_pull(pool)
    for each in pool.workers.values():
        each.learner.observe_pull("w0", tokens=100_000, seconds=100_000 / RATE)
    return pool


async def behind_a_busy_holder(
    routes: Dispatcher, pool: Pool, **body: Any
) -> tuple[Plan, Decision]:
    plan = await routes.plan(pool, ids([i % 251 for i in range(8001)], **body), in_full=True)
    hold(pool, "w0", plan.prompt)
    other = await routes.plan(pool, ids([i % 13 for i in range(20_000)]), in_full=True)
    for worker_id in pool.workers:
        others = () if worker_id == "w0" else ("w0",)
        if not others:
            routes.admit(other, routes.choose(other, [w for w in pool.workers if w != "w0"]))
    return plan, routes.choose(plan)


async def test_a_decision_to_pull_books_both_links_and_the_smaller_prefill() -> None:
    pool, clock = pulling_pool(), Clock()
    routes = dispatcher(pool, clock)
    plan, decision = await behind_a_busy_holder(routes, pool)
    assert decision.source == "peer:w0"
    assert decision.worker in ("w1", "w2")
    ticket = routes.admit(plan, decision)
    link_s = 8000 / RATE

    assert ticket.worker.books.queued_tokens == 1
    assert ticket.worker.books.load.in_busy_until_s == pytest.approx(clock.now_s + link_s)
    assert pool.workers["w0"].books.out_busy_until_s == pytest.approx(clock.now_s + link_s)
    ticket.finish(Outcome.CLIENT_CLOSED)


async def test_a_measured_pull_teaches_the_rate_of_its_pair() -> None:
    pool, clock = pulling_pool(), Clock()
    routes = dispatcher(pool, clock)
    plan, decision = await behind_a_busy_holder(routes, pool)
    ticket = routes.admit(plan, decision)
    before = ticket.worker.learner.pull_rates["w0"]
    clock.now_s += 2 * (decision.ttft_s or 0.0)
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 5, 8000))
    model = ticket.worker.learner.model

    assert before / 2 < ticket.worker.learner.pull_rates["w0"] < before
    assert model == MODEL


async def test_a_pull_that_brought_nothing_makes_the_source_less_attractive() -> None:
    pool, clock = pulling_pool(), Clock()
    routes = dispatcher(pool, clock)
    plan, decision = await behind_a_busy_holder(routes, pool)
    ticket = routes.admit(plan, decision)
    before = ticket.worker.learner.pull_rates["w0"]
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 5, 0))

    assert ticket.worker.learner.pull_rates["w0"] < before
    assert pool.index is not None
    assert "w0" in pool.index.match(plan.hashes or ())


async def test_a_decision_to_pull_is_explained_and_taken_again_from_its_json() -> None:
    pool, clock = pulling_pool(), Clock()
    routes = dispatcher(pool, clock)
    plan, decision = await behind_a_busy_holder(routes, pool)
    explain = json.loads(json.dumps(explain_json(plan, decision)))

    assert explain["decision"]["source"] == "peer:w0"
    assert decide_again(explain) == explain["decision"]
    sources = {c["worker"]: c["source"] for c in explain["candidates"]}
    assert sources == {"w0": "own", "w1": "peer:w0", "w2": "peer:w0"}
    assert {c["mode"] for c in explain["candidates"]} == {"exact"}


async def test_where_nobody_can_pull_no_sources_are_looked_for() -> None:
    pool, clock = make_pool(3, model=MODEL), Clock()
    routes = dispatcher(pool, clock)
    _, decision = await behind_a_busy_holder(routes, pool)

    assert decision.input.sources == []
    assert not any(c.can_pull for c in decision.input.candidates)


async def test_the_pools_switch_turns_all_pulls_off() -> None:
    pool = pulling_pool(peer_pull="off")
    _, decision = await behind_a_busy_holder(dispatcher(pool, Clock()), pool)

    assert decision.source in ("own", "recompute")


HELD = Hit(gpu=4096, cpu=1024)


def test_a_draining_worker_may_give_and_an_ill_or_different_one_may_not() -> None:
    pool = pulling_pool(4)
    pool.drain("w0")
    pool.workers["w1"].health.ready = False
    pool.workers["w2"].is_apart = True
    pool.workers["w3"].serves_peers = False
    sources, _ = find_sources(pool, dict.fromkeys(pool.workers, HELD))

    assert sources == [Source("w0", 5120)]


def test_workers_pull_only_from_those_with_their_own_fingerprint() -> None:
    pool = pulling_pool(3)
    for k, fingerprint in enumerate(("a", "b", "a")):
        pool.workers[f"w{k}"].fingerprint = fingerprint
    hits = {"w0": HELD, "w1": Hit(gpu=4096), "w2": HELD}
    sources, fingerprint = find_sources(pool, hits)

    assert ([s.worker for s in sources], fingerprint) == (["w0", "w2"], "a")


def test_sources_are_few_and_the_least_busy_link_comes_first() -> None:
    pool = pulling_pool(9)
    for k, each in enumerate(pool.workers.values()):
        each.books.out_busy_until_s = 50.0 - k
    hits = dict.fromkeys(pool.workers, HELD) | {"w1": Hit(gpu=8192), STORE: Hit(remote=4096)}
    sources, _ = find_sources(pool, hits)

    assert [s.worker for s in sources] == ["w1", "w8", "w7", "w6", STORE]


def test_blocks_on_disk_are_not_handed_over() -> None:
    pool = pulling_pool(2)

    assert find_sources(pool, {"w0": Hit(gpu=1024, disk=8192)})[0] == []


# What is sent


async def sent(style: str, **options: Any) -> tuple[PullRequest | None, Decision]:
    pool = pulling_pool(**options)
    for each in pool.workers.values():
        each.pull_style = style  # type: ignore[assignment]
    _, decision = await behind_a_busy_holder(dispatcher(pool, Clock()), pool)
    return pull_request(decision, pool), decision


async def test_our_runner_is_told_the_peers_address_and_how_much() -> None:
    request, _ = await sent("runner")
    assert request is not None

    assert request.params(None) == {"source": {"url": "http://127.0.0.1:9000", "tokens": 8000}}
    assert request.header == ""


async def test_llm_d_is_told_by_its_header_and_the_cap() -> None:
    request, _ = await sent("llm-d")
    assert request is not None

    assert request.header == "127.0.0.1:9000"
    assert request.params(None) == {"max_load_tokens": 8000}


@pytest.mark.parametrize(
    ("clients", "params"),
    [
        ({"max_load_tokens": 100}, {"max_load_tokens": 100}),
        ({"max_load_tokens": 9999}, {"max_load_tokens": 8000}),
        ({"max_load_tokens": "all"}, {"max_load_tokens": "all"}),
        ({"max_load_tokens": True}, {"max_load_tokens": True}),
        ({"max_offload_tokens": 5}, {"max_offload_tokens": 5, "max_load_tokens": 8000}),
    ],
)
def test_a_clients_own_cap_counts_where_it_is_lower(
    clients: dict[str, Any], params: dict[str, Any]
) -> None:
    sent = PullRequest(max_load_tokens=8000).params(clients)

    assert (clients if sent is None else sent) == params


def test_a_clients_own_source_is_left_to_it() -> None:
    ours = PullRequest(source={"url": "http://a", "tokens": 10})

    assert ours.params({"source": {"url": "http://b", "tokens": 5}}) is None
    assert ours.params({"max_load_tokens": 0}) is None
    capped = ours.params({"max_load_tokens": 4})
    assert capped == {"max_load_tokens": 4, "source": {"url": "http://a", "tokens": 4}}


async def test_recomputing_a_slow_tier_is_said_by_a_cap_of_nothing() -> None:
    pool, clock = pulling_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids([i % 251 for i in range(8001)]), in_full=True)
    assert plan.prompt is not None
    assert pool.index is not None
    pool.index.store("w0", plan.prompt.block_hashes, plan.prompt.root, tier="disk")
    decision = routes.choose(plan)
    request = pull_request(decision, pool)
    assert request is not None

    assert decision.source == "recompute"
    assert request.params(None) == {"max_load_tokens": 0}


async def test_a_choice_without_a_pull_changes_nothing_that_is_sent() -> None:
    pool, clock = pulling_pool(), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(40 * BLOCK))))
    ticket = routes.admit(plan, routes.choose(plan))

    assert pull_request(ticket.decision, pool) is None
    ticket.finish(Outcome.OK)
    assert is_idle(pool)

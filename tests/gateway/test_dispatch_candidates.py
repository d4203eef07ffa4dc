"""What the dispatcher reads about each worker before it compares them."""

from __future__ import annotations

import pytest

from gateway.routing.choose import Candidate, Reason
from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, explain_json
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool
from prefix_index.chat import ChatTemplate
from prefix_index.prompts import PromptReader
from tests.gateway.routing_parts import (
    BLOCK,
    H100,
    Clock,
    byte_tokenizer,
    chat,
    dispatcher,
    hold,
    ids,
    is_idle,
    make_pool,
)


def seen(routes: Dispatcher, plan: Plan, worker_id: str = "w0") -> Candidate:
    candidates = routes.choose(plan).input.candidates
    return next(c for c in candidates if c.worker == worker_id)


async def test_credit_ends_with_the_leaders_first_token_even_before_its_events_come() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    first, second = [await routes.plan(pool, chat("a story " * 200 + q)) for q in ("why", "how")]
    leader = routes.admit(first, routes.choose(first))
    assert seen(routes, second, leader.worker.id).pending_tokens > second.num_tokens // 2
    leader.first_token()

    assert seen(routes, second, leader.worker.id).pending_tokens == 0
    leader.finish(Outcome.OK)


async def test_a_worker_that_is_late_with_a_first_token_is_avoided_until_it_comes() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("a story " * 200))
    hold(pool, "w0", plan.prompt)
    late = routes.admit(plan, routes.choose(plan))
    assert late.worker.id == "w0"
    clock.now_s += 5.0
    assert seen(routes, plan).overdue_s == pytest.approx(5.0 - late.predicted_ttft_s)
    assert routes.choose(plan).worker == "w1"

    late.first_token()
    assert seen(routes, plan).overdue_s == 0.0
    assert routes.choose(plan).worker == "w0"
    late.finish(Outcome.OK)


async def fill(pool: Pool, routes: Dispatcher, clock: Clock, capacity_tokens: int) -> Plan:
    pool.workers["w0"].capacity_tokens = capacity_tokens
    old = await routes.plan(pool, ids(list(range(1000, 1000 + 40 * BLOCK))))
    ticket = routes.admit(old, routes.choose(old))
    hold(pool, "w0", old.prompt)
    ticket.finish(Outcome.OK)
    clock.now_s += 100.0
    return old


async def test_a_full_cache_is_told_with_the_age_of_what_would_be_evicted() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    await fill(pool, routes, clock, 50 * BLOCK)
    new = await routes.plan(pool, ids(list(range(20 * BLOCK))))
    c = seen(routes, new)

    assert (c.held_tokens, c.lru_age_s) == (40 * BLOCK, 100.0)
    assert routes.choose(new).candidates[0].eviction_s > 0.0


async def test_a_full_worker_keeps_users_of_its_documents_whose_answers_need_no_room() -> None:
    # As was seen: the holder, full and measured slower, beside a worker that has just restarted.
    pool, clock = make_pool(2, model=None), Clock()
    routes = dispatcher(pool, clock)
    for worker, token_s in (("w0", 8.9e-3), ("w1", 5.2e-3)):
        model = CostModel(token_s, 1e-4 * token_s, 100 * token_s, 1e-3 * token_s)
        pool.workers[worker].learner = Learner(model)
        pool.workers[worker].capacity_tokens = 40 * BLOCK
    document = list(range(18 * BLOCK))
    prompt = (await routes.plan(pool, ids(document))).prompt
    hold(pool, "w0", prompt)
    hold(pool, "w0", (await routes.plan(pool, ids(list(range(5000, 5000 + 22 * BLOCK))))).prompt)
    asked = ids([*document, *range(9000, 9030)])
    asked.body["max_tokens"] = 4
    choice = routes.choose(await routes.plan(pool, asked))

    assert (choice.worker, choice.reason) == ("w0", Reason.LONGEST_PREFIX)
    assert choice.input.allowance_tokens == 4
    # Many answers to one question need room for each.
    asked.body["n"] = 20
    assert routes.choose(await routes.plan(pool, asked)).input.allowance_tokens == 80
    del asked.body["max_tokens"]
    assert routes.choose(await routes.plan(pool, asked)).worker == "w1"


async def test_an_evicted_prompt_no_longer_counts_as_the_oldest() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    old = await fill(pool, routes, clock, 50 * BLOCK)
    recent = await routes.plan(pool, ids(list(range(5000, 5000 + 40 * BLOCK))))
    ticket = routes.admit(recent, routes.choose(recent))
    hold(pool, "w0", recent.prompt)
    ticket.finish(Outcome.OK)
    assert pool.index is not None
    assert old.prompt is not None
    pool.index.remove("w0", old.prompt.block_hashes)
    clock.now_s += 7.0
    new = await routes.plan(pool, ids(list(range(20 * BLOCK))))

    assert seen(routes, new).lru_age_s == 7.0


async def test_blocks_shared_with_requests_in_flight_take_no_new_memory() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    shared, own = list(range(30 * BLOCK)), list(range(9000, 9000 + 4 * BLOCK))
    first = await routes.plan(pool, ids(shared))
    ticket = routes.admit(first, routes.choose(first))
    pool.workers["w0"].capacity_tokens = 40 * BLOCK
    second = await routes.plan(pool, ids([*shared, *own, 1]))
    c = seen(routes, second)

    assert (c.active_tokens, c.new_tokens) == (30 * BLOCK + 200, 4 * BLOCK)
    ticket.finish(Outcome.OK)
    assert is_idle(pool)


async def test_lower_tiers_are_told_apart() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(10 * BLOCK + 1))))
    assert plan.prompt is not None
    assert pool.index is not None
    hashes = plan.prompt.block_hashes
    pool.index.store("w0", hashes[:4], plan.prompt.root)
    pool.index.store("w0", hashes[4:], hashes[3], tier="cpu")
    c = seen(routes, plan)

    assert (c.hit_gpu, c.hit_cpu, c.hit_tokens) == (4 * BLOCK, 6 * BLOCK, 10 * BLOCK)


async def test_a_template_that_reorders_messages_has_nothing_stable_in_front() -> None:
    pool, clock = make_pool(1), Clock()
    tokenizer = byte_tokenizer()
    reversing = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(reversing, special_tokens=tokenizer.special_tokens)
    assert pool.index is not None
    pool.use_prompts(PromptReader(tokenizer, template, model="m", block_size=BLOCK), pool.index)
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("question", system="Be brief."))

    explain = explain_json(plan, routes.choose(plan))
    assert [segment["kind"] for segment in explain["segments"]] == ["current", "system", "current"]
    assert explain["stable_tokens"] == 0
    assert explain["decision"]["reason"] == Reason.ONLY_CANDIDATE


async def test_an_unmeasured_worker_borrows_the_slowest_constants_of_the_pool() -> None:
    pool, clock = make_pool(3, model=None), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("a story"))
    assert [c.model for c in routes.choose(plan).input.candidates] == [None] * 3
    slow = CostModel(1.0, 1e-9, 0.001, 1e-9)
    pool.workers["w0"].learner = Learner(H100)
    pool.workers["w1"].learner = Learner(slow)
    own, other, borrowed = [c.model for c in routes.choose(plan).input.candidates]

    assert (own, other) == (H100, slow)
    assert borrowed is not None
    assert (borrowed.token_s, borrowed.step_s) == (1.0, H100.step_s)

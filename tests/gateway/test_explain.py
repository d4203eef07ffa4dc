"""The explain object says what was decided and lets the decision be taken again."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from gateway.routing.dispatch import Inbound, Outcome, Plan, Ticket
from gateway.routing.explain import decide_again, explain_json
from gateway.routing.others import OthersLoad
from prefix_index.segments import Layout
from tests.gateway.routing_parts import (
    BLOCK,
    Clock,
    chat,
    dispatcher,
    hold,
    ids,
    let_pull,
    make_pool,
)

FIELDS = {
    "request_id",
    "model",
    "pool",
    "tokens",
    "prompt_tokens",
    "stable_tokens",
    "block_size",
    "block_hashes",
    "segments",
    "canonicalization",
    "affinity",
    "candidates",
    "decision",
    "state",
}
CANDIDATE_FIELDS = {
    "worker",
    "eligible",
    "reason",
    "hit_tokens",
    "queue_s",
    "restore_s",
    "prefill_s",
    "cost_s",
    "source",
    "terms",
}


async def explained(inbound: Inbound, **options: Any) -> tuple[dict[str, Any], Plan]:
    pool, clock = make_pool(3, **options), Clock()
    routes = dispatcher(pool, clock)
    warm = await routes.plan(pool, inbound)
    if warm.prompt is not None:
        hold(pool, "w1", warm.prompt)
    for text in ("busy one " * 40, "busy two " * 90):
        other = await routes.plan(pool, chat(text))
        routes.admit(other, routes.choose(other))
    clock.now_s += 0.003
    plan = await routes.plan(pool, inbound)
    before = [(w.books.in_flight, w.books.queued_s) for w in pool.workers.values()]
    explain = explain_json(plan, routes.choose(plan))
    assert before == [(w.books.in_flight, w.books.queued_s) for w in pool.workers.values()]
    return json.loads(json.dumps(explain)), plan


async def test_it_has_the_fields_of_the_contract_and_is_plain_json() -> None:
    explain, plan = await explained(chat("Why? " * 40, headers={"x-session-id": "s1"}))

    assert set(explain) >= FIELDS
    assert explain["request_id"] == "r1"
    assert (explain["model"], explain["pool"], explain["tokens"]) == ("m", "chat", "exact")
    assert explain["prompt_tokens"] == plan.num_tokens
    assert explain["block_size"] == BLOCK
    assert all(len(bytes.fromhex(h)) == 16 for h in explain["block_hashes"])
    assert len(explain["block_hashes"]) == plan.num_tokens // BLOCK
    assert explain["affinity"]["key"] == "session:s1"
    assert explain["affinity"]["source"] == "x-session-id"
    assert len(explain["affinity"]["home"]) == 2
    assert explain["state"] == {"index_age_s": None, "load_age_s": 0.0}
    for candidate in explain["candidates"]:
        assert set(candidate) >= CANDIDATE_FIELDS
        assert set(candidate["hit_tokens"]) == {"gpu", "cpu", "disk", "remote"}
        assert set(candidate["terms"]) == set("WPIRGME")
        assert candidate["cost_s"] == pytest.approx(sum(candidate["terms"].values()))


@pytest.mark.parametrize(
    "options",
    [{}, {"model": None}, {"is_strict": True}, {"reads": False}, {"mode": "approximate"}],
    ids=["calibrated", "new", "strict", "no tokenizer", "approximate"],
)
async def test_its_json_reproduces_the_choice(options: dict[str, Any]) -> None:
    for text in ("Why? " * 40, "x", "Another long text. " * 99):
        explain, _ = await explained(chat(text), **options)

        assert decide_again(explain) == explain["decision"]
        assert explain["decision"]["worker"] is not None


async def test_a_warm_prompt_is_explained_by_its_holder() -> None:
    explain, plan = await explained(chat("Why? " * 40))
    held = (plan.num_tokens - 1) // BLOCK * BLOCK

    assert explain["decision"]["worker"] == "w1"
    assert explain["decision"]["reason"] == "longest_prefix"
    assert explain["decision"]["hit_tokens"] == held
    assert [c["hit_tokens"]["gpu"] for c in explain["candidates"]] == [0, held, 0]


async def test_without_constants_nothing_claims_to_be_seconds() -> None:
    explain, _ = await explained(chat("Why? " * 40), model=None)

    assert explain["decision"]["ttft_s"] is None
    assert explain["candidates"][0]["cost_s"] is None
    assert set(explain["candidates"][0]["terms"]) == {"token_requests"}


async def test_segments_are_spans_of_the_one_tokenization() -> None:
    inbound = chat("")
    inbound.body["messages"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First question?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "Second question?"},
    ]
    explain, plan = await explained(inbound)
    # One token per byte, one per control token; ChatML puts a line end behind each message.
    system = len("system\nBe brief.\n") + 2
    history = len("user\nFirst question?\nassistant\nAn answer.\n") + 4

    spans = [(s["kind"], s["start_token"], s["end_token"]) for s in explain["segments"]]
    assert spans == [
        ("system", 0, system),
        ("history", system, system + history),
        ("current", system + history, plan.num_tokens),
    ]
    assert explain["stable_tokens"] == (system + history) // BLOCK * BLOCK


async def test_a_completion_prompt_is_all_current() -> None:
    explain, _ = await explained(ids(list(range(100))))

    assert explain["segments"] == [
        {"kind": "current", "volatile": [], "start_token": 0, "end_token": 100}
    ]
    assert explain["stable_tokens"] == 0


async def test_an_unreadable_prompt_is_explained_as_an_estimate() -> None:
    explain, _ = await explained(chat("x", chat_template="{{ messages }}"))

    assert explain["tokens"] == "estimated"
    assert explain["unread"] == "TemplateRefusedError"
    assert (explain["segments"], explain["block_hashes"]) == ([], [])
    assert explain["decision"]["reason"] == "no_tokens_home"


async def test_the_index_age_is_that_of_the_newest_event() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    pool.workers["w0"].last_event_s = clock.now_s - 8.0
    pool.workers["w1"].last_event_s = clock.now_s - 2.0
    plan = await routes.plan(pool, chat("hello"))

    assert explain_json(plan, routes.choose(plan))["state"]["index_age_s"] == 2.0


async def test_a_thousand_live_decisions_agree_with_what_explain_says_of_them() -> None:
    pool, clock = make_pool(6), Clock()
    pool.others = OthersLoad()
    let_pull(pool)
    for worker in pool.workers.values():
        worker.capacity_tokens, worker.cpu_capacity_tokens = 60_000, 60_000
    routes, rng = dispatcher(pool, clock), Random(4)
    documents = ["".join(rng.choices("abcdefgh ", k=3000)) for _ in range(20)]
    reasons, sources = set[str](), set[str]()
    open_tickets: list[Ticket] = []
    for _ in range(1000):
        clock.now_s += rng.expovariate(30.0)
        pool.others.is_connected = rng.random() < 0.8
        text = f"{rng.choice(documents)} {rng.randrange(40)}"
        plan = await routes.plan(pool, chat(text), in_full=True)
        decision = routes.choose(plan)
        explain = json.loads(json.dumps(explain_json(plan, decision, Layout([]))))
        live = routes.admit(plan, decision)

        told = explain["decision"]
        assert (told["worker"], told["reason"]) == (live.worker.id, str(live.decision.reason))
        assert told["hit_tokens"] == live.predicted_hit_tokens
        assert decide_again(explain) == told
        reasons.add(told["reason"])
        sources.add(told["source"].partition(":")[0])
        open_tickets.append(live)
        if len(open_tickets) > rng.randrange(1, 40):
            done = open_tickets.pop(rng.randrange(len(open_tickets)))
            done.first_token()
            assert done.worker.id in pool.workers
            hold(pool, done.worker.id, plan.prompt)
            done.finish(Outcome.OK)
    assert len(reasons) >= 4, reasons
    assert sources == {"own", "recompute", "peer"}

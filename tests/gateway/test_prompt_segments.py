"""What the gateway tells and remembers about the parts of a prompt, cheap where it must be."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.advice import MAX_ADVICE, advice_of
from gateway.routing.dispatch import Inbound, Plan, explain_json
from gateway.routing.pool import Pool
from gateway.routing.segments import (
    MAX_OBSERVED_MESSAGES,
    hints_of,
    layout_of,
    observe,
    quick_stable_tokens,
    segments,
)
from prefix_index.segments import Found, Layout, Moved, Segment, stable_tokens
from tests.gateway.routing_parts import BLOCK, Clock, chat, dispatcher, ids, make_pool
from tests.support import cpu_s

HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 40
POOL = make_pool(1)


def plan_of(inbound: Inbound, pool: Pool = POOL) -> Plan:
    reader = pool.reader
    assert reader is not None
    prompt = reader.chat(inbound.body).complete()
    return Plan(pool, inbound, prompt.num_tokens, prompt, prompt.block_hashes)


def conversation(*texts: Any, **body: Any) -> Inbound:
    inbound = chat("", **body)
    roles = ("user", "assistant")
    inbound.body["messages"] = [
        {"role": "system", "content": "Be brief."},
        *({"role": roles[t % 2], "content": text} for t, text in enumerate(texts)),
    ]
    return inbound


FORGED = st.sampled_from(["", "<|im_start|>", "<|im_end|>\n<|im_start|>user\n", "<|im_start|>" * 3])
TEXTS = st.tuples(st.text("ab \n", max_size=60), FORGED, st.text("cd ", max_size=60)).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=7))
@settings(max_examples=80, deadline=None)
def test_the_quick_boundary_is_never_behind_the_exact_one(texts: list[str]) -> None:
    plan = plan_of(conversation(*texts))
    exact = stable_tokens(segments(plan), BLOCK)
    quick = quick_stable_tokens(plan)

    assert quick <= exact
    # And is the same for questions that imitate nothing.
    if len(texts) % 2 and texts[-1].strip() and "<|" not in texts[-1]:
        assert quick == exact


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "a" * 99), ("assistant", "b"), ("tool", "c" * 50), ("tool", "d")],
        [("user", "a" * 99), ("user", "b"), ("tool", "c" * 50), ("tool", "d")],
        [("user", "a" * 99), ("assistant", "b" * 99)],
        [("user", "a" * 99)],
    ],
)
def test_the_quick_boundary_knows_tool_results(messages: list[tuple[str, str]]) -> None:
    inbound = chat("")
    inbound.body["messages"] = [{"role": r, "content": c} for r, c in messages]
    plan = plan_of(inbound)

    assert quick_stable_tokens(plan) <= stable_tokens(segments(plan), BLOCK)


def test_what_cannot_be_read_has_no_stable_tokens() -> None:
    assert quick_stable_tokens(Plan(POOL, chat("x"), 5)) == 0
    assert segments(Plan(POOL, chat("x"), 5)) == []
    completion = ids([1, 2, 3])
    reader = POOL.reader
    assert reader is not None
    prompt = reader.completion([1, 2, 3]).complete()
    assert quick_stable_tokens(Plan(POOL, completion, 3, prompt)) == 0


def test_the_quick_boundary_costs_a_small_part_of_the_exact_one() -> None:
    plan = plan_of(conversation(*(f"turn {k} " * 20 for k in range(49))))

    quick_stable_tokens(plan)
    quick_s = cpu_s(lambda: quick_stable_tokens(plan), repeats=20)
    assert quick_s < cpu_s(lambda: layout_of(plan)) / 20


# --- hints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "headers", "chunks", "has_documents"),
    [
        (None, {}, (), False),
        ([], {}, (), False),
        ({"documents": []}, {}, (), False),
        ({"documents": "x"}, {}, (), False),
        ({"documents": [{"id": "d"}]}, {}, (), True),
        ({"documents": [{"id": "d", "chunks": ["a", 1, None, "b"]}, None]}, {}, ("a", "b"), True),
        ({"documents": [{"chunks": "x"}]}, {}, (), True),
        (None, {"x-document-id": "d1, d2"}, (), True),
        (None, {"x-document-id": " "}, (), False),
    ],
)
def test_hints_are_read_from_body_and_headers(
    ours: Any, headers: dict[str, str], chunks: tuple[str, ...], has_documents: bool
) -> None:
    inbound = chat("q", headers=headers, warmlane=ours)

    assert (hints_of(inbound).chunks, hints_of(inbound).has_documents) == (chunks, has_documents)


async def test_a_named_document_is_knowledge_at_once() -> None:
    pool = make_pool(1)
    text = f"Context:\n{HANDBOOK}\nQuestion: why?"
    named = plan_of(conversation(text), pool)
    named.inbound.headers = {"x-document-id": "handbook"}

    assert [s.kind for s in segments(named)] == ["system", "knowledge", "current"]


# --- the memory ----------------------------------------------------------------------------------


def test_a_memory_lives_as_long_as_its_pool_and_salts_never_meet() -> None:
    pool = make_pool(1)
    observe(plan_of(conversation(f"Dana. {HANDBOOK}", cache_salt="one"), pool))
    observe(plan_of(conversation(f"Omar. {HANDBOOK}", cache_salt="one"), pool))
    same = plan_of(conversation(f"Pia. {HANDBOOK}", cache_salt="one"), pool)
    other = plan_of(conversation(f"Pia. {HANDBOOK}", cache_salt="two"), pool)

    assert layout_of(same).moved
    assert not layout_of(other).moved
    assert len(pool.recurrence)
    alive = weakref.ref(pool.recurrence)
    del pool, same, other
    gc.collect()
    assert alive() is None


def test_of_endless_conversations_only_the_beginning_is_remembered() -> None:
    pool = make_pool(1)
    observe(plan_of(conversation(*(f"turn {k}" for k in range(1001))), pool))

    assert len(pool.recurrence) <= 4 * MAX_OBSERVED_MESSAGES


async def test_explaining_twice_makes_nothing_recur() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    explains = []
    for _ in range(3):
        plan = await routes.plan(pool, conversation("a", "b", HANDBOOK), in_full=True)
        explains.append(json.dumps(explain_json(plan, routes.choose(plan))["segments"]))

    assert len(set(explains)) == 1
    assert "knowledge" not in explains[0]


async def test_a_layout_found_elsewhere_is_used() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, conversation("a"), in_full=True)
    found = Layout([Segment("knowledge", 0, plan.num_tokens)])
    explain = explain_json(plan, routes.choose(plan), found)

    assert [s["kind"] for s in explain["segments"]] == ["knowledge"]
    assert explain["stable_tokens"] == plan.num_tokens // BLOCK * BLOCK


async def test_what_the_rules_did_is_passed_on() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, conversation("a"), in_full=True)
    entry = {"rule": "stable-tools", "applied": False, "tokens_saved": 0}
    explain = explain_json(plan, routes.choose(plan), canonicalization=[entry])

    assert explain["canonicalization"] == [entry]


# --- advice --------------------------------------------------------------------------------------


def advice(*found: Segment, moved: list[Moved] | None = None) -> list[dict[str, Any]]:
    layout = Layout(list(found), moved or [])
    return advice_of(layout, pool="chat", num_tokens=2000, block_size=BLOCK)


def span(token: int, source: Any = "message", value: str = "") -> Found:
    return Found("datetime", 0, 9, "....", source, 0, start_token=token, value=value)


@pytest.mark.parametrize(
    ("token", "place", "tokens"),
    [(0, "start", 1900), (100, "start", 1804), (1000, "middle", 908), (1830, "end", 76)],
)
def test_advice_says_where_a_change_is_and_what_it_costs(
    token: int, place: str, tokens: int
) -> None:
    (word,) = advice(Segment("system", 0, 1900, [span(token)]), Segment("current", 1900, 2000))

    assert (word["kind"], word["segment"], word["tokens"]) == ("volatile_text", "system", tokens)
    assert f"the {place} of the prompt" in word["text"]
    assert f"token {token} of 2000" in word["text"]


def test_what_costs_next_to_nothing_is_not_advised() -> None:
    assert advice(Segment("system", 0, 1900, [span(1890)]), Segment("current", 1900, 2000)) == []
    assert advice(Segment("system", 0, 10), Segment("current", 10, 2000, [span(12)])) == []
    assert advice(Segment("current", 0, 2000), moved=[Moved("current", 5, 63)]) == []


def test_moved_text_is_summed_per_segment() -> None:
    moved = [Moved("knowledge", 40, 100), Moved("knowledge", 300, 50), Moved("system", 5, 70)]
    words = advice(Segment("system", 0, 30), Segment("current", 30, 2000), moved=moved)

    assert [(w["segment"], w["start_token"], w["tokens"]) for w in words] == [
        ("knowledge", 40, 150),
        ("system", 5, 70),
    ]


def test_advice_is_bounded() -> None:
    many = [Segment("system", k * 100, k * 100 + 100, [span(k * 100)]) for k in range(15)]
    dated = Segment("system", 0, 10, [span(3, "template", "30 Nov 2026" * 9)])
    words = advice(dated, *many, Segment("current", 1500, 2000))

    assert len(words) == MAX_ADVICE
    assert all(len(word["text"]) < 300 for word in words)
    assert words[0]["kind"] == "template_prints_date"

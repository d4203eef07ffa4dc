"""Which identity a request is routed home by."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from gateway.routing import affinity
from gateway.routing.affinity import LARGE_CHARS, MAX_VALUE_CHARS, affinity_key
from tests.support import cpu_s

KINDS = ("document", "knowledge_base", "session", "tenant", "prefix")
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


def key(
    body: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    tenant: str = "",
    kinds: tuple[str, ...] = KINDS,
) -> Any:
    return affinity_key({**QUESTION, **(body or {})}, headers or {}, tenant=tenant, kinds=kinds)


@pytest.mark.parametrize("value", ["", "   ", "null", "NULL", "None", "undefined", "\t"])
@pytest.mark.parametrize(
    "header", ["x-session-id", "x-session-token", "x-document-id", "x-knowledge-base-id"]
)
def test_an_empty_or_null_hint_is_no_hint(header: str, value: str) -> None:
    assert key(headers={header: value}) == key()
    assert key().kind == "prefix"


@pytest.mark.parametrize(
    ("body", "headers", "shown", "source"),
    [
        ({"prompt_cache_key": "k"}, {"x-document-id": "d"}, "cache_key:k", "prompt_cache_key"),
        ({}, {"x-document-id": " , d1, d2"}, "document:d1", "x-document-id"),
        (
            {"warmlane": {"documents": [{"id": "d", "version": 3}]}},
            {"x-session-id": "s"},
            "document:d@3",
            "warmlane.documents",
        ),
        (
            {},
            {"x-knowledge-base-id": "kb", "x-session-id": "s"},
            "knowledge_base:kb",
            "x-knowledge-base-id",
        ),
        ({"user": "u"}, {"x-session-id": "s"}, "session:s", "x-session-id"),
        ({"user": "u"}, {"x-session-token": "s"}, "session:s", "x-session-token"),
        ({}, {"x-session-affinity": "s"}, "session:s", "x-session-affinity"),
        ({}, {"x-claude-code-session-id": "s"}, "session:s", "x-claude-code-session-id"),
        ({"warmlane": {"session": "s"}, "user": "u"}, {}, "session:s", "warmlane.session"),
        ({"user": "u"}, {}, "session:u", "user"),
        ({"user": 7}, {}, "session:7", "user"),
    ],
)
def test_hints_fill_kinds_and_the_order_of_kinds_decides(
    body: dict[str, Any], headers: dict[str, str], shown: str, source: str
) -> None:
    found = key(body, headers)

    assert (str(found), found.source) == (shown, source)


def test_the_pool_decides_which_kind_comes_first() -> None:
    headers = {"x-document-id": "d", "x-session-id": "s"}

    assert key(headers=headers, kinds=("session", "document")).kind == "session"
    assert key(headers=headers, kinds=("prefix",)).kind == "prefix"


def test_keys_of_two_tenants_never_meet() -> None:
    assert key(tenant="a").ring_key != key(tenant="b").ring_key
    assert key(tenant="acme").kind == "tenant"
    one = key(headers={"x-session-id": "x"}, tenant="a")
    other = key(headers={"x-session-id": "x"}, tenant="b")
    assert one.value == other.value
    assert one.ring_key != other.ring_key
    # A tenant's name cannot run into the value.
    forged = key(headers={"x-session-id": "x"}, tenant="a|session|x")
    assert forged.ring_key != key(headers={"x-session-id": "x|session|x"}, tenant="a").ring_key


def test_a_long_value_is_hashed() -> None:
    long = key(headers={"x-session-id": "s" * 9000})

    assert len(long.ring_key) < 2 * MAX_VALUE_CHARS
    assert long != key(headers={"x-session-id": "s" * 9001})
    assert long == key(headers={"x-session-id": "s" * 9000})


def messages(system: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "messages": [{"role": "system", "content": system}]
        + [{"role": roles[t % 2], "content": text} for t, text in enumerate(turns)]
    }


def test_the_prefix_is_shared_by_turns_and_by_questions_about_one_document() -> None:
    document = "A long document. " * 100
    first = key(messages("Be brief.", document + "First question?"))

    assert key(messages("Be brief.", document + "Second question?")) == first
    assert key(messages("Be brief.", document + "First question?", "Answer.", "More?")) == first
    assert key(messages("Be brief.", "Another document. " * 100)) != first
    assert key(messages("Be verbose.", document + "First question?")) != first


def test_questions_about_a_document_in_the_instructions_share_a_home() -> None:
    def prefix(system: str, question: str) -> str:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        return key({"messages": messages}, kinds=("prefix",)).value

    handbook = "Refunds are accepted within thirty days of delivery. " * 60
    assert prefix(handbook, "What of eggs?") == prefix(handbook, "And of shoes, after a month?")
    # Instructions that everybody has, before a document or a conversation of its own.
    assert prefix("Be brief.", "What of eggs?") != prefix("Be brief.", "And of shoes?")
    assert prefix(handbook, "a" * 3000) != prefix(handbook, "b" * 3000)


def test_the_prefix_of_content_parts_is_that_of_their_text() -> None:
    parts = [{"type": "text", "text": "Hello"}]

    found = key({"messages": [{"role": "user", "content": parts}]})
    assert found == key({"messages": [{"role": "user", "content": "Hello"}]})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": None},
        {"messages": "x"},
        {"messages": [None, 3, {"role": None, "content": {"a": 1}}]},
        {"messages": [], "prompt": None},
        {"messages": None, "prompt": [[1, 2], [3]]},
        {"messages": None, "prompt": ["a", "b"]},
        {"messages": None, "prompt": "\ud800"},
        {"warmlane": [], "user": {"id": 1}, "prompt_cache_key": ["x"]},
        {"warmlane": {"documents": [None, {"id": None}], "session": {}}},
        {"user": True},
    ],
)
def test_odd_bodies_fall_back_to_the_prefix(body: dict[str, Any]) -> None:
    assert key(body).kind == "prefix"


def test_prompts_of_completions_have_prefixes_too() -> None:
    def prefix(prompt: Any) -> str:
        return affinity_key({"prompt": prompt}, {}, tenant="", kinds=KINDS).ring_key

    assert prefix("a" * 300) == prefix("a" * 900)
    assert prefix("a") != prefix("b")
    assert prefix([1, 2, 3]) == prefix([[1, 2, 3], [4]])
    assert prefix([1, 2, 3]) != prefix([1, 2, 4])


# --- what the prefix kind skips and finds ---------------------------------------------------------

DOCUMENT = "Refunds are accepted within thirty days of delivery, whatever the reason is. " * 30


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It is 2026-11-30T10:14:00Z.", "It is 2026-11-30T10:15:07Z."),
        ("Monday, November 30, 2026 10:14 AM", "Tuesday, December 1, 2026 9:02 PM"),
        (
            "Request 7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10.",
            "Request 0b9a6a34-91d7-4c0e-8f5b-55a0a1c2e9f7.",
        ),
        ("Turn: 3", "Turn: 4"),
        ("x-anthropic-billing-header: cch=1a2b3;", "x-anthropic-billing-header: cch=9f8e7;"),
    ],
)
@pytest.mark.parametrize("where", ["{}\n{rest}", "{rest}\n{}"])
def test_instructions_that_differ_in_what_changes_share_a_home(
    one: str, other: str, where: str
) -> None:
    keys = [key(messages(where.format(text, rest=DOCUMENT), "q")) for text in (one, other)]

    assert keys[0] == keys[1]
    assert keys[0] != key(messages(where.format(one, rest=DOCUMENT + "More."), "q"))


def test_what_changes_in_a_question_is_part_of_it() -> None:
    assert key(messages("Be brief.", "On 2026-11-30?")) != key(
        messages("Be brief.", "On 2026-12-01?")
    )


def passage(name: str) -> str:
    return f"<doc id={name}>{name} {DOCUMENT}</doc>"


@pytest.mark.parametrize("where", ["system", "user"])
def test_a_set_of_documents_has_one_key_whatever_their_order(where: str) -> None:
    rng = random.Random(7)
    names = list("abcdefgh")

    def of(names: list[str], question: str = "q") -> Any:
        text = "Answer from these.\n" + "\n".join(map(passage, names))
        if where == "system":
            return key(messages(text, question))
        return key(messages("Be brief.", f"{text}\n{question}"))

    first = of(names)
    for _ in range(5):
        rng.shuffle(names)
        assert of(names) == first
    assert of(names[1:]) != first
    assert of([*names, "i"]) != first
    if where == "user":
        assert of(names, "another question") == first


@pytest.mark.parametrize("lead", ["", "Use this context:\n", "Question: why?\n\nContext:\n"])
def test_a_pasted_document_is_found_in_a_later_turn(lead: str) -> None:
    pasted = lead + DOCUMENT
    first = key(messages("Be brief.", f"{pasted}\nQuestion: one?"))

    assert key(messages("Be brief.", "q1", "a1", f"{pasted}\nQuestion: two?")) == first
    assert key(messages("Be brief.", "q1", "a1", "q2", "a2", f"{pasted}\nthree?")) == first
    # And stays the conversation's key from there on.
    later = ("q1", "a1", f"{pasted}\ntwo?", "a2", "And " + DOCUMENT[::-1], "a3", "more?")
    assert key(messages("Be brief.", *later)) == first


def test_a_long_conversation_keeps_its_key_when_something_large_is_pasted() -> None:
    turns = [text for k in range(6) for text in (f"q{k} " * 80, f"a{k} " * 80)]
    first = key(messages("Be brief.", *turns))

    assert key(messages("Be brief.", *turns, "x" * LARGE_CHARS)) == first


def test_the_memory_of_known_texts_is_bounded_and_keeps_no_text() -> None:
    for k in range(affinity._MAX_KNOWN + 50):
        key(messages(f"Rule {k}", "q"))

    assert len(affinity._known) == affinity._MAX_KNOWN
    assert all(len(k) == len(v) == 16 for k, v in affinity._known.items())


@pytest.mark.parametrize("unit", ["1 ", "<doc ", "<doc>", "2026-1", "a1", "</doc><doc>"])
def test_hostile_instructions_cost_bounded_time(unit: str) -> None:
    def unknown(text: str) -> None:
        affinity._known.clear()
        key(messages(text, "q"))

    texts = [unit * (num_chars // len(unit)) for num_chars in (125_000, 1_000_000)]
    times = [cpu_s(partial(unknown, text)) for text in texts]

    # 8 times the text: what grows is hashing and copying.
    assert times[1] < 16 * times[0] + 0.02

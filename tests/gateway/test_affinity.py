"""Which identity a request is routed home by."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.affinity import MAX_VALUE_CHARS, affinity_key

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

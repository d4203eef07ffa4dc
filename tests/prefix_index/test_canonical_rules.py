"""A rule changes its own value, never twice, and never another byte."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings

from prefix_index.canonical import (
    RULES,
    better_form,
    canonicalise,
)
from tests.prefix_index.canonical_parts import (
    apply,
    bodies,
    masked,
    memory,
)


@settings(max_examples=300, deadline=None)
@given(bodies(), bodies())
def test_bytes_outside_the_rewritten_values_are_identical_and_the_body_is_that_of_the_bytes(
    first: bytes, second: bytes
) -> None:
    seen = memory()

    for raw in (first, second):
        form = apply(raw, seen=seen)
        assert masked(form.raw) == masked(raw)
        assert repr(form.body) == repr(orjson.loads(form.raw))
        assert [rule.rule for rule in form.applied] == list(RULES)
        if not form.is_changed:
            assert form.raw is raw


@settings(max_examples=300, deadline=None)
@given(bodies(), bodies())
def test_canonicalising_twice_is_canonicalising_once(first: bytes, second: bytes) -> None:
    seen = memory()

    for raw in (first, second):
        once = apply(raw, seen=seen)
        twice = apply(once.raw, seen=seen)
        assert twice.raw is once.raw
        assert not twice.is_changed


@pytest.mark.parametrize(
    ("as_sent", "rewritten", "expected"),
    [
        (0, 0, "rewritten"),
        (64, 64, "rewritten"),
        (64, 80, "rewritten"),
        (64, 48, "as_sent"),
        (None, 48, "rewritten"),
        (64, None, "rewritten"),
    ],
)
def test_the_form_that_is_held_further_wins_and_a_tie_is_rewritten(
    as_sent: int | None, rewritten: int | None, expected: str
) -> None:
    assert better_form(as_sent, rewritten) == expected


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="sort-everything"):
        canonicalise({}, b"{}", rules=["sort-everything"], tenant="", memory=memory())

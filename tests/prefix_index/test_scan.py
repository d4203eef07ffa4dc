"""Tokens are found where a plain search finds them, whatever the text looks like."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prefix_index.scan import segment_bounds

TOKENS = (b"<|im_start|>", b"<|end|>", b"<<")
pieces = st.sampled_from([*TOKENS, b"<", b"<|", b"<|im_", b"<|im_start|", b"a", b" word", b"\n"])
texts = st.lists(pieces, max_size=120).map(b"".join)


def expected(data: bytes, tokens: tuple[bytes, ...]) -> list[int]:
    found = [m.start() for t in tokens for m in re.finditer(re.escape(t), data[1:])]
    return [0, *sorted(at + 1 for at in found), len(data)]


@given(texts, st.lists(st.sampled_from(TOKENS), max_size=3, unique=True).map(tuple))
def test_every_token_behind_the_first_byte_cuts(data: bytes, tokens: tuple[bytes, ...]) -> None:
    assert segment_bounds(data, tokens) == expected(data, tokens)


@given(st.integers(0, 200), texts)
def test_markup_full_of_first_bytes_is_searched_all_the_same(num_tags: int, data: bytes) -> None:
    page = b"<p>x</p>" * num_tags + data

    assert segment_bounds(page, TOKENS[:1]) == expected(page, TOKENS[:1])


def test_a_token_at_the_start_cuts_nothing_off() -> None:
    assert segment_bounds(b"<<a<<", (b"<<",)) == [0, 3, 5]
    assert segment_bounds(b"", (b"<<",)) == [0, 0]

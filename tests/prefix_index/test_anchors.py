"""Blocks of text lead to the blocks of tokens they came to before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index.anchors import TEXT_BLOCK_BYTES, Anchors, text_chain
from prefix_index.blocks import hash_blocks, root_hash

BLOCK = 16
ROOT = root_hash("m")
# Texts as lists of paragraphs; equal numbers are equal paragraphs.
texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def text(paragraphs: list[int]) -> bytes:
    return b"".join(bytes([65 + number]) * 200 for number in paragraphs)


def remember(anchors: Anchors, data: bytes) -> list[bytes]:
    """Read a text as a tokenizer with one token per byte does."""
    hashes = hash_blocks(list(data), BLOCK, ROOT)
    anchors.add(text_chain(data, ROOT), hashes, [(len(data), len(data))], BLOCK)
    return hashes


def common(left: bytes, right: bytes) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=8), texts)
def test_the_known_beginning_is_what_an_earlier_text_shares_to_within_a_block(
    before: list[list[int]], paragraphs: list[int]
) -> None:
    anchors = Anchors(10_000_000)
    known = [text(numbers) for numbers in before]
    for data in known:
        remember(anchors, data)
    data = text(paragraphs)
    hashes, num_links = anchors.find(text_chain(data, ROOT))
    shared = max(common(data, other) for other in known)

    assert num_links == shared // TEXT_BLOCK_BYTES
    # One token per byte: the interpolation is exact.
    assert hashes == hash_blocks(list(data), BLOCK, ROOT)[: num_links * TEXT_BLOCK_BYTES // BLOCK]


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=30), st.integers(0, 8000))
def test_its_bytes_are_bounded_and_beginnings_outlive_ends(
    asked: list[list[int]], max_bytes: int
) -> None:
    anchors = Anchors(max_bytes)
    for paragraphs in asked:
        data = text(paragraphs)
        chain = text_chain(data, ROOT)
        remember(anchors, data)

        assert anchors.num_bytes <= max_bytes
        _, num_links = anchors.find(chain)
        assert all(anchors.find(chain[:size])[1] == size for size in range(num_links + 1))


def test_uneven_text_is_interpolated_within_its_segments() -> None:
    data = bytes(range(256)) * 8
    hashes = hash_blocks(range(1024), BLOCK, ROOT)
    anchors = Anchors(1_000_000)
    # The first half of the text has a quarter of the tokens.
    anchors.add(text_chain(data, ROOT), hashes, [(1024, 256), (2048, 1024)], BLOCK)
    chain = text_chain(data, ROOT)

    assert [len(anchors.find(chain[:size])[0]) for size in range(9)] == [
        *(0, 4, 8, 12, 16),
        *(28, 40, 52, 64),
    ]


def test_other_roots_share_nothing() -> None:
    data = text([1, 2, 3])
    anchors = Anchors(1_000_000)
    remember(anchors, data)

    assert anchors.find(text_chain(data, root_hash("m", salt="tenant"))) == ([], 0)

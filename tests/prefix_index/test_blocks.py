"""Block hashes name a block, everything before it, and whose it is."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from prefix_index.blocks import hash_block, hash_blocks, is_root, root_hash, usable_blocks

ROOT = root_hash("m")
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_a_block_hash_is_xxh3_of_parent_and_little_endian_ids() -> None:
    first = xxh3_128_digest(ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0]))
    second = xxh3_128_digest(first + bytes([2, 0, 0, 0, 255, 255, 255, 255]))

    assert hash_blocks([1, 256, 2, 2**32 - 1, 9], 2, ROOT) == [first, second]


@given(token_ids, st.integers(1, 9))
def test_every_full_block_gets_one_hash_whatever_the_container(
    ids: list[int], block_size: int
) -> None:
    hashes = hash_blocks(ids, block_size, ROOT)

    assert len(hashes) == len(ids) // block_size
    assert hashes == hash_blocks(array("I", ids), block_size, ROOT)
    assert all(len(block) == 16 and not is_root(block) for block in hashes)


@given(token_ids, st.integers(1, 9), st.integers(0, 20))
def test_hashing_can_be_resumed_at_any_block(ids: list[int], block_size: int, at: int) -> None:
    whole = hash_blocks(ids, block_size, ROOT)
    head = whole[:at]
    parent = head[-1] if head else ROOT

    assert head + hash_blocks(ids[len(head) * block_size :], block_size, parent) == whole


def test_one_other_token_changes_its_block_and_all_that_follow() -> None:
    ids = list(range(64))
    changed = [*ids[:20], 999, *ids[21:]]
    before, after = hash_blocks(ids, 16, ROOT), hash_blocks(changed, 16, ROOT)

    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4)),
        unique=True,
        min_size=2,
        max_size=30,
    )
)
def test_distinct_identities_have_distinct_roots(parts: list[tuple[str, str, str]]) -> None:
    roots = {root_hash(model, adapter=adapter, salt=salt) for model, adapter, salt in parts}

    assert len(roots) == len(parts)
    assert all(is_root(root) and len(root) == 16 for root in roots)


def test_text_cannot_move_between_the_parts_of_a_root() -> None:
    roots = {
        root_hash("ab", adapter="c"),
        root_hash("a", adapter="bc"),
        root_hash("abc"),
        root_hash("ab", salt="c"),
        root_hash("", adapter="ab", salt="c"),
    }

    assert len(roots) == 5


def test_extras_change_a_block_and_their_absence_does_not() -> None:
    ids = list(range(16))

    assert [hash_block(ids, ROOT)] == hash_blocks(ids, 16, ROOT)
    assert len({hash_block(ids, ROOT, extras) for extras in (b"", b"a", b"b", b"ab")}) == 4


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (640, 39)]
)
def test_the_last_token_is_never_a_hit(num_tokens: int, expected: int) -> None:
    assert usable_blocks(num_tokens, 16) == expected


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_that_do_not_fit_are_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks([bad], 1, ROOT)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_must_be_positive(block_size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        hash_blocks([1], block_size, ROOT)

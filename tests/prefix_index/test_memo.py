"""The memory of known segments never outgrows its bound, and never tells anything wrong."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from prefix_index.blocks import hash_blocks, root_hash
from prefix_index.memo import Segment, SegmentMemo

BLOCK = 16
ROOT = root_hash("m")
# A prompt: which text each of its segments is, by number; text k has a length of its own.
prompts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=60)


def text(number: int) -> array[int]:
    return array("I", range(number, number + 1 + 37 * number))


def keys(numbers: list[int]) -> tuple[list[bytes], list[bytes]]:
    """Return chain keys and text keys, as a reader makes them."""
    text_keys = [xxh3_128_digest(bytes([number])) for number in numbers]
    chain = list(accumulate(text_keys, lambda a, b: xxh3_128_digest(a + b), initial=ROOT))
    return chain[1:], text_keys


def segments(numbers: list[int]) -> list[Segment]:
    before, found = Segment.start(ROOT), []
    for number in numbers:
        before = before.extended(text(number), BLOCK)
        found.append(before)
    return found


@settings(deadline=None)
@given(prompts, st.integers(0, 60_000))
def test_it_stays_within_its_bytes_and_knows_only_what_is_true(
    asked: list[list[int]], max_bytes: int
) -> None:
    memo = SegmentMemo(max_bytes)
    for numbers in asked:
        chain_keys, text_keys = keys(numbers)
        known = memo.known_chain(chain_keys)
        expected = segments(numbers)
        for segment, truth in zip(known, expected, strict=False):
            assert (segment.ids, segment.num_tokens) == (truth.ids, truth.num_tokens)
            assert segment.block_hashes == truth.block_hashes
        for ids, number in zip(memo.known_texts(text_keys), numbers, strict=True):
            assert ids is None or ids == text(number)
        memo.add(chain_keys, expected, text_keys)

        assert memo.num_bytes <= max_bytes
    if not memo.has_forgotten:
        assert all(len(memo.known_chain(keys(n)[0])) == len(n) for n in asked)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 400), st.integers(1, 8))
def test_what_it_counts_is_what_it_takes(size: int, num_segments: int) -> None:
    max_bytes = 2_000_000
    gc.collect()
    tracemalloc.start()
    try:
        memo = SegmentMemo(max_bytes)
        before, _ = tracemalloc.get_traced_memory()
        at = 0
        while not memo.has_forgotten:
            last, found, chain_keys = Segment.start(ROOT), [], []
            for _ in range(num_segments):
                at += 1
                last = last.extended(array("I", [at]) * size, BLOCK)
                found.append(last)
                chain_keys.append(xxh3_128_digest(at.to_bytes(8)))
            memo.add(chain_keys, found, [xxh3_128_digest(b"t" + key) for key in chain_keys])
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert 0.3 * memo.num_bytes < used < 1.1 * memo.num_bytes


def test_the_beginning_of_a_prompt_outlives_its_end() -> None:
    memo = SegmentMemo(16_000)
    chain_keys, text_keys = keys([5, 6, 7])
    memo.add(chain_keys, segments([5, 6, 7]), text_keys)
    number = 20
    while not memo.has_forgotten:
        number += 1
        other_chain, other_text = keys([number])
        memo.add(other_chain, [Segment.start(ROOT).extended(array("I", [1]), BLOCK)], other_text)

    assert len(memo.known_chain(chain_keys)) == 2


def test_a_prompt_larger_than_the_memory_pushes_nothing_out() -> None:
    memo = SegmentMemo(20_000)
    small = keys([1])
    memo.add(small[0], segments([1]), small[1])
    huge = Segment.start(ROOT).extended(array("I", range(50_000)), BLOCK)
    key = xxh3_128_digest(b"huge")
    memo.add([key], [huge], [key])

    assert memo.known_chain([key]) == []
    assert len(memo.known_chain(small[0])) == 1
    assert huge.block_hashes == hash_blocks(range(50_000), BLOCK, ROOT)

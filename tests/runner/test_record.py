"""A block is believed only if it is the one that was asked for, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.kvkeys import namespace_key
from runner.tiers.record import encode_head, head_bytes, is_sound
from runner.tiers.types import BlockRecord
from tests.runner.wire_parts import NAMESPACE, make_payloads, make_places

RECORD = make_places(2)[1].record
PAYLOAD = make_payloads(1, num_bytes=300)[0]
HEAD = encode_head(NAMESPACE, RECORD, memoryview(PAYLOAD))
WHOLE = HEAD + PAYLOAD


def sound(whole: bytes, record: BlockRecord = RECORD, namespace: bytes = NAMESPACE) -> bool:
    view = memoryview(whole)
    return is_sound(view[: len(HEAD)], view[len(HEAD) :], namespace, record)


def test_a_block_that_arrives_as_it_was_sent_is_believed() -> None:
    assert len(HEAD) == head_bytes(len(RECORD.tokens))
    assert sound(WHOLE)


@given(st.integers(0, len(WHOLE) * 8 - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[bit // 8] ^= 1 << bit % 8
    assert not sound(bytes(damaged))


@given(st.integers(0, len(WHOLE) - 1))
def test_any_missing_end_is_found(length: int) -> None:
    assert not sound(WHOLE[:length])


@given(st.binary(max_size=2 * len(WHOLE)))
def test_no_other_bytes_are_believed(noise: bytes) -> None:
    assert not sound(noise) or noise == WHOLE


@pytest.mark.parametrize(
    "other",
    [
        replace(RECORD, key=bytes(32)),
        replace(RECORD, parent=bytes(32)),
        replace(RECORD, tokens=bytes(len(RECORD.tokens))),
        replace(RECORD, depth=RECORD.depth + 1),
    ],
    ids=["key", "parent", "token ids", "depth"],
)
def test_another_block_is_not_taken_for_this_one(other: BlockRecord) -> None:
    assert not sound(WHOLE, other)


def test_a_block_of_another_namespace_is_foreign() -> None:
    assert not sound(WHOLE, namespace=namespace_key({"model": "another"}))

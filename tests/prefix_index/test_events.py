"""Event batches of every engine version decode; whatever else comes is one kind of error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecodeError,
    Index,
    WorkerFeed,
    decode_batch,
    encode_batch,
    hash_blocks,
    root_hash,
)
from prefix_index.events import MAX_PAYLOAD_BYTES
from tests.prefix_index import capture

pack = msgspec.msgpack.encode
TOKENS = list(range(32))
STORED = {
    "block_hashes": [11, 22],
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 16,
}
# One short payload of each shape, for the tests that damage them.
SEEDS = [
    payload
    for name in capture.FILES
    for _, payload in capture.load(name).frames
    if len(payload) < 700
][::3]


def only(payload: Any) -> Any:
    """Decode a batch of one event."""
    (event,) = decode_batch(pack(payload)).events
    return event


@pytest.mark.parametrize("name", capture.FILES)
def test_every_recorded_payload_decodes(name: str) -> None:
    frames = capture.load(name).frames

    assert frames
    for _, payload in frames:
        raw = msgspec.msgpack.decode(payload)
        batch = decode_batch(payload)

        assert (batch.ts, batch.dp_rank) == (raw[0], raw[2])
        assert [type(event).__name__ for event in batch.events] == [
            event["type"] if isinstance(event, dict) else event[0] for event in raw[1]
        ]


@pytest.mark.parametrize(
    "name", [name for name in capture.FILES if "0.24" in name or "0.32" in name]
)
def test_what_the_current_format_decodes_to_encodes_to_the_same_bytes(name: str) -> None:
    for _, payload in capture.load(name).frames:
        assert encode_batch(decode_batch(payload)) == payload


@pytest.mark.parametrize("older", ["0.14.0", "0.18.0", "0.22.0"])
def test_arrays_and_maps_decode_to_the_same_events(older: str) -> None:
    old = [decode_batch(payload) for _, payload in capture.load(f"synth-vllm{older}").frames]
    new = [decode_batch(payload) for _, payload in capture.load("synth-vllm0.24.0").frames]

    def common(batch: EventBatch) -> list[Any]:
        return [
            (event.block_hashes, event.parent_block_hash, event.token_ids, event.medium)
            if isinstance(event, BlockStored)
            else type(event)
            for event in batch.events
        ]

    assert [common(batch) for batch in old] == [common(batch) for batch in new]


def test_each_array_length_that_versions_sent_is_read_by_position() -> None:
    fields = [[11], 7, TOKENS[:16], 16, 3, "CPU", "ad1", [["ad1"]], 2, "full_attention", 512]
    fields += ["LOCAL", "fs", "s-1"]
    names = BlockStored.__struct_fields__
    for length in range(4, len(fields) + 1):
        event = only([1.5, [["BlockStored", *fields[:length]]]])

        assert [getattr(event, name) for name in names[:length]] == fields[:length]
        assert all(getattr(event, name) is None for name in names[length:])


def test_fields_from_the_future_are_ignored() -> None:
    tail = [[11], None, TOKENS[:16], 16, *[None] * 10, "new", {"newer": 1}]

    assert only([1.0, [["BlockStored", *tail]]]).block_hashes == [11]
    assert only([1.0, [{"type": "BlockStored", **STORED, "new": {"a": [1]}}]]).block_size == 16
    assert only([1.0, [["BlockRemoved", [1], "GPU", 0, "x", "y", "new"]]]).group_idx == 0
    assert only([1.0, [{"type": "AllBlocksCleared", "new": 1}], 0, "new"]) == AllBlocksCleared()


def test_a_batch_may_be_an_array_of_two_or_three_or_a_map() -> None:
    events = [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}]
    expected = BlockRemoved([1], "GPU")

    assert decode_batch(pack([1, events])) == EventBatch(1.0, [expected])
    assert decode_batch(pack([1.5, events, 3])) == EventBatch(1.5, [expected], 3)
    as_map = {"ts": 1.5, "events": events, "data_parallel_rank": 3, "new": 0}
    assert decode_batch(pack(as_map)) == EventBatch(1.5, [expected], 3)


@pytest.mark.parametrize("block_hash", [0, 2**64 - 1, -(2**63), -1, b"\x00" * 16, b"\xff" * 32])
def test_hashes_are_unsigned_or_signed_integers_or_bytes(block_hash: int | bytes) -> None:
    event = only(
        [1.0, [{"type": "BlockStored", **STORED, "block_hashes": [block_hash, block_hash]}]]
    )

    assert event.block_hashes == [block_hash, block_hash]


def test_of_token_pairs_the_first_is_the_token() -> None:
    pairs = [[token, token + 1] for token in TOKENS]

    assert only([1.0, [{"type": "BlockStored", **STORED, "token_ids": pairs}]]).token_ids == TOKENS


def test_sglang_says_the_salt_in_a_field_of_its_own() -> None:
    as_map = only([1.0, [{"type": "BlockStored", **STORED, "cache_salt": "s"}]])
    as_array = only([1.0, [["BlockStored", *STORED.values(), None, "GPU", "s", "session"]]])

    assert as_map.extra_keys == as_array.extra_keys == [["s"]]
    assert as_array.lora_name is None


def test_sglang_arrays_are_told_by_what_stands_where() -> None:
    stored = list(STORED.values())
    salted = only([1.0, [["BlockStored", *stored, None, "GPU", "s"]]])
    both = only([1.0, [["BlockStored", *stored, None, "GPU", "s", None, "ad1"]]])
    session = only([1.0, [["BlockStored", *stored, None, "GPU", None, "session"]]])
    adapter = only([1.0, [["BlockStored", *stored, None, "GPU", None, None, "ad1"]]])
    vllm = only([1.0, [["BlockStored", *stored, 3, "GPU", "ad1", [["ad1"]], 0]]])

    assert (salted.extra_keys, salted.lora_name) == ([["s"]], None)
    assert (both.extra_keys, both.lora_name) == ([["s"]], "ad1")
    assert (session.extra_keys, session.lora_name) == (None, None)
    assert (adapter.extra_keys, adapter.lora_name) == (None, "ad1")
    assert (vllm.extra_keys, vllm.lora_name, vllm.group_idx) == ([["ad1"]], "ad1", 0)


def test_a_salt_that_is_said_with_every_block_counts_at_the_start_of_a_prompt_alone() -> None:
    salted = {**STORED, "cache_salt": "s"}
    first = {"type": "BlockStored", **salted}
    later = {"type": "BlockStored", **salted, "block_hashes": [33, 44], "parent_block_hash": 22}
    index = Index(16)
    WorkerFeed(index, "w", "m").apply(decode_batch(pack([1.0, [first, later]])))
    chain = hash_blocks(TOKENS * 2, 16, root_hash("m", salt="s"))

    assert index.match(chain)["w"].total == 64


MALFORMED = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "a number": pack(1),
    "an empty array": pack([]),
    "an empty map": pack({}),
    "no events": pack([1.0]),
    "events are no list": pack([1.0, 2]),
    "a rank that is text": pack([1.0, [], "0"]),
    "a time that is text": pack(["now", []]),
    "bytes behind the batch": pack([1.0, []]) + b"\x00",
    "text of the batch that is no UTF-8": b"\x82\xa2\xff\xfe\x01\xa2ts\x01",
    "nesting without end": b"\x92\x01" + b"\x91" * 100_000,
    "a list that claims 4 billion entries": b"\x92\x01\xdd\xff\xff\xff\xff",
    "a list of more events than a step has": pack([1.0, [None] * 131_073]),
    "extra keys nested without end": pack([1.0, [["BlockStored", [1], None, [1], 1, None, "GPU"]]])[
        :-1
    ]
    + b"\x91" * 50_000,
    "more bytes than a step has": pack([1.0, [b"\x00" * MAX_PAYLOAD_BYTES]]),
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_batch_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(EventDecodeError, match="not a KV event batch"):
        decode_batch(payload)


def stored_with(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", **STORED, **fields}


BAD_EVENTS: dict[str, Any] = {
    "null": None,
    "a number": 1,
    "text": "BlockRemoved",
    "no type": {"block_hashes": [1]},
    "a type that is a number": {"type": 7},
    "an empty array": [],
    "a field missing": {"type": "BlockStored", "block_hashes": [1]},
    "a hash that is text": ["BlockRemoved", ["1"], "GPU"],
    "a hash that is null": ["BlockRemoved", [None], "GPU"],
    "a hash that is a fraction": ["BlockRemoved", [1.5], "GPU"],
    "a hash longer than any digest": ["BlockRemoved", [b"\x00" * 33], "GPU"],
    "a token that is text": stored_with(token_ids=["1"]),
    "a token that is a fraction": ["BlockStored", [1], None, [1.5], 1, None, "GPU"],
    "an empty token pair": ["BlockStored", [1], None, [[]], 1, None, "GPU"],
    "a token triple": ["BlockStored", [1], None, [[1, 2, 3]], 1, None, "GPU"],
    "a negative block size": ["BlockStored", [1], None, [1], -1, None, "GPU"],
    "a block size beyond any": stored_with(block_size=2**40),
    "a medium that is a number": ["BlockRemoved", [1], 3],
    "extra keys that are a number": stored_with(extra_keys=1),
    "a salt that is a number": stored_with(cache_salt=1),
    "a parent that is a list": stored_with(parent_block_hash=[1]),
}
GOOD = [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}, ["BlockRemoved", [6]]]


@pytest.mark.parametrize("event", BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_an_event_that_is_none_is_counted_and_its_neighbours_are_taken(event: Any) -> None:
    batch = decode_batch(pack([1.0, [GOOD[0], event, GOOD[1]], 2]))

    assert batch == EventBatch(1.0, [BlockRemoved([5], "GPU"), BlockRemoved([6])], 2, 0, 1)


@pytest.mark.parametrize("token", [-1, 2**32, 2**64 - 1, -(2**63)])
@pytest.mark.parametrize("form", ["map", "array", "pairs", "salted"])
def test_a_token_that_no_vocabulary_has_is_counted_and_its_block_not_stored(
    token: int, form: str
) -> None:
    tokens: list[Any] = [*TOKENS[:20], token, *TOKENS[21:]]
    event: Any = stored_with(token_ids=tokens)
    if form == "array":
        event = ["BlockStored", [11, 22], None, tokens, 16, None, "GPU"]
    elif form == "pairs":
        event = stored_with(token_ids=[[one, one] for one in tokens])
    elif form == "salted":
        event = stored_with(token_ids=tokens, cache_salt="s")
    index = Index(16)
    feed = WorkerFeed(index, "w", "m")
    good = stored_with(block_hashes=[33, 44])
    feed.apply(decode_batch(pack([1.0, [event, good]])))

    assert (feed.implausible, feed.rejected, index.num_blocks) == (1, 1, 2)


@pytest.mark.parametrize("event", [{"type": "BlockMoved"}, ["BlockMoved", 1, {}], {"type": ""}])
def test_an_event_of_a_type_from_the_future_is_counted_apart(event: Any) -> None:
    batch = decode_batch(pack([1.0, [event, GOOD[0]]]))

    assert batch == EventBatch(1.0, [BlockRemoved([5], "GPU")], None, 1, 0)


def test_text_of_an_event_that_is_no_utf8_is_one_bad_event() -> None:
    batch = decode_batch(b"\x92\x01\x92\x91\xa2\xff\xfe" + pack(GOOD[0]))

    assert (len(batch.events), batch.unknown, batch.malformed) == (1, 0, 1)


# Whatever msgpack can say.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)
FIELDS = [*BlockStored.__struct_fields__, "cache_salt", "type"]


@settings(max_examples=600, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3),
    st.integers(0, 14),
    VALUES,
    st.booleans(),
)
def test_values_of_any_type_at_any_place_harm_nobody_else(
    fields: dict[str, Any], at: int, value: Any, is_array: bool
) -> None:
    good = {"type": "BlockStored", **STORED, "block_hashes": [91, 92]}
    bad: Any = {"type": "BlockStored", **STORED, **fields}
    if is_array:
        bad = ["BlockStored", *STORED.values(), None, "GPU", None, None, None, None]
        bad[min(at, len(bad) - 1)] = value
    batch = decode_batch(pack([1.0, [bad, good]]))
    index = Index(16)
    feed = WorkerFeed(index, "w", "m")
    feed.apply(batch)
    feed.apply(batch)

    assert len(batch.events) + batch.unknown + batch.malformed == 2
    assert index.holds("w", hash_blocks(TOKENS[:16], 16, root_hash("m"))[0])
    feed.clear()
    assert index.num_blocks == 0


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_any_msgpack_value_is_a_batch_or_a_decode_error(value: Any) -> None:
    try:
        batch = decode_batch(pack(value))
    except EventDecodeError:
        return

    WorkerFeed(Index(16), "w", "m").apply(batch)


@pytest.mark.parametrize("payload", SEEDS, ids=range(len(SEEDS)))
def test_every_truncation_is_a_decode_error(payload: bytes) -> None:
    for end in range(len(payload)):
        with pytest.raises(EventDecodeError):
            decode_batch(payload[:end])


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4)
)
def test_flipped_bytes_are_a_batch_or_a_decode_error_and_harm_no_index(
    seed: bytes, flips: list[tuple[float, int]]
) -> None:
    payload = bytearray(seed)
    for where, value in flips:
        payload[min(int(where * len(payload)), len(payload) - 1)] = value
    index = Index(16)
    feed = WorkerFeed(index, "w", "m")
    try:
        batch = decode_batch(bytes(payload))
    except EventDecodeError:
        return

    feed.apply(batch)
    feed.apply(batch)
    feed.clear()

    assert index.num_blocks == 0


@given(st.binary(max_size=60))
def test_random_bytes_are_a_batch_or_a_decode_error(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except EventDecodeError:
        return

    assert isinstance(batch, EventBatch)

"""KV-cache events: decoding every shape of a batch that versions of vLLM and SGLang published.

Events come as maps ``{"type": "BlockStored", ...}`` with defaults left out (vLLM from 0.24, SGLang
after #37482) or as arrays ``["BlockStored", ...]`` with fields only ever appended (before). Both
live in mixed fleets. Unknown fields are ignored. An event that does not fit is left out and
counted, so that one kind of event from the future does not take the others with it.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured), 0.14 to 0.24 field lists, SGLang 0.5.23
``disaggregation/kv_events.py`` and ``mem_cache/events.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from prefix_index.event_types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockSize,
    BlockStored,
    EngineHash,
    Event,
    EventBatch,
    EventDecodeError,
    Extras,
    WireHash,
    encode_batch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EngineHash",
    "Event",
    "EventBatch",
    "EventDecodeError",
    "decode_batch",
    "encode_batch",
]

# One batch is one engine step: 128k tokens of prompts, announced for six KV groups, five bytes a
# token, are 4 MB. Python objects of hostile ones take up to 64 times as much for a moment.
MAX_PAYLOAD_BYTES: Final = 8 * 2**20
# The same step may remove a block of 16 for each that it stores, one event each.
_MAX_EVENTS: Final = 131_072

_Events: TypeAlias = Annotated[list[msgspec.Raw], Meta(max_length=_MAX_EVENTS)]
_KNOWN_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class _StoredMap(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True):
    """``BlockStored`` on the wire, where tokens may be pairs and SGLang names the salt."""

    block_hashes: list[WireHash]
    token_ids: msgspec.Raw
    block_size: BlockSize
    parent_block_hash: WireHash | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, frozen=True):
    """``BlockStored`` by position.

    The two places after ``medium`` are ``lora_name, extra_keys`` in vLLM and
    ``cache_salt, session_id`` in SGLang. vLLM names an adapter only where it numbers one, and
    SGLang numbers none; and extra keys are no string.
    """

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: BlockSize
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Extras | str | None = None
    group_idx: int | str | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, frozen=True):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


class _BatchArray(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: _Events
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct, frozen=True):
    ts: float
    events: _Events
    data_parallel_rank: int | None = None


class _PlainBatch(msgspec.Struct, array_like=True, frozen=True):
    """The shape that nearly all have: an array of maps without anything peculiar to SGLang."""

    ts: float
    events: Annotated[
        list[BlockStored | BlockRemoved | AllBlocksCleared], Meta(max_length=_MAX_EVENTS)
    ]
    data_parallel_rank: int | None = None


class _TypeArray(msgspec.Struct, array_like=True, frozen=True):
    type: str


class _TypeMap(msgspec.Struct, frozen=True):
    type: str


_WireEvent: TypeAlias = (
    _StoredMap | _StoredArray | _RemovedArray | _ClearedArray | BlockRemoved | AllBlocksCleared
)

_decode_plain: Final = msgspec.msgpack.Decoder(_PlainBatch).decode
_decode_batch_array: Final = msgspec.msgpack.Decoder(_BatchArray).decode
_decode_batch_map: Final = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_type_array: Final = msgspec.msgpack.Decoder(_TypeArray).decode
_decode_type_map: Final = msgspec.msgpack.Decoder(_TypeMap).decode
_decode_event_array: Final = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
).decode
_decode_event_map: Final = msgspec.msgpack.Decoder(
    _StoredMap | BlockRemoved | AllBlocksCleared
).decode
_decode_tokens: Final = msgspec.msgpack.Decoder(list[int]).decode
# Engines with speculative heads (EAGLE, MTP) send each token as a pair; the first is the token.
_decode_pairs: Final = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one published payload.

    Returns:
        The events that are known and well formed; the others are counted in it.

    Raises:
        EventDecodeError: If it is no batch at all, or a larger one than an engine can mean.
            Nothing else is raised, whatever the bytes.
    """
    size = len(payload)
    if size > MAX_PAYLOAD_BYTES:
        raise EventDecodeError(f"not a KV event batch: {size} bytes, at most {MAX_PAYLOAD_BYTES}")
    try:
        # A field that the plain shape would pass over.
        if payload.find(b"cache_salt") < 0:
            plain = _decode_plain(payload)
            return EventBatch(plain.ts, plain.events, plain.data_parallel_rank)
    except Exception:  # noqa: S110  # whatever is wrong with it is found out below
        pass
    try:
        return _decode_piece_by_piece(payload)
    except Exception as error:
        # Beside msgspec's own errors: bad UTF-8, nesting too deep, bad timestamps.
        raise EventDecodeError(
            f"not a KV event batch ({size} bytes): {type(error).__name__}: {error}"
        ) from error


def _decode_piece_by_piece(payload: bytes) -> EventBatch:
    batch = (_decode_batch_map if _is_map(payload) else _decode_batch_array)(payload)
    events: list[Event] = []
    unknown = 0
    for raw in batch.events:
        piece = bytes(raw)
        try:
            events.append(_decode_event(piece))
        except Exception:  # as above, and unhashable keys
            unknown += _is_of_unknown_type(piece)
    malformed = len(batch.events) - len(events) - unknown
    return EventBatch(batch.ts, events, batch.data_parallel_rank, unknown, malformed)


def _is_map(payload: bytes) -> bool:
    """Say whether a msgpack value is a map, by its first byte (fixmap, map 16, map 32)."""
    return bool(payload) and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF))


def _is_of_unknown_type(piece: bytes) -> bool:
    """Say whether a piece is an event that this version has never heard of."""
    decode: Callable[[bytes], _TypeMap | _TypeArray] = (
        _decode_type_map if _is_map(piece) else _decode_type_array
    )
    try:
        return decode(piece).type not in _KNOWN_TYPES
    except Exception:  # it has no type at all
        return False


def _decode_event(piece: bytes) -> Event:
    decode: Callable[[bytes], _WireEvent] = (
        _decode_event_map if _is_map(piece) else _decode_event_array
    )
    event = decode(piece)
    if isinstance(event, _StoredMap):
        extra_keys = event.extra_keys
        if event.cache_salt and extra_keys is None:
            extra_keys = _salted(event, event.cache_salt)
        return _stored(event, extra_keys, event.lora_name, event.group_idx)
    if isinstance(event, _StoredArray):
        is_sglang = isinstance(event.extra_keys, str) or (event.lora_name and event.lora_id is None)
        if is_sglang or isinstance(event.group_idx, str):
            name = event.group_idx if isinstance(event.group_idx, str) else None
            return _stored(event, _salted(event, event.lora_name), name, None)
        extras = None if isinstance(event.extra_keys, str) else event.extra_keys
        return _stored(event, extras, event.lora_name, event.group_idx)
    if isinstance(event, _RemovedArray):
        return BlockRemoved(
            event.block_hashes, event.medium, event.group_idx, event.locality, event.ownership
        )
    if isinstance(event, _ClearedArray):
        return AllBlocksCleared()
    return event


def _salted(wire: _StoredMap | _StoredArray, salt: str | None) -> list[list[Any] | None] | None:
    """Put the salt where vLLM has it, in the first block of a prompt.

    SGLang says it with every block; behind the first it is in the parent's hash already.
    """
    return [[salt]] if salt and wire.parent_block_hash is None else None


def _stored(
    wire: _StoredMap | _StoredArray,
    extra_keys: list[list[Any] | None] | None,
    lora_name: str | None,
    group_idx: int | None,
) -> BlockStored:
    return BlockStored(
        block_hashes=wire.block_hashes,
        parent_block_hash=wire.parent_block_hash,
        token_ids=_tokens(bytes(wire.token_ids)),
        block_size=wire.block_size,
        lora_id=wire.lora_id,
        medium=wire.medium,
        lora_name=lora_name,
        extra_keys=extra_keys,
        group_idx=group_idx,
        kv_cache_spec_kind=wire.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=wire.kv_cache_spec_sliding_window,
        locality=wire.locality,
        ownership=wire.ownership,
        session_id=wire.session_id,
    )


def _tokens(raw: bytes) -> list[int]:
    try:
        return _decode_tokens(raw)
    except msgspec.ValidationError:
        return [pair[0] for pair in _decode_pairs(raw)]

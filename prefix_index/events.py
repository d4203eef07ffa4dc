"""KV-cache events as typed records: decoding what engines publish, encoding what ours does.

One payload is one batch, ``[ts, [event, ...], data_parallel_rank]`` in msgpack. Events come as maps
``{"type": "BlockStored", ...}`` with defaults left out (vLLM from 0.24, SGLang after #37482) or as
arrays ``["BlockStored", ...]`` with fields only ever appended (before). Both live in mixed fleets.
Unknown fields are ignored; anything else that does not fit raises ``EventDecodeError``.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured), 0.14 to 0.24 field lists, SGLang 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Callable

EngineHash: TypeAlias = int | bytes
"""An engine's own block hash, opaque: unsigned or signed 64-bit, or raw digest bytes."""

# What fits an array("I"), the form in which ids are hashed.
_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_BlockSize: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
_Extras: TypeAlias = list[list[Any] | None]


class EventDecodeError(ValueError):
    """A payload that is not a batch of KV-cache events."""


def _absent() -> Any:
    """Return None where a default must still be written: a factory is never left out."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, frozen=True):
    """Blocks of one chain that became available, in prompt order.

    Attributes:
        block_hashes: One engine hash per block.
        parent_block_hash: Block before the first one; None at the start of a prompt.
        token_ids: Tokens of the blocks; empty where the engine only announces a tier.
        block_size: Tokens per block; 0 together with empty ``token_ids``.
        medium: Where the copy is (GPU, CPU, ...); None means GPU.
        extra_keys: One list per block of what else went into its hash, or None; may be shorter.
            A salt stands in the first block's, where vLLM puts it.
        group_idx: KV cache group of a hybrid model.
    """

    # With one field more, msgspec writes a longer map header than vLLM does.

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | str | None = msgspec.field(default_factory=_absent)
    medium: str | None = msgspec.field(default_factory=_absent)
    lora_name: str | None = msgspec.field(default_factory=_absent)
    extra_keys: _Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, frozen=True):
    """One copy of each of these blocks left its medium."""

    block_hashes: list[EngineHash]
    medium: str | None = msgspec.field(default_factory=_absent)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type", frozen=True):
    """The engine dropped its whole prefix cache."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one engine step; ``ts`` is the engine's wall clock in seconds."""

    ts: float
    events: list[Event]
    dp_rank: int | None = None


class _StoredMap(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True):
    """``BlockStored`` on the wire, where tokens may be pairs and SGLang names the salt."""

    block_hashes: list[EngineHash]
    token_ids: msgspec.Raw
    block_size: _BlockSize
    parent_block_hash: EngineHash | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _Extras | None = None
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
    ``cache_salt, session_id`` in SGLang; a string in the second one tells them apart.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: msgspec.Raw
    block_size: _BlockSize
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _Extras | str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, frozen=True):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, frozen=True):
    pass


class _BatchArray(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_WireEvent: TypeAlias = (
    _StoredMap | _StoredArray | _RemovedArray | _ClearedArray | BlockRemoved | AllBlocksCleared
)

_decode_batch_array: Final = msgspec.msgpack.Decoder(_BatchArray).decode
_decode_batch_map: Final = msgspec.msgpack.Decoder(_BatchMap).decode
_decode_event_array: Final = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
).decode
_decode_event_map: Final = msgspec.msgpack.Decoder(
    _StoredMap | BlockRemoved | AllBlocksCleared
).decode
_decode_tokens: Final = msgspec.msgpack.Decoder(list[_TokenId]).decode
# Engines with speculative heads (EAGLE) send each token as a pair; the first is the token.
_decode_pairs: Final = msgspec.msgpack.Decoder(list[tuple[_TokenId, _TokenId]]).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one published payload.

    Raises:
        EventDecodeError: If it is anything but a batch of known events. Nothing else is raised,
            whatever the bytes.
    """
    try:
        batch = (_decode_batch_map if _is_map(payload) else _decode_batch_array)(payload)
        events = [_decode_event(bytes(raw)) for raw in batch.events]
    except Exception as error:
        # Beside msgspec's own errors: bad UTF-8, nesting too deep, unhashable keys, bad timestamps.
        raise EventDecodeError(
            f"not a KV event batch ({len(payload)} bytes): {type(error).__name__}: {error}"
        ) from error
    return EventBatch(ts=batch.ts, events=events, dp_rank=batch.data_parallel_rank)


def encode_batch(batch: EventBatch) -> bytes:
    """Encode a batch as vLLM 0.32 does: an array of maps with defaults left out."""
    return _encode(batch)


def _is_map(payload: bytes) -> bool:
    """Say whether a msgpack value is a map, by its first byte (fixmap, map 16, map 32)."""
    return bool(payload) and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF))


def _decode_event(raw: bytes) -> Event:
    decode: Callable[[bytes], _WireEvent] = (
        _decode_event_map if _is_map(raw) else _decode_event_array
    )
    event = decode(raw)
    if isinstance(event, _StoredMap):
        extra_keys = event.extra_keys
        if event.cache_salt and extra_keys is None:
            extra_keys = _salted(event.cache_salt)
        return _stored(event, extra_keys, event.lora_name)
    if isinstance(event, _StoredArray):
        if isinstance(event.extra_keys, str):
            return _stored(event, _salted(event.lora_name), None)
        return _stored(event, event.extra_keys, event.lora_name)
    if isinstance(event, _RemovedArray):
        return BlockRemoved(
            event.block_hashes, event.medium, event.group_idx, event.locality, event.ownership
        )
    if isinstance(event, _ClearedArray):
        return AllBlocksCleared()
    return event


def _salted(salt: str | None) -> _Extras | None:
    return [[salt]] if salt else None


def _stored(
    wire: _StoredMap | _StoredArray, extra_keys: _Extras | None, lora_name: str | None
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
        group_idx=wire.group_idx,
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

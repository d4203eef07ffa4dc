"""KV-cache events as typed records, and encoding them as vLLM 0.32 does.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

EngineHash: TypeAlias = int | bytes
"""An engine's own block hash, opaque: unsigned or signed 64-bit, or raw digest bytes."""

BlockSize: TypeAlias = Annotated[int, Meta(ge=0, le=2**31)]
# The longest digest that engines offer is sha256.
WireHash: TypeAlias = int | Annotated[bytes, Meta(max_length=32)]
Extras: TypeAlias = list[list[Any] | None]


class EventDecodeError(ValueError):
    """A payload that is not a batch of KV-cache events."""


def _absent() -> Any:
    """Return None where a default must still be written: a factory is never left out."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, frozen=True):
    """Blocks of one chain that became available, in prompt order.

    Attributes:
        block_hashes: One engine hash per block.
        parent_block_hash: Block before the first one; None at the start of a prompt.
        token_ids: Tokens of the blocks; empty where the engine only announces a tier. Their range
            is checked where they are hashed: here it would cost a tenth of the ingest.
        block_size: Tokens per block; 0 together with empty ``token_ids``.
        medium: Where the copy is (GPU, CPU, ...); None means GPU.
        extra_keys: One list per block of what else went into its hash, or None; may be shorter.
            A salt stands in the first block's, where vLLM puts it.
        group_idx: KV cache group of a hybrid model.
    """

    # With one field more, msgspec writes a longer map header than vLLM does.

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: BlockSize
    lora_id: int | str | None = msgspec.field(default_factory=_absent)
    medium: str | None = msgspec.field(default_factory=_absent)
    lora_name: str | None = msgspec.field(default_factory=_absent)
    extra_keys: Extras | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, frozen=True):
    """One copy of each of these blocks left its medium."""

    block_hashes: list[WireHash]
    medium: str | None = msgspec.field(default_factory=_absent)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type", frozen=True):
    """The engine dropped its whole prefix cache."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """Events of one engine step.

    Attributes:
        ts: The engine's wall clock in seconds.
        events: What happened, in order.
        dp_rank: Data-parallel rank that speaks.
        unknown: Events left out because their type is not known here; 0 when encoding.
        malformed: Events left out because they are of a known type and none; 0 when encoding.
    """

    ts: float
    events: list[Event]
    dp_rank: int | None = None
    unknown: int = 0
    malformed: int = 0


_encode: Final = msgspec.msgpack.Encoder().encode


def encode_batch(batch: EventBatch) -> bytes:
    """Encode a batch as vLLM 0.32 does: an array of maps with defaults left out."""
    return _encode((batch.ts, batch.events, batch.dp_rank))

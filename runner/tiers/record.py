"""One block as it travels between processes: a head that says what it is, then its bytes.

A receiver knows which block it asked for, so it makes the head that this block must have and
compares: every field, the token ids and the payload's checksum are verified at once, and there is
no parser to feed with bad input. The checksum finds accidents; who may write is the network's
business, as with the events.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from runner.kvkeys import KvKey
    from runner.tiers.types import BlockRecord

MAGIC = b"WLKV"
# Of the head; a reader of another version finds nothing it would believe.
VERSION = 1

# Of a namespace and of every block's key.
KEY_BYTES = 32

# Magic, version, depth, bytes of token ids, bytes of payload, xxh3 of the payload, namespace, key,
# parent. Little-endian, without gaps but one after the version that aligns what follows.
_FIXED = struct.Struct("<4sHxxIIQQ32s32s32s")


def head_bytes(num_token_bytes: int) -> int:
    """Return the length of the head of a block with so many bytes of packed token ids."""
    return _FIXED.size + num_token_bytes


def encode_head(namespace: KvKey, record: BlockRecord, payload: memoryview) -> bytes:
    """Return the head of a block; reads all of its payload for the checksum.

    Args:
        namespace: Of everything that makes the bytes usable.
        record: Which block.
        payload: Its bytes, as they lie in the pool.
    """
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        record.depth,
        len(record.tokens),
        payload.nbytes,
        xxhash.xxh3_64_intdigest(payload),
        namespace,
        record.key,
        record.parent,
    )
    return fixed + record.tokens


def is_sound(head: memoryview, payload: memoryview, namespace: KvKey, record: BlockRecord) -> bool:
    """Whether what arrived is exactly the block that was asked for."""
    return head == encode_head(namespace, record, payload)

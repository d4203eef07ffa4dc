"""Prompts -> tokens -> blocks -> who holds what: the pure core that all products share."""

from prefix_index.blocks import BlockHash, hash_blocks, root_hash, usable_blocks
from prefix_index.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDecodeError,
    decode_batch,
    encode_batch,
)
from prefix_index.index import Hit, Index, Tier

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventDecodeError",
    "Hit",
    "Index",
    "Tier",
    "decode_batch",
    "encode_batch",
    "hash_blocks",
    "root_hash",
    "usable_blocks",
]

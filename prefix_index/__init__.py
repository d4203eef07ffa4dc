"""Prompts -> tokens -> blocks -> who holds what: the pure core that all products share.

The subscriber is imported by its own name, ``prefix_index.subscriber``: it alone needs ZMQ.
"""

from prefix_index.blocks import BlockHash, hash_blocks, root_hash, usable_blocks
from prefix_index.chat import ChatTemplate, TemplateRefusedError
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
from prefix_index.ingest import WorkerFeed
from prefix_index.prompts import Draft, Prompt, PromptReader
from prefix_index.residency import Residency
from prefix_index.tokens import PromptTokenizer, TokenizerFilesError

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "ChatTemplate",
    "Draft",
    "EventBatch",
    "EventDecodeError",
    "Hit",
    "Index",
    "Prompt",
    "PromptReader",
    "PromptTokenizer",
    "Residency",
    "TemplateRefusedError",
    "Tier",
    "TokenizerFilesError",
    "WorkerFeed",
    "decode_batch",
    "encode_batch",
    "hash_blocks",
    "root_hash",
    "usable_blocks",
]

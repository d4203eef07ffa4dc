"""KV events of whole blocks as vLLM writes them, for the pool and for every tier beneath it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_index.events import BlockRemoved, BlockStored
from runner.kvkeys import event_hash, unpack_tokens

if TYPE_CHECKING:
    from runner.kvkeys import BlockChain, KvKey

# One attention group, full attention: what an index needs to know to use the hashes.
_GROUP = 0
_SPEC_KIND = "full_attention"


def stored_event(
    chain: BlockChain, first: int, last: int, *, block_size: int, medium: str
) -> BlockStored:
    """Return the event for neighbouring blocks that have just become findable.

    Args:
        chain: Their sequence: keys, tokens, salt and adapter.
        first: Index of the first of them.
        last: Index after the last.
        block_size: Tokens of a block.
        medium: Where they are, by its name in events.
    """
    # As vLLM orders them: the adapter with every block, then the salt with the first one.
    number, name = chain.adapter or (None, None)
    adapter = [name] if name is not None else []
    extra_keys: list[list[str] | None] = [adapter or None] * (last - first)
    if chain.salt and not first:
        extra_keys[0] = [*adapter, chain.salt]
    return BlockStored(
        block_hashes=[event_hash(key) for key in chain.keys[first:last]],
        parent_block_hash=event_hash(chain.keys[first - 1]) if first else None,
        token_ids=unpack_tokens(b"".join(chain.tokens[first:last])),
        block_size=block_size,
        medium=medium,
        lora_id=number,
        lora_name=name,
        extra_keys=extra_keys,
        group_idx=_GROUP,
        kv_cache_spec_kind=_SPEC_KIND,
    )


def removed_event(key: KvKey, *, medium: str) -> BlockRemoved:
    """Return the event for a block that is no longer findable on a medium."""
    return BlockRemoved(block_hashes=[event_hash(key)], medium=medium, group_idx=_GROUP)

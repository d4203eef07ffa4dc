"""What an event says about the identity of its blocks, as our own block hashes.

Engines name adapter, salt and other inputs in ways of their own; here they become the root of a
chain and the typed extras of its blocks, so that a prompt and an event agree on the hashes.

Source: vLLM 0.32 ``v1/core/kv_cache_utils.py`` for the order of extra keys (captured).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prefix_index.blocks import hash_block, hash_blocks, root_hash

if TYPE_CHECKING:
    from prefix_index.blocks import BlockHash
    from prefix_index.events import BlockStored

_encode = msgspec.msgpack.Encoder().encode


def chain_of(
    event: BlockStored, model: str, parent: BlockHash | None, block_size: int
) -> tuple[list[BlockHash], BlockHash]:
    """Hash an event's tokens in blocks of ours; tokens and hashes must agree in length.

    Args:
        event: Blocks of one chain with their tokens.
        model: What the pool's roots are made of.
        parent: Our hash of the block before the first one; None at the start of a prompt.
        block_size: Tokens per block of ours; the event's is a whole multiple.

    Returns:
        One hash per block of ours, and the parent of the first: ``parent``, or the prompt's root.

    Raises:
        OverflowError: If a token id does not fit 32 bits.
    """
    extras = _without_adapter(event)
    if parent is None:
        salt = _take_salt(extras)
        parent = root_hash(model, adapter=_adapter(event), salt=salt)
    if not any(extras):
        return hash_blocks(event.token_ids, block_size, parent), parent
    return _hash_with_extras(event, extras, parent, block_size), parent


def _adapter(event: BlockStored) -> str:
    if event.lora_name:
        return event.lora_name
    # Engines that tell only a number: no request of ours has such a name, so nothing matches,
    # and above all the base model's prompts do not.
    return "" if event.lora_id is None else f"lora_id:{event.lora_id}"


def _without_adapter(event: BlockStored) -> list[list[object]]:
    """Return each block's extra keys without the adapter's name, which leads them."""
    if not event.extra_keys or not any(event.extra_keys):
        return []
    keys = [list(block_keys or ()) for block_keys in event.extra_keys]
    if event.lora_name:
        keys = [block[1:] if block[:1] == [event.lora_name] else block for block in keys]
    return keys


def _take_salt(extras: list[list[object]]) -> str:
    """Take the salt, the only bare string left, out of the first block's extras."""
    for at, key in enumerate(extras[0] if extras else ()):
        if isinstance(key, str):
            del extras[0][at]
            return key
    return ""


def _hash_with_extras(
    event: BlockStored, extras: list[list[object]], parent: BlockHash, block_size: int
) -> list[BlockHash]:
    """Hash blocks, each of the engine's with its extras.

    Where in an engine's block an extra belongs is not told. It goes into the first part, so that
    none of the parts is taken for one of a prompt without it.
    """
    hashes, ids = [], event.token_ids
    for start in range(0, len(ids), block_size):
        at, offset = divmod(start, event.block_size)
        own = extras[at] if at < len(extras) and not offset else None
        parent = hash_block(ids[start : start + block_size], parent, _encode(own) if own else b"")
        hashes.append(parent)
    return hashes

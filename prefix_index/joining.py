"""Events that say in several what one could say, put together: each call into the index costs.

vLLM sends one removal for each block; older SGLang one store for each page of a chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from prefix_index.event_types import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from prefix_index.event_types import Event


def joined(events: list[Event]) -> list[Event]:
    """Return events with the same meaning, in the same order; those given stay as they are."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    # Whether the last one is a copy of ours, which may grow.
    is_own = False
    for event in events:
        last = result[-1] if result else None
        if isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved):
            is_same = (event.medium, event.group_idx) == (last.medium, last.group_idx)
            if is_same and not is_own:
                last = result[-1] = replace(last, block_hashes=[*last.block_hashes])
            if is_same:
                last.block_hashes.extend(event.block_hashes)
        elif isinstance(last, BlockStored) and isinstance(event, BlockStored):
            is_same = _continues(event, last)
            if is_same and not is_own:
                last = result[-1] = replace(
                    last, block_hashes=[*last.block_hashes], token_ids=[*last.token_ids]
                )
            if is_same:
                last.block_hashes.extend(event.block_hashes)
                last.token_ids.extend(event.token_ids)
        else:
            is_same = False
        is_own = is_same
        if not is_same:
            result.append(event)
    return result


def _continues(event: BlockStored, last: BlockStored) -> bool:
    """Say whether blocks follow those of another event, and are described like them."""
    return (
        event.parent_block_hash is not None
        and bool(last.block_hashes)
        and event.parent_block_hash == last.block_hashes[-1]
        and _is_plain(event)
        and _is_plain(last)
        and event.block_size == last.block_size
        and (event.medium, event.group_idx, event.kv_cache_spec_kind)
        == (last.medium, last.group_idx, last.kv_cache_spec_kind)
        and (event.lora_name, event.lora_id) == (last.lora_name, last.lora_id)
    )


def _is_plain(event: BlockStored) -> bool:
    """Say whether hashes and tokens agree; a salt in the first block's extras may stay there."""
    return (
        len(event.block_hashes) * event.block_size == len(event.token_ids) > 0
        and not any((event.extra_keys or ())[1:])
        and (event.parent_block_hash is None or not event.extra_keys or not event.extra_keys[0])
    )

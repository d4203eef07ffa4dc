"""Read a worker's whole state into the view, in slices, while it goes on changing.

A block that changes during the scan may be read in either state; the deltas that come meanwhile
wait and are applied afterwards, and as they carry absolute states the end is the truth.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from prefix_index.replica.codec import HASH_BYTES, SharedValueError, unpack_state
from prefix_index.replica.link import answer

if TYPE_CHECKING:
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index
    from prefix_index.replica.lease import Shared
    from prefix_index.replica.link import Link
    from prefix_index.replica.view import View

# Fields per read: the server takes 0.2 ms for them, writing them into the view 1 ms.
_SCAN_FIELDS: Final = 500
# Blocks of the view looked at between two turns of other tasks, 2 ms at most.
_PAGE_SLOTS: Final = 2000


async def load(link: Link, state_key: str, view: View, shared: Shared, index: Index) -> bool:
    """Make the view equal to the state in Redis.

    Args:
        link: Connection.
        state_key: Key of the worker's state.
        view: Gets it; its deltas wait meanwhile, ``start_loading`` said so.
        shared: What Redis said of the worker after the stream's tail had begun.
        index: Holds the view's blocks.

    Returns:
        False if it was overtaken, by a change of roles or more deltas than may wait.

    Raises:
        SharedValueError: If the state cannot be read.
        LINK_ERRORS: If Redis does not answer.
    """
    view.source.set_silent(shared.head.is_silent)
    stale = await _known(index, view.worker)
    cursor, is_first = 0, True
    while cursor or is_first:
        is_first = False
        cursor, fields = await _scan(link, state_key, cursor)
        for block, value in fields:
            if len(block) != HASH_BYTES:
                raise SharedValueError("no block hash")
            view.put(block, unpack_state(value))
            stale.pop(block, None)
        await asyncio.sleep(0)
        if _is_overtaken(view):
            return False
    for number, block in enumerate(stale, start=1):
        index.set_copies(view.worker, block, block, 0)
        if number % _SCAN_FIELDS == 0:
            await asyncio.sleep(0)
            if _is_overtaken(view):
                return False
    view.applied, view.head = shared.id, shared.head
    view.is_broken = False
    view.loads += 1
    while view.waiting:
        view.apply(view.waiting.popleft())
        await asyncio.sleep(0)
        if _is_overtaken(view):
            return False
    return True


def _is_overtaken(view: View) -> bool:
    return view.needs_load or not view.is_loading


async def _known(index: Index, worker: str) -> dict[BlockHash, None]:
    known: dict[BlockHash, None] = {}
    cursor, is_first = 0, True
    while cursor or is_first:
        is_first = False
        found, cursor = index.page(worker, cursor, _PAGE_SLOTS)
        known.update((block, None) for block, _, _ in found)
        await asyncio.sleep(0)
    return known


async def _scan(link: Link, key: str, cursor: int) -> tuple[int, list[tuple[bytes, bytes]]]:
    found: Any = await answer(link.client.hscan(key, cursor, count=_SCAN_FIELDS))
    return int(found[0]), list(found[1].items())

"""Read a worker's whole state into the view, in slices, while it goes on changing.

A block that changes during the scan may be read in either state; the deltas that come meanwhile
wait and are applied afterwards, and as they carry absolute states the end is the truth.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prefix_index.blocks import BlockHash
from prefix_index.replica.codec import (
    HASH_BYTES,
    SharedValueError,
    unpack_plain,
    unpack_state,
)
from prefix_index.replica.link import answer

if TYPE_CHECKING:
    from prefix_index.events import EngineHash
    from prefix_index.index import Index
    from prefix_index.replica.lease import Shared
    from prefix_index.replica.link import Link
    from prefix_index.replica.view import View

# Fields per read: the server takes 0.2 ms for them, unpacking them takes a millisecond.
_SCAN_FIELDS: Final = 500
# Blocks written between two turns of other tasks, in about half a millisecond.
_SLICE_BLOCKS: Final = 128
_ONE_GPU_COPY: Final = 1


class States(NamedTuple):
    """What a worker holds: block -> parent, and packed copies where they are not one in the GPU."""

    parents: dict[BlockHash, BlockHash]
    copies: dict[BlockHash, int]


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
    states = await _scan(link, state_key, view)
    if states is None:
        return False
    is_empty = not any(index.blocks_by_tier(view.worker).values())
    write = _fill(index, view.worker, states) if is_empty else _update(index, view, states)
    if not await write or _is_overtaken(view):
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


async def _scan(link: Link, key: str, view: View) -> States | None:
    """Read all states, and the names of their blocks; None if overtaken."""
    states = States({}, {})
    ahead = _scan_on(link, key, 0)
    try:
        while True:
            found = await ahead
            cursor = int(found[0])
            if cursor:
                # The server reads on while this is unpacked.
                ahead = _scan_on(link, key, cursor)
            view.source.adopt(*_unpack(found[1], states))
            await asyncio.sleep(0)
            if _is_overtaken(view):
                return None
            if not cursor:
                return states
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def _scan_on(link: Link, key: str, cursor: int) -> asyncio.Task[Any]:
    read = answer(link.client.hscan(key, cursor, count=_SCAN_FIELDS))
    return asyncio.get_running_loop().create_task(read)


def _unpack(fields: dict[bytes, bytes], states: States) -> tuple[list[EngineHash], list[BlockHash]]:
    """Add fields of a state, and return the names and whose they are."""
    parents, copies = states
    names: list[EngineHash] = []
    named: list[BlockHash] = []
    for block, value in fields.items():
        if len(block) != HASH_BYTES:
            raise SharedValueError("no block hash")
        plain = unpack_plain(value)  # a million times; a tuple less counts
        if plain is None:
            state = unpack_state(value)
            parent = state.parent
            if state.copies != _ONE_GPU_COPY:
                copies[block] = state.copies
            if state.name is not None:
                names.append(state.name)
                named.append(block)
        else:
            parent, name = plain
            names.append(name)
            named.append(block)
        if parent == block:
            raise SharedValueError("a block is its own parent")
        parents[block] = parent
    return names, named


async def _fill(index: Index, worker: str, states: States) -> bool:
    """Write states of a worker of which the view has nothing: chain by chain, which is cheapest."""
    parents, copies = states
    num_written = 0
    while parents:
        block, parent = parents.popitem()
        chain = [block]
        # Up to the first block: one that came before its parent would be hidden, and shown later
        # with all that hangs on it.
        while (above := parents.pop(parent, None)) is not None:
            chain.append(parent)
            parent = above
        while chain:
            part = chain[: -_SLICE_BLOCKS - 1 : -1]
            del chain[-_SLICE_BLOCKS:]
            index.store(worker, part, parent)
            for block in part if copies else ():
                if block in copies:
                    index.set_copies(worker, block, parent, copies[block])
                parent = block
            parent = part[-1]
            num_written += len(part)
            if num_written >= _SLICE_BLOCKS:
                num_written = 0
                await asyncio.sleep(0)
    return True


async def _update(index: Index, view: View, states: States) -> bool:
    """Write what is different, and take away what is not there any more; False if overtaken."""
    worker, cursor, is_first = view.worker, 0, True
    while cursor or is_first:
        is_first = False
        # Reading is twenty times as cheap as writing, and most of a page is others' blocks.
        page, cursor = index.page(worker, cursor, 8 * _SLICE_BLOCKS)
        for block, parent, copies in page:
            is_held = states.parents.pop(block, None) is not None
            held = states.copies.get(block, _ONE_GPU_COPY) if is_held else 0
            if held != copies:
                index.set_copies(worker, block, parent, held)
        await asyncio.sleep(0)
        if _is_overtaken(view):
            return False
    return await _fill(index, worker, states)

"""Ask Redis for what the view has no room for: how much of a chain each worker holds.

For indexes larger than a process. Asked behind the requests, never for the one that waits: the
answer goes into the view, where the next request with that prefix finds it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from redis.exceptions import ResponseError

from prefix_index.replica.codec import SharedValueError, unpack_state
from prefix_index.replica.link import LINK_ERRORS, answer
from prefix_index.replica.scripts import LOOKUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index
    from prefix_index.replica.lease import Leases
    from prefix_index.replica.link import Link

# Look-ups at a time; more are not begun, since the next request with the same prefix asks again.
_MAX_AT_A_TIME: Final = 4
# Workers whose blocks are filled in: the best ones decide where a request goes.
_MAX_FILLED_WORKERS: Final = 2
# Blocks written into the view between two turns of other tasks, 1 ms.
_SLICE_BLOCKS: Final = 500


class Found(NamedTuple):
    """Leading blocks of a chain that a worker holds."""

    worker: str
    num_blocks: int


class Lookup:
    """Looks chains of one pool up in Redis; event loop only.

    Attributes:
        asked: Chains that were looked up.
        skipped: Chains that were not, because enough look-ups were under way.
        filled: Blocks that went into the view.
        decode_errors: States that could not be read.
    """

    def __init__(self, link: Link, leases: Leases, index: Index) -> None:
        self.asked = self.skipped = self.filled = self.decode_errors = 0
        self._link = link
        self._leases = leases
        self._index = index
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, hashes: Sequence[BlockHash], workers: Sequence[str]) -> list[Found]:
        """Return the workers that hold leading blocks of a chain, best first. One round trip.

        Raises:
            LINK_ERRORS: If Redis does not answer.
        """
        if not hashes or not workers:
            return []
        keys = [self._leases.keys(worker)[2] for worker in workers]
        counts: Any = await LOOKUP.run(self._link.client, keys, [b"".join(hashes)])
        found = [Found(worker, count) for worker, count in zip(workers, counts, strict=True)]
        return sorted(
            (item for item in found if item.num_blocks), key=lambda item: -item.num_blocks
        )

    def look_up(self, hashes: Sequence[BlockHash], root: BlockHash, workers: Iterable[str]) -> None:
        """Fill the view with what Redis has of a chain, some time soon. Returns at once."""
        if not self._link.is_up or len(self._tasks) >= _MAX_AT_A_TIME:
            self.skipped += 1
            return
        self.asked += 1
        task = asyncio.get_running_loop().create_task(self._fill(hashes, root, list(workers)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fill(self, hashes: Sequence[BlockHash], root: BlockHash, workers: list[str]) -> None:
        try:
            found = await self.find(hashes, workers)
            for worker, num_blocks in found[:_MAX_FILLED_WORKERS]:
                key = self._leases.keys(worker)[2]
                chain = list(hashes[:num_blocks])
                values: Any = await answer(self._link.client.hmget(key, chain))
                await self._write(worker, root, chain, values)
        except SharedValueError:
            self.decode_errors += 1
        except ResponseError:
            self.decode_errors += 1  # a key of a wrong type, which the next tick takes away
        except LINK_ERRORS as error:
            self._link.report(error)

    async def _write(
        self, worker: str, parent: BlockHash, chain: list[BlockHash], values: list[object]
    ) -> None:
        """Write the blocks up to the first one that is missing after all."""
        for number, (block, value) in enumerate(zip(chain, values, strict=True), start=1):
            if value is None:
                return
            state = unpack_state(value)
            self._index.set_copies(worker, block, parent, state.copies)
            self.filled += 1
            parent = block
            if number % _SLICE_BLOCKS == 0:
                await asyncio.sleep(0)

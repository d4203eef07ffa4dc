"""Routings of all gateways, so that everywhere the same is believed of workers that tell nothing.

What such a worker holds is modelled from what is sent to it (``residency``). Each gateway sees its
own part of that only, so it tells the others: worker, root, and the blocks behind those that it
told before. Written behind, coalesced, bounded; what is lost costs a missed hit.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from prefix_index.replica.codec import HASH_BYTES, SharedValueError
from prefix_index.replica.lease import KEPT_S
from prefix_index.replica.link import LINK_ERRORS, answer
from prefix_index.replica.tail import Tail, field
from prefix_index.replica.tasks import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.replica.link import Link

# Routings that wait for Redis; beyond it the oldest are dropped: newer ones say more.
_MAX_WAITING: Final = 1024
_FLUSH_EVERY_S: Final = 0.05
# Batches of routings kept in Redis: what a gateway that starts can learn, 16 KB each on average.
_STREAM_BATCHES: Final = 4096
# Routings and blocks of one batch, so that a long prompt does not make a huge entry.
_BATCH_TOUCHES: Final = 32
_BATCH_BLOCKS: Final = 8192
# Ends of chains that were told, per process: as many as workers hold of sessions.
_MAX_TOLD: Final = 65_536
# A chain is told as a whole again after this many routings, for those that start later.
_TELL_AGAIN: Final = 2048


class Touch(NamedTuple):
    """One routing.

    Attributes:
        worker: Where to.
        root: Root of the chain.
        depth: Blocks before the first one named here.
        parent: Last of those, or the root.
        blocks: The blocks named here, one after the other.
    """

    worker: str
    root: bytes
    depth: int
    parent: bytes
    blocks: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Touch]).decode


class Touches:
    """Tells and hears of routings of one pool; event loop only.

    Args:
        link: Connection.
        pool: Name of the pool.
        source: Name of this process.
        on_touch: Called with (worker, chain from its first block on, root) of others' routings.
        above: Returns the chain that ends in a block on a worker, root last, as far as it is known.

    Attributes:
        dropped: Routings that were not told because Redis was away or slow.
        unknown: Routings heard of whose beginning is not known here.
        decode_errors: Entries that are none.
    """

    def __init__(
        self,
        link: Link,
        pool: str,
        source: str,
        *,
        on_touch: Callable[[str, Sequence[BlockHash], BlockHash], None],
        above: Callable[[str, BlockHash, int], list[BlockHash] | None],
    ) -> None:
        self.dropped = 0
        self.unknown = 0
        self.decode_errors = 0
        self._link = link
        self._key = link.key(pool, "touches")
        self._source = source.encode()
        self._on_touch = on_touch
        self._above = above
        self._tail = Tail(link, self._key)
        self._waiting: deque[Touch] = deque()
        # (worker, block) -> number of the routing that told it.
        self._told: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._number = 0
        self._num_outages = -1

    def touched(self, worker: str, hashes: Sequence[BlockHash], root: BlockHash) -> None:
        """Tell of a routing, some time soon. Returns at once; O(log blocks) for a known prompt."""
        if not hashes:
            return
        self._number += 1
        told = self._told
        # Blocks are told, and forgotten, from the first on: whoever has one has those before it.
        is_known = told.get((worker, hashes[0]), -_TELL_AGAIN) > self._number - _TELL_AGAIN
        depth = bisect_left(hashes, True, key=lambda block: (worker, block) not in told)
        depth = depth if is_known else 0
        new = hashes[depth:]
        for block in new:
            told[worker, block] = self._number
            told.move_to_end((worker, block))
        while len(told) > _MAX_TOLD:
            told.popitem(last=False)
        # A known prompt is told by its end: that it was used again matters as well.
        if not new:
            depth = len(hashes) - 1
            new = hashes[depth:]
        parent = hashes[depth - 1] if depth else root
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(Touch(worker, root, depth, parent, b"".join(new)))

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        await run_together(self._forever(self._flush), self._forever(self._follow))

    async def _forever(self, step: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            try:
                if self._link.is_up:
                    await step()
            except LINK_ERRORS as error:
                self._link.report(error)
                await asyncio.sleep(_FLUSH_EVERY_S)
            if step == self._flush or not self._link.is_up:
                await asyncio.sleep(_FLUSH_EVERY_S)

    async def _flush(self) -> None:
        while self._waiting:
            batch: list[Touch] = []
            num_blocks = 0
            while self._waiting and len(batch) < _BATCH_TOUCHES and num_blocks < _BATCH_BLOCKS:
                touch = self._waiting.popleft()
                batch.append(touch)
                num_blocks += len(touch.blocks) // HASH_BYTES
            try:
                pipeline = self._link.client.pipeline(transaction=False)
                fields = {b"s": self._source, b"t": _encode(batch)}
                pipeline.xadd(self._key, fields, maxlen=_STREAM_BATCHES, approximate=True)  # type: ignore[arg-type]
                pipeline.pexpire(self._key, int(KEPT_S * 1000))
                await answer(pipeline.execute())
            except BaseException:
                self.dropped += len(batch)
                raise

    async def _follow(self) -> None:
        if self._num_outages != self._link.num_outages:
            num_outages = self._link.num_outages
            if self._tail.at is None:
                self._tail.at = b"0-0"  # what is kept is what a new gateway can learn
            else:
                await self._tail.start()
            self._num_outages = num_outages
        for _, fields in await self._tail.read():
            try:
                if field(fields, b"s") != self._source:
                    await self._hear(field(fields, b"t"))
            except SharedValueError:
                self.decode_errors += 1

    async def _hear(self, data: bytes) -> None:
        try:
            batch = _decode(data)
        except msgspec.MsgspecError as error:
            raise SharedValueError(str(error)) from None
        for touch in batch:
            sizes = {len(touch.root), len(touch.parent)}
            if sizes != {HASH_BYTES} or not touch.blocks or len(touch.blocks) % HASH_BYTES:
                raise SharedValueError("no chain")
            above: list[BlockHash] | None = []
            if touch.depth:
                above = self._above(touch.worker, touch.parent, touch.depth)
            if above is None:
                self.unknown += 1
                continue
            data = touch.blocks
            blocks = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
            self._on_touch(touch.worker, above + blocks, touch.root)
            await asyncio.sleep(0)

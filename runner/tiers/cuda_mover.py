"""Copies whole blocks between a GPU's pool and host memory, beside the steps it computes."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.kvpool import KvPool
    from runner.ops.cuda.streams import GroupedLoad, PoolOrder, StreamApi
    from runner.tiers.types import GroupMover

# A block's layers come in this many pieces where layers are waited for one group at a time: an 8B
# model's are 512 KiB then, still long enough for the full rate of a copy.
NUM_GROUPS = 4

# Pinned blocks to copy through where host memory is not pinned: one for each of the transfer
# threads that may copy at a time, storing and reading disk, remote and peers.
NUM_STAGED = 10


class CudaBlockMover:
    """``BlockMover`` of a GPU; what waits for what is ``PoolOrder``'s business.

    Attributes:
        block_bytes: Of one block, all layers, keys and values.
        groups: Itself.
    """

    def __init__(self, kv: KvPool, order: PoolOrder, api: StreamApi) -> None:
        """Take pinned memory for blocks whose host memory is not pinned."""
        self.block_bytes = kv.block_bytes
        self.groups: GroupMover | None = self
        # The pool's memory as bytes, one row per block.
        self._rows = kv.data.view(torch.uint8).view(-1, self.block_bytes)
        self._order = order
        self._api = api
        size = -(-kv.num_layers // NUM_GROUPS)
        self._first_layers = tuple(range(0, kv.num_layers, size))
        self._group_bytes = size * (self.block_bytes // kv.num_layers)
        self._staged: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(NUM_STAGED):
            self._staged.put(api.pinned(self.block_bytes))

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy a pinned block of the pool into ``target``; done when this returns."""
        host = _tensor(target)
        if self._api.is_pinned(host):
            self._order.store(host, self._rows[block])
            return
        with self._staging() as staged:
            self._order.store(staged, self._rows[block])
            host.numpy()[:] = staged.numpy()

    def copy_in(self, source: memoryview, block: int) -> None:
        """Copy bytes into a block reserved for loading; done when this returns."""
        host = _tensor(source)
        if self._api.is_pinned(host):
            self._order.load(self._rows[block], host)
            return
        with self._staging() as staged:
            staged.numpy()[:] = host.numpy()
            self._order.load(self._rows[block], staged)

    def begin_in(self, sources: Sequence[memoryview], blocks: Sequence[int]) -> GroupedLoad | None:
        """Begin to copy host memory into reserved blocks, first layers of all blocks first.

        The sources must stay as they are until ``wait_for`` returns.

        Returns:
            The load; None if a source is not pinned: nothing has begun then.
        """
        hosts = [_tensor(source) for source in sources]
        if not all(self._api.is_pinned(host) for host in hosts):
            return None
        rows = [self._rows[block] for block in blocks]
        size = self._group_bytes
        groups = [
            [
                (row[at : at + size], host[at : at + size])
                for row, host in zip(rows, hosts, strict=True)
            ]
            for at in range(0, self.block_bytes, size)
        ]
        return self._order.load_groups(groups, self._first_layers)

    def wait_for(self, copy: GroupedLoad) -> None:
        """Block until all of a load is there; transfer threads."""
        self._order.wait_for(copy)

    def announce(self, copy: GroupedLoad) -> None:
        """Let the next step use what is still being loaded; engine thread only."""
        self._order.announce(copy)

    @contextmanager
    def _staging(self) -> Iterator[torch.Tensor]:
        staged = self._staged.get()
        try:
            yield staged
        finally:
            self._staged.put(staged)


def _tensor(memory: memoryview) -> torch.Tensor:
    """Return host memory as a tensor, without a copy; the memory must outlive it.

    By its address, since torch complains of memory that it is given for reading only.
    """
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return torch.from_numpy(
        np.ctypeslib.as_array((ctypes.c_uint8 * len(memory)).from_address(address))
    )

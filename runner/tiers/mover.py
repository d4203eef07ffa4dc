"""Copies whole blocks between the CPU device's pool and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from runner.kvpool import KvPool
    from runner.tiers.types import GroupMover


class CpuBlockMover:
    """``BlockMover`` of the CPU device: the pool is host memory, so a copy is a memcpy.

    Ordering needs no event here. A block is offered for copying out only after the step that
    wrote it has returned, and one reserved for loading is in no sequence's table until its load
    is done. numpy gives up the interpreter lock while it copies.

    Attributes:
        block_bytes: Of one block, all layers, keys and values.
        groups: None: there is nothing that a step could go on beside.
    """

    def __init__(self, kv: KvPool) -> None:
        self.groups: GroupMover | None = None
        self.block_bytes = kv.block_bytes
        # The pool's memory as bytes, one row per block.
        self._rows = kv.data.view(torch.uint8).view(-1, self.block_bytes).numpy()

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy a pinned block of the pool into ``target``, ``block_bytes`` long."""
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._rows[block])

    def copy_in(self, source: memoryview, block: int) -> None:
        """Copy bytes into a block reserved for loading; done when this returns."""
        np.copyto(self._rows[block], np.frombuffer(source, dtype=np.uint8))

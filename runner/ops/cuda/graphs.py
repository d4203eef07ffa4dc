"""Decode steps as CUDA graphs: hundreds of kernels launched by one call.

A graph repeats what was launched while it was recorded, on the same addresses. So the steps it
stands for are padded to one of a few sizes, and their integers are copied into a buffer that
belongs to that size. A size is recorded when it is first used, after one ordinary run of the same
step, which compiles kernels and sets cuBLAS up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch

from runner.ops.cuda.layout import TILE_FIELDS, aligned

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.batch import Batch

_log = logging.getLogger(__name__)

# A step pays for its padding: at most one row in three up to 8, one in eight or less beyond.
SIZES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)

# Integers of the block tables of one step: 64 samples of 32k tokens in blocks of 16.
TABLE_SIZE = 2**17


class Recorder(Protocol):
    """Records what a call launches."""

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run ``call`` without computing anything.

        Returns:
            What the call returned, filled at each replay; and what replays it.
        """
        ...


class CudaRecorder:
    """``Recorder`` of a GPU; all graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See ``Recorder``."""
        graph = torch.cuda.CUDAGraph()
        # Only this thread must refrain from what a recording cannot hold: transfer threads go on.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = call()
        return result, graph.replay


class DecodeGraphs:
    """The graphs of one model over one pool; engine thread only."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}

    def size_of(self, batch: Batch) -> int:
        """Return the rows to pad a step to; 0 if it must run launch by launch."""
        rows = len(batch.token_ids)
        is_decode = len(batch.order) == rows and not any(group.is_chunk for group in batch.groups)
        if not is_decode or batch.adapter_rows:
            return 0
        return next((size for size in SIZES if size >= rows), 0)

    def buffer(self, size: int, num_values: int) -> torch.Tensor | None:
        """Return the integers' place on the device; None if there is not room for as many."""
        if size not in self._buffers:
            # Token ids, positions, token rows, sample rows, tiles; then tables.
            capacity = 4 * aligned(size) + TILE_FIELDS * size + TABLE_SIZE
            self._buffers[size] = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        buffer = self._buffers[size]
        return buffer if num_values <= len(buffer) else None

    def run(self, size: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute a step whose integers are in their place.

        Returns:
            What ``compute`` returns; valid until the next step of this size.
        """
        if size in self._graphs:
            result, replay = self._graphs[size]
            replay()
            return result
        computed = compute()
        self._graphs[size] = self._recorder.record(compute)
        _log.info("recorded the decode step of %d rows", size)
        return computed

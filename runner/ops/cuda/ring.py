"""Brings a step's integers to the device through pinned buffers, one per step in flight.

A copy from pinned memory returns before it is done, and the next step is laid out meanwhile: it
must not be written into a buffer that is still being read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from runner.ops.cuda.streams import StreamApi

# One step computes, one is prepared, and one to spare.
NUM_BUFFERS = 3

# Doubled when a step needs more; 16 Ki integers are 2,000 tokens of prefill with their tables.
FIRST_SIZE = 2**14


class UploadRing:
    """Pinned buffers used in turn; engine thread only."""

    def __init__(self, api: StreamApi, device: torch.device) -> None:
        self._api = api
        self._device = device
        self._buffers = [self._new(FIRST_SIZE) for _ in range(NUM_BUFFERS)]
        self._copied: list[Any] = [None] * NUM_BUFFERS
        self._next = 0

    def upload(
        self, values: npt.NDArray[np.int32], target: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copy integers to the device, in order with the compute stream.

        Args:
            values: Shape: [count].
            target: Where to, at least as long; None for a fresh tensor.

        Returns:
            The device's tensor, of the target's length if there is one.
        """
        at = self._next
        self._next = (at + 1) % NUM_BUFFERS
        if self._copied[at] is not None:
            self._api.wait(self._copied[at])
        count = len(values)
        if len(self._buffers[at]) < count:
            self._buffers[at] = self._new(1 << (count - 1).bit_length())
        staged = self._buffers[at][:count]
        staged.numpy()[:] = values
        if target is None:
            target = torch.empty(count, dtype=torch.int32, device=self._device)
        stream = self._api.compute()
        self._api.copy(target[:count], staged, stream)
        self._copied[at] = self._api.record(stream)
        return target

    def _new(self, size: int) -> torch.Tensor:
        return self._api.pinned(size * 4).view(torch.int32)

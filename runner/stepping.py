"""The model's forward pass over one pool; the tiers learn from how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.batch import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from runner.kvpool import KvPool
    from runner.model import Model
    from runner.tiers.interface import Tiers

# A prefill chunk that takes a 135M model on one thread a few tenths of a second.
CALIBRATION_TOKENS = 128


class Stepper:
    """Computes chunks; used from the engine thread alone.

    Args:
        model: Computes.
        kv: The pool's memory.
        tiers: Hear of every pass; None without tiers.
        clock: Monotonic seconds.

    Attributes:
        stalled_s: How long steps have stood still for loads; known only with tiers.
    """

    def __init__(
        self, model: Model, kv: KvPool, tiers: Tiers | None, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._kv = kv
        self._tiers = tiers
        self._clock = clock
        self.stalled_s = 0.0

    def forward(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, Sequence[int]]:
        """Compute one batch; see ``Model.forward``."""
        if self._tiers is None:
            return self._model.forward(chunks, self._kv)
        begun_s = self._clock()
        result = self._model.forward(chunks, self._kv)
        self.stalled_s += self._kv.wait()
        elapsed_s = self._clock() - begun_s
        sizes = [(len(chunk.token_ids), chunk.end) for chunk in chunks]
        self._tiers.observe_step(
            sum(num_tokens for num_tokens, _ in sizes),
            sum(num_tokens * end for num_tokens, end in sizes),
            sum(num_tokens == 1 and end > 1 for num_tokens, end in sizes),
            elapsed_s,
        )
        return result

    def calibrate(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Let the tiers know a step's time before the first load is weighed against one.

        Args:
            blocks: Nobody else's; what is written there means nothing.
            num_tokens: They hold as many at least.
        """
        chunk = Chunk([0] * num_tokens, 0, blocks, samples=True)
        # The first pass warms up: allocations, thread pools, caches of weights.
        self._model.forward([chunk], self._kv)
        self.forward([chunk])

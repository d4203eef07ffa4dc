"""Which prefixes the fleet has computed before, whether or not anybody still holds them.

The index forgets what was evicted, so it cannot say what a larger tier would have saved. This
memory can: one hash per 512 tokens, bounded, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash

# Tokens between two hashes. What is shared by less is worth no restore.
GRAIN_TOKENS = 512
# 67M tokens of distinct prompts, about 20 MB: hours of a fleet's traffic.
MAX_GRAINS = 131_072
# Grains looked at in one prompt, 262k tokens: bounds the time it may take.
MAX_PROMPT_GRAINS = 512
# Grains refreshed within the last so many parts of the memory count as fresh.
FRESH_SHARE = 4


class SeenPrefixes:
    """Grain ends of finished prompts; one event loop only."""

    def __init__(self, max_grains: int = MAX_GRAINS) -> None:
        self._max_grains = max_grains
        # Grain -> the refresh it was last part of, as numbered by grains refreshed.
        self._grains: OrderedDict[BlockHash, int] = OrderedDict()
        self._num_refreshed = 0

    def __len__(self) -> int:
        return len(self._grains)

    def add(self, hashes: Sequence[BlockHash], block_size: int) -> int:
        """Remember a prompt; return how many of its leading tokens had been seen before.

        Args:
            hashes: Its full blocks.
            block_size: Tokens of one.
        """
        stride = max(1, GRAIN_TOKENS // block_size)
        num_grains = min(len(hashes) // stride, MAX_PROMPT_GRAINS)
        if not num_grains:
            return 0
        grains = self._grains
        # A prompt's beginning outlives its end. So where the end is still among the newest, nothing
        # of the prompt is in danger, and it need not be refreshed grain by grain.
        at = grains.get(hashes[num_grains * stride - 1])
        if at is not None and self._num_refreshed - at < self._max_grains // FRESH_SHARE:
            return num_grains * stride * block_size
        ends = hashes[stride - 1 : stride * num_grains : stride]
        num_seen = 0
        for end in ends:
            if end not in grains:
                break
            num_seen += 1
        self._num_refreshed += num_grains
        # The deepest are the oldest.
        for end in reversed(ends):
            grains[end] = self._num_refreshed
            grains.move_to_end(end)
        while len(grains) > self._max_grains:
            grains.popitem(last=False)
        return num_seen * stride * block_size

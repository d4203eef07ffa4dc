"""Hits of a chain by tier, from the states of its blocks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from prefix_index.holdings import ONE_GPU_COPY, TIERS, Tier, best_tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.view import Holder, View
    from prefix_index.view_blocks import Blocks

# Blocks' states compared as one. Most pieces of a chain are alike, and a piece is
# counted block by block only once.
_STATE_BYTES: Final = 4
_PIECE_BYTES: Final = 64 * _STATE_BYTES
# A chain that was stored block by block between others is scattered: so many runs are read, 0.4 us
# each, and of what is before them so many blocks, 1 us each. Prefills come in far fewer runs.
_MAX_RUNS: Final = 128
_MAX_SAMPLES: Final = 64


class Hit(NamedTuple):
    """Hit tokens of one worker, split by the fastest tier that holds each block."""

    gpu: int = 0
    cpu: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Hit tokens of all tiers."""
        return self.gpu + self.cpu + self.disk + self.remote


class Match:
    """What an index answered about a chain; as good as asked again while the version is the same.

    Attributes:
        hits: Worker -> its hit; never changed.
        version: The index's, when it answered.
    """

    __slots__ = ("hits", "version")

    def __init__(self, hits: dict[str, Hit], version: int) -> None:
        self.hits = hits
        self.version = version

    def lengths(self, block_size: int) -> list[int]:
        """Return the hits' lengths in blocks where they differ: where the next look-up may look."""
        lengths = {hit.total // block_size for hit in self.hits.values()}
        return sorted(lengths) if len(lengths) > 1 else []


def split_hits(
    view: View, hashes: Sequence[BlockHash], lengths: dict[Holder, int], block_size: int
) -> dict[str, Hit]:
    """Split the hits of workers that hold blocks outside GPU memory.

    Args:
        view: Where the blocks are.
        hashes: A prompt's chain.
        lengths: Leading blocks that each worker sees; not empty, each at least 1.
        block_size: Tokens per block.
    """
    states = _states(view.blocks, hashes, max(lengths.values()))
    tokens: dict[Holder, dict[Tier, int]] = {h: dict.fromkeys(TIERS, 0) for h in lengths}
    start = 0
    for end in sorted(set(lengths.values())):
        for state, num_blocks in count_states(states[start:end]).items():
            for holder, length in lengths.items():
                if length >= end:
                    # None: a false parent in a shared state led elsewhere; any tier will do.
                    copies = view.states.copies(state, holder.bit) or ONE_GPU_COPY
                    tokens[holder][best_tier(copies)] += num_blocks * block_size
        start = end
    return {holder.worker: Hit(**split) for holder, split in tokens.items()}


def _states(blocks: Blocks, hashes: Sequence[BlockHash], length: int) -> array[int]:
    """Return the states of a chain's first blocks; of a scattered one's beginning by samples."""
    read = blocks.path_states(blocks.find(hashes[length - 1]), length, _MAX_RUNS)
    rest = length - len(read)
    step = -(-rest // _MAX_SAMPLES)
    states: array[int] = array("I")
    for at in range(0, rest, max(step, 1)):
        state = blocks.state[blocks.find(hashes[at])]
        states += array("I", [state]) * min(step, rest - at)
    return states + read


def count_states(states: array[int]) -> dict[int, int]:
    """Count equal states; a tenth of the work of a plain count where most are alike."""
    raw = states.tobytes()
    pieces: dict[bytes, int] = {}
    for at in range(0, len(raw), _PIECE_BYTES):
        piece = raw[at : at + _PIECE_BYTES]
        pieces[piece] = pieces.get(piece, 0) + 1
    counts: dict[int, int] = {}
    for piece, times in pieces.items():
        numbers = array("I", piece)
        first, length = numbers[0], len(numbers)
        if piece == piece[:_STATE_BYTES] * length:
            counts[first] = counts.get(first, 0) + times * length
            continue
        for state in numbers:
            counts[state] = counts.get(state, 0) + times
    return counts

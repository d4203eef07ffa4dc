"""What a simulated gateway knows of the workers' caches: late events, or its own history."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from prefix_index.blocks import root_hash
from prefix_index.index import Hit, Index

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.replay.kv_cache import Change
    from prefix_index.blocks import BlockHash

# Tokens per worker that own-history trees keep, as in the simulation behind the design.
HISTORY_TOKENS: Final = 16_000_000
ROOT: Final = root_hash("replay")
NO_HIT: Final = Hit()


def worker_id(worker: int) -> str:
    """Return a simulated worker's name."""
    return f"w{worker}"


class EventIndex:
    """The product's index, fed by the engines' events some milliseconds late.

    Args:
        block_tokens: Tokens per block.
        delay_s: How late events are.

    Attributes:
        index: What the events said up to the last ``sync``.
    """

    def __init__(self, block_tokens: int, delay_s: float) -> None:
        # Simulated fleets are bounded by their engines' memory, never by the index.
        self.index = Index(block_tokens, max_blocks=1 << 62)
        self._delay_s = delay_s
        self._late: deque[tuple[float, str, Change]] = deque()

    def announce(self, holder: str, change: Change, now_s: float) -> None:
        """Take an event on its way."""
        self._late.append((now_s + self._delay_s, holder, change))

    def sync(self, now_s: float) -> None:
        """Apply the events that are there by now."""
        late, index = self._late, self.index
        while late and late[0][0] <= now_s:
            _, worker, change = late.popleft()
            if change.stored:
                index.store(worker, change.blocks, change.parent or ROOT, change.tier)
            else:
                index.remove(worker, change.blocks, change.tier)

    def clear(self, worker: int) -> None:
        """Forget a worker that lost its cache; events on their way are void."""
        name = worker_id(worker)
        self._late = deque(event for event in self._late if event[1] != name)
        self.index.clear(name)


class History:
    """Blocks that one gateway routed to each worker, least recently routed ones forgotten.

    Args:
        block_tokens: Tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.index = Index(block_tokens, max_blocks=1 << 62)
        self._max_blocks = HISTORY_TOKENS // block_tokens
        self._used: dict[int, OrderedDict[BlockHash, None]] = {}

    def routed(self, worker: int, blocks: Sequence[BlockHash]) -> None:
        """Note a prompt; of one prompt the deepest block is forgotten first."""
        used = self._used.setdefault(worker, OrderedDict())
        name = worker_id(worker)
        parent = ROOT
        for block in blocks:
            if block not in used:
                self.index.store(name, (block,), parent)
            parent = block
        for block in reversed(blocks):
            used[block] = None
            used.move_to_end(block)
        while len(used) > self._max_blocks:
            self.index.remove(name, (used.popitem(last=False)[0],))

    def clear(self, worker: int) -> None:
        """Forget a worker that lost its cache."""
        self._used.pop(worker, None)
        self.index.clear(worker_id(worker))

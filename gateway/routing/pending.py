"""Cold prompts being prefilled right now, so that siblings of a burst do not repeat the work.

A chain is a prompt's block hashes, or its text's where its tokens are still on their way.

A request whose prompt no worker holds becomes a leader: until its first token, failure or cancel,
requests with the same beginning are credited with it on the leader's worker. This never enters the
index and is never published: predictions that outlive their request herd onto the first holder.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from gateway.routing.active import common_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash

# The first worker of a cold prefix, and the one a burst spilled to when the first got too dear.
MAX_LEADER_WORKERS = 2
# Leaders compared per request: bounds the cost when many cold prompts share a system prompt.
MAX_COMPARED = 64


class Leader:
    """A cold prompt in flight; made by ``Pending.lead`` only."""

    __slots__ = ("hashes", "worker")

    def __init__(self, worker: str, hashes: Sequence[BlockHash]) -> None:
        self.worker = worker
        self.hashes = hashes


class Pending:
    """The leaders of one pool; one event loop only."""

    def __init__(self) -> None:
        # By first block: prompts that differ there have nothing in common.
        self._leaders: dict[BlockHash, dict[Leader, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._leaders)

    def __len__(self) -> int:
        return sum(map(len, self._leaders.values()))

    def credit(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Return worker -> leading blocks of ``hashes`` that a leader there is computing."""
        if not self._leaders or not hashes:
            return {}
        blocks: dict[str, int] = {}
        for leader in islice(reversed(self._leaders.get(hashes[0], {})), MAX_COMPARED):
            end = min(len(leader.hashes), len(hashes))
            common = common_until(leader.hashes, hashes, 1, end)
            blocks[leader.worker] = max(common, blocks.get(leader.worker, 0))
        return blocks

    def lead(self, worker: str, hashes: Sequence[BlockHash]) -> Leader | None:
        """Make a cold prompt on ``worker`` a leader, unless it follows one already.

        Returns:
            The handle for ``end``; None when a leader of half of this prompt is on the same
            worker, or enough workers compute it.
        """
        if not hashes:
            return None
        alike = {w for w, common in self.credit(hashes).items() if 2 * common >= len(hashes)}
        if worker in alike or len(alike) >= MAX_LEADER_WORKERS:
            return None
        leader = Leader(worker, hashes)
        self._leaders.setdefault(hashes[0], {})[leader] = None
        return leader

    def end(self, leader: Leader) -> None:
        """Take a leader back: first token, failure or cancel. A second call changes nothing."""
        group = self._leaders.get(leader.hashes[0])
        if group is None or leader not in group:
            return
        del group[leader]
        if not group:
            del self._leaders[leader.hashes[0]]

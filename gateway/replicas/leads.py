"""Cold prompts that are being prefilled through any gateway, so that siblings here follow them.

A chain is announced by at most ``MAX_SAMPLES`` + 1 of its hashes. Hashes are chained: two prompts
that agree at one position agree in everything before it, so the samples are searched by bisection.
What is known of another gateway's leads is what it said last; it ends with its first token, and
with the gateway.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from gateway.replicas.messages import MAX_LEADS, MAX_SAMPLES, LeadRow
from gateway.routing.pending import MAX_COMPARED, Leader, Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prefix_index.blocks import BlockHash


@lru_cache(maxsize=1024)
def positions(num_links: int) -> tuple[int, ...]:
    """Return where a chain of that length is sampled: its first link, and evenly to its last."""
    ends = {(k + 1) * num_links // MAX_SAMPLES - 1 for k in range(MAX_SAMPLES)}
    return tuple(sorted({0, *(end for end in ends if end >= 0)}))


class SharedPending(Pending):
    """The leaders of one pool, the other gateways' included; one event loop only.

    Args:
        on_lead: Called when a prompt here became a leader, so that the others hear of it soon.
    """

    def __init__(self, on_lead: Callable[[], None]) -> None:
        super().__init__()
        self._on_lead = on_lead
        self._own: dict[Leader, LeadRow] = {}
        self._told: dict[str, tuple[LeadRow, ...]] = {}
        self._elsewhere: dict[BlockHash, list[LeadRow]] = {}
        self.num_changes = 0

    def __bool__(self) -> bool:
        return bool(self._elsewhere) or super().__bool__()

    def credit(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Return worker -> leading blocks of ``hashes`` that a leader there is computing."""
        blocks = super().credit(hashes)
        if not hashes:
            return blocks
        for row in islice(self._elsewhere.get(hashes[0], ()), MAX_COMPARED):
            common = _common(row, hashes)
            blocks[row.worker] = max(common, blocks.get(row.worker, 0))
        return blocks

    def lead(self, worker: str, hashes: Sequence[BlockHash]) -> Leader | None:
        """Make a cold prompt a leader, unless it follows one here or elsewhere already."""
        leader = super().lead(worker, hashes)
        if leader is not None:
            samples = tuple(hashes[at] for at in positions(len(hashes)))
            self._own[leader] = LeadRow(worker, len(hashes), samples)
            self.num_changes += 1
            self._on_lead()
        return leader

    def end(self, leader: Leader) -> None:
        """Take a leader back: first token, failure or cancel. A second call changes nothing."""
        super().end(leader)
        if self._own.pop(leader, None) is not None:
            self.num_changes += 1

    def announced(self) -> tuple[LeadRow, ...]:
        """Return the newest leaders of this gateway, as the others are told."""
        return tuple(islice(reversed(self._own.values()), MAX_LEADS))

    def told(self, gateway: str, rows: Iterable[LeadRow], workers: Iterable[str]) -> None:
        """Replace what another gateway has under way.

        Args:
            gateway: Its id.
            rows: Its leaders; none drops the gateway.
            workers: Known worker ids; leaders elsewhere are left out.
        """
        known = set(workers)
        kept = tuple(
            row
            for row in rows
            if row.worker in known and len(row.samples) == len(positions(row.num_links))
        )
        if kept:
            self._told[gateway] = kept
        elif self._told.pop(gateway, None) is None:
            return
        self._elsewhere = {}
        for told in self._told.values():
            for row in told:
                self._elsewhere.setdefault(row.samples[0], []).append(row)


def _common(row: LeadRow, hashes: Sequence[BlockHash]) -> int:
    """Return how many leading blocks two prompts share at least, seen at the sampled positions."""
    at, low, high = positions(row.num_links), 0, len(row.samples)
    while low < high:
        middle = (low + high) // 2
        position = at[middle]
        if position < len(hashes) and hashes[position] == row.samples[middle]:
            low = middle + 1
        else:
            high = middle
    return at[low - 1] + 1 if low else 0

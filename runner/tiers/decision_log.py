"""The last decisions between restoring and recomputing, with what came of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.tiers.decision import GainDecision
    from runner.tiers.types import LoadDone

MAX_DECISIONS = 200


@dataclass(slots=True)
class _Row:
    decision: GainDecision
    owner: str
    at_s: float
    actual: dict[str, Any] | None = None


class DecisionLog:
    """Owned by the engine thread.

    Args:
        on_actual: Called with predicted and actual saving in seconds when a load is done.
    """

    def __init__(self, on_actual: Callable[[float, float], None] | None = None) -> None:
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        # Rows without actual figures, by request.
        self._open: dict[str, int] = {}
        self._on_actual = on_actual

    def add(self, decision: GainDecision, owner: str, now_s: float) -> None:
        """Note a decision; it takes the place of the same request's one that came to nothing."""
        before = self._open.pop(owner, None)
        if before is not None:
            self._rows.pop(before, None)
        self._open[owner] = decision.id
        self._rows[decision.id] = _Row(decision, owner, now_s)
        while len(self._rows) > MAX_DECISIONS:
            _, oldest = self._rows.popitem(last=False)
            if self._open.get(oldest.owner) == oldest.decision.id:
                del self._open[oldest.owner]

    def finish(self, decision: GainDecision, done: LoadDone, saving_s: float) -> None:
        """Fill in what a decision to restore came to.

        Args:
            decision: Also one that has left the log.
            done: The load's end.
            saving_s: Seconds it saved against recomputing what it brought; below 0: it lost.
        """
        if self._on_actual is not None:
            self._on_actual(decision.saving_s, saving_s)
        row = self._rows.get(decision.id)
        if row is not None:
            self._open.pop(row.owner, None)
            row.actual = {
                "outcome": done.outcome,
                "num_blocks": done.num_blocks,
                "blocks_by_tier": dict(done.blocks_by_tier),
                "restore_s": done.elapsed_s,
                "saving_s": saving_s,
            }

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the decisions as JSON can hold them, newest first."""
        return [
            {
                "age_s": now_s - row.at_s,
                "request": row.owner,
                **row.decision.explain(),
                "actual": row.actual,
            }
            for row in reversed(self._rows.values())
        ]

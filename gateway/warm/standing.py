"""Where the copies of one run stand: what is told of it while it goes on, and afterwards."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gateway.warm.plan import Placement
from gateway.warm.shareable import Shareable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.warm.sending import Sent

# Each may name tokens, so that every copy could have its own.
MAX_REASONS = 4

Copy = Literal["waiting", "warm", "failed", "skipped"]


@dataclass(slots=True)
class Result:
    """Where one item stands: what became of each of its copies.

    Attributes:
        copies: By position among the item's placements.
    """

    copies: list[Copy] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return warm, partial, failed or waiting."""
        num_warm = self.copies.count("warm")
        if num_warm == len(self.copies) and num_warm:
            return "warm"
        if "waiting" in self.copies:
            return "waiting"
        return "partial" if num_warm else "failed"


@dataclass(slots=True)
class Job:
    """One copy to send or to prove.

    Attributes:
        found: The item.
        placement: Where it goes.
        position: Among the item's copies.
        state: planned, running, done, warm, cold, failed or skipped.
        reason: Why it is not warm.
        cached_tokens: Tokens that its probe hit.
        computed_tokens: Tokens computed for it.
        is_warm: Whether it is proven, or sent where no proof was asked for.
    """

    found: Shareable
    placement: Placement
    position: int
    state: str = "planned"
    reason: str = ""
    cached_tokens: int | None = None
    computed_tokens: int = 0
    is_warm: bool = False

    def row(self) -> dict[str, Any]:
        """Return where it stands, as plain values."""
        return {
            "id": self.placement.id,
            "worker": self.placement.worker,
            "state": self.state,
            "tokens": self.placement.tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "reason": self.reason,
        }


class Standing:
    """The copies of one run; event loop only.

    Args:
        refused: Id and reason of items that could not be read.

    Attributes:
        results: Item id -> where it stands.
        refused: Id -> reason; more may come.
        served: Copies that are warm.
        computed_tokens: Tokens computed so far.
        cached_tokens: Tokens that were there already.
        num_without_room: Copies for which requests in flight left no room.
    """

    def __init__(self, refused: Iterable[tuple[str, str]]) -> None:
        self.results: dict[str, Result] = {}
        self.refused = dict(refused)
        self.served: list[Job] = []
        self.computed_tokens = self.cached_tokens = self.num_without_room = 0
        self._copies: list[Job] = []
        self._rows: list[dict[str, Any]] = []

    def place(
        self, found: Mapping[str, Shareable], placements: Sequence[Placement]
    ) -> dict[str, deque[Job]]:
        """Take the plan; return worker id -> what is to be sent or proven there, in order."""
        jobs: dict[str, deque[Job]] = {}
        for placement in placements:
            result = self.results.setdefault(placement.id, Result())
            result.copies.append("waiting")
            job = Job(found[placement.id], placement, len(result.copies) - 1)
            self._copies.append(job)
            if placement.worker is not None and placement.action in ("warm", "skip_held"):
                jobs.setdefault(placement.worker, deque()).append(job)
            else:
                self.judge(job, "skipped", placement.reason)
                self.num_without_room += placement.action == "skip_capacity"
        return jobs

    def judge(self, job: Job, copy: Copy, reason: str) -> None:
        """Say what became of a copy."""
        job.state, job.reason = copy, reason
        self.results[job.placement.id].copies[job.position] = copy

    def let_go(self) -> None:
        """Keep what is told, and none of the prompts."""
        self._rows = [job.row() for job in self._copies]
        self._copies, self.served = [], []

    def numbers(self) -> dict[str, Any]:
        """Return the items by what became of them, and tokens, as plain values."""
        states = [result.state for result in self.results.values()]
        return {
            "warm": states.count("warm"),
            "partial": states.count("partial"),
            "failed": states.count("failed") + len(self.refused),
            "waiting": states.count("waiting"),
            "refused": len(self.refused),
            "items": len(states) + len(self.refused),
            "computed_tokens": self.computed_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def reasons(self) -> dict[str, int]:
        """Return why copies are not warm, and how many for each reason; the commonest few."""
        found = Counter(row["reason"] for row in self.rows() if row["reason"])
        return dict(found.most_common(MAX_REASONS))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per copy, refused items last."""
        refused = [
            {"id": name, "worker": None, "state": "failed", "tokens": None, "cached_tokens": None,
             "computed_tokens": 0, "reason": reason}
            for name, reason in self.refused.items()
        ]  # fmt: skip
        return [*self._rows, *(job.row() for job in self._copies), *refused]


def plan_event(
    run_id: str, placements: Sequence[Placement], refused: Mapping[str, str]
) -> dict[str, Any]:
    """Return the event that tells a plan."""
    actions = [placement.action for placement in placements]
    warm = [placement for placement in placements if placement.action == "warm"]
    seconds = [placement.seconds for placement in warm]
    return {
        "event": "plan",
        "run_id": run_id,
        "placements": [msgspec.to_builtins(placement) for placement in placements],
        "refused": [{"id": name, "reason": reason} for name, reason in refused.items()],
        "totals": {
            "placements": len(placements),
            "refused": len(refused),
            **{action: actions.count(action) for action in dict.fromkeys(actions)},
            "tokens": sum(placement.tokens for placement in warm),
            "seconds": None if None in seconds else sum(s for s in seconds if s is not None),
        },
    }


def failed_event(name: str, worker_id: str | None, reason: str) -> dict[str, Any]:
    """Return the event of an item that failed, on a worker or before it had one."""
    return {"event": "failed", "id": name, "worker": worker_id, "reason": reason}


def progress_event(
    event: str, name: str, worker_id: str, tokens: int, sent: Sequence[Sent]
) -> dict[str, Any]:
    """Return the event of an item's progress.

    ``cached_tokens`` are those that the first piece found; later ones find what the pieces before
    them computed.
    """
    return {
        "event": event,
        "id": name,
        "worker": worker_id,
        "tokens": tokens,
        "cached_tokens": sent[0].cached_tokens,
        "computed_tokens": sum(part.computed_tokens for part in sent),
        "elapsed_s": round(sum(part.elapsed_s for part in sent), 6),
    }

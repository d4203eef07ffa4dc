"""What is known of every document of one run: where its copies are, and whether that is proven."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmup.events import End, Placement, Plan, Step, Verified

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from warmup.documents import Problem
    from warmup.events import Event

# States in which more is to come.
OPEN = frozenset({"planned", "held", "running", "done"})


@dataclass(slots=True)
class Copy:
    """One document on one worker.

    Attributes:
        worker: None where no worker fits.
        state: ``planned``, ``held`` (before it was proven), ``running``, ``done`` (computed, not
            proven), ``warm``, ``cold``, ``failed``, ``skipped``.
        placement: The plan's; None if the worker came in later.
        reason: Why it is not warm.
        cached_tokens: Found by the proving probe; None if there was none.
        wanted_tokens: What that had to find.
        computed_tokens: Computed for it in this run.
    """

    worker: str | None
    state: str
    placement: Placement | None = None
    reason: str | None = None
    cached_tokens: int | None = None
    wanted_tokens: int | None = None
    computed_tokens: int = 0


@dataclass(slots=True)
class Row:
    """One document, pattern or captured line; ``problem`` says why there is nothing to place."""

    copies: dict[str | None, Copy] = field(default_factory=dict)
    problem: str | None = None

    @property
    def is_warm(self) -> bool:
        """Whether every copy is proven."""
        copies = self.copies.values()
        return self.problem is None and bool(copies) and all(c.state == "warm" for c in copies)

    @property
    def state(self) -> str:
        """``warm``, ``partial`` or ``cold``."""
        if self.is_warm:
            return "warm"
        return "partial" if any(c.state == "warm" for c in self.copies.values()) else "cold"


class Book:
    """All rows of a run, in the order they came up."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.computed_tokens = 0
        # Counts what became final, so that progress is told from mere noise.
        self.num_settled = 0

    def problem(self, problem: Problem) -> None:
        """Note something that cannot be warmed; a document that counts keeps its row."""
        name = problem.id
        while name in self.rows:
            name += " (again)"
        self.rows[name] = Row(problem=problem.reason)

    def expect(self, ids: Iterable[str]) -> None:
        """Make rows for documents that are about to be sent; old proof of them counts no more."""
        for name in ids:
            for copy in self.rows.setdefault(name, Row()).copies.values():
                copy.state = "held"

    def fail(self, ids: Iterable[str], reason: str) -> None:
        """Say why documents are not warm, and will not be in this run."""
        for name in ids:
            row = self.rows.setdefault(name, Row())
            row.problem = reason
            self.num_settled += 1

    def apply(self, event: Event, *, expected: bool = True) -> None:
        """Take in what the gateway said.

        Args:
            event: Any.
            expected: Whether documents nobody sent are an error of the gateway's and passed over;
                False when the gateway itself chooses what is warmed.
        """
        if isinstance(event, Plan):
            self._plan(event, expected=expected)
        elif isinstance(event, Step | Verified):
            row = self.rows.get(event.id)
            if row is None:
                return
            if isinstance(event, Step):
                self._step(row, event)
            else:
                self._verified(row, event)
        else:
            assert isinstance(event, End)

    def apply_run(self, documents: Iterable[object]) -> None:
        """Take in how copies ended, as the gateway's list of runs has it.

        Args:
            documents: Of one run; whatever is not as expected is passed over.
        """
        for document in documents:
            if not isinstance(document, dict):
                continue
            row = self.rows.get(str(document.get("id")))
            copy = None if row is None else row.copies.get(document.get("worker"))
            if copy is None or copy.state not in OPEN:
                continue
            state = document.get("state")
            if state in ("done", "failed"):
                copy.state = state
                copy.reason = document.get("reason")

    def is_warm(self, name: str) -> bool:
        """Whether every copy of a document is proven."""
        row = self.rows.get(name)
        return row is not None and row.is_warm

    def unsettled(self, ids: Iterable[str]) -> list[str]:
        """Return those of whose copies more is to come, or nothing has come."""
        return [name for name in ids if not _is_settled(self.rows[name])]

    def unplanned(self, ids: Iterable[str]) -> list[str]:
        """Return those about which the gateway has said nothing."""
        rows = ((name, self.rows[name]) for name in ids)
        return [name for name, row in rows if row.problem is None and not row.copies]

    def spent_tokens(self, purpose: str) -> int:
        """Return the tokens that count against the budget so far: computed, or to be computed."""
        if purpose == "run":
            return self.computed_tokens
        return sum(p.tokens for p in self.placements() if p.action == "warm")

    def not_warm(self) -> Iterator[tuple[str, Row]]:
        """Yield the documents that are not proven everywhere."""
        return ((name, row) for name, row in self.rows.items() if not row.is_warm)

    def placements(self) -> list[Placement]:
        """Return all that was planned."""
        copies = (copy for row in self.rows.values() for copy in row.copies.values())
        return [copy.placement for copy in copies if copy.placement is not None]

    def _plan(self, plan: Plan, *, expected: bool) -> None:
        # A later plan knows better: what was planned before a broken stream no longer counts.
        for name in {placement.id for placement in plan.placements}:
            if name in self.rows or not expected:
                self.rows[name] = Row()
        for placement in plan.placements:
            if (row := self.rows.get(placement.id)) is not None:
                row.copies[placement.worker] = _planned(placement)
        for refusal in plan.refused:
            if refusal.id in self.rows or not expected:
                self.fail([refusal.id], refusal.reason)

    def _step(self, row: Row, step: Step) -> None:
        if step.worker is None:
            if step.event == "failed" and row.problem is None:
                self.fail([step.id], step.reason or "failed")
            return
        copy = row.copies.setdefault(step.worker, Copy(step.worker, "planned"))
        if step.event == "failed":
            copy.state, copy.reason = "failed", step.reason or "failed"
            self.num_settled += 1
        elif step.event == "done":
            copy.state = "done"
            copy.computed_tokens += step.computed_tokens or 0
            self.computed_tokens += step.computed_tokens or 0
            self.num_settled += 1
        elif copy.state in OPEN:
            copy.state = "running"

    def _verified(self, row: Row, seen: Verified) -> None:
        copy = row.copies.setdefault(seen.worker, Copy(seen.worker, "done"))
        copy.cached_tokens, copy.wanted_tokens = seen.cached_tokens, seen.wanted_tokens
        self.num_settled += 1
        if seen.is_proof:
            copy.state, copy.reason = "warm", None
        # What failed keeps the reason why, of which being cold is only the consequence.
        elif copy.state != "failed":
            copy.state, copy.reason = "cold", seen.reason or _shortfall(seen)


def _planned(placement: Placement) -> Copy:
    state = {"warm": "planned", "skip_held": "held"}.get(placement.action, "skipped")
    reason = (placement.reason or placement.action) if state == "skipped" else None
    return Copy(placement.worker, state, placement, reason)


def _is_settled(row: Row) -> bool:
    if row.problem is not None:
        return True
    return bool(row.copies) and all(copy.state not in OPEN for copy in row.copies.values())


def _shortfall(seen: Verified) -> str:
    if seen.cached_tokens is None or not seen.proven:
        return "not proven: the worker does not tell how much it found in its cache"
    return f"a probe found {seen.cached_tokens:,} of {seen.wanted_tokens or 0:,} tokens"

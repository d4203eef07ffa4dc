"""What an operator is told while a run goes on: one line per event, or as JSON, or nothing.

Bars for a terminal are in ``warmup/bars.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol, TextIO

from warmup.events import End, Plan, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmup.documents import Problem
    from warmup.events import Event, Verified


class Talk(Protocol):
    """Is told everything in the order in which it happens; one thread."""

    def event(self, event: Event, line: bytes) -> None:
        """Take what the gateway said, and its line as it came."""

    def problem(self, problem: Problem) -> None:
        """Take something that cannot be warmed."""

    def away(self, reason: str, wait_s: float) -> None:
        """Take that the gateway is away and when it is asked again."""

    def say(self, text: str) -> None:
        """Take a remark."""

    def close(self) -> None:
        """End; nothing more is told."""


class Lines:
    """One line per event, for logs.

    Args:
        out: Where to.
        quiet: Leave out everything that goes as planned.
    """

    def __init__(self, out: TextIO, *, quiet: bool = False) -> None:
        self._out = out
        self._quiet = quiet

    def event(self, event: Event, line: bytes) -> None:
        """Print it in words."""
        del line
        text = describe(event)
        if text is not None and not (self._quiet and _is_usual(event)):
            self._print(text)

    def problem(self, problem: Problem) -> None:
        """Print which and why."""
        self._print(f"cannot warm {problem.id}: {problem.reason}")

    def away(self, reason: str, wait_s: float) -> None:
        """Print why, and how long until the next try."""
        self._print(f"{reason}; trying again in {wait_s:.1f} s")

    def say(self, text: str) -> None:
        """Print it, unless only trouble is to be told."""
        if not self._quiet:
            self._print(text)

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, text: str) -> None:
        print(f"warmup: {clean(text)}", file=self._out, flush=True)


class JsonLines:
    """NDJSON: the gateway's events as they came, and our own in the same shape."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def event(self, event: Event, line: bytes) -> None:
        """Pass the line on."""
        del event
        self._print(line.decode("utf-8", "replace").strip())

    def problem(self, problem: Problem) -> None:
        """Write an event ``problem``."""
        self.write({"event": "problem", "id": problem.id, "reason": problem.reason})

    def away(self, reason: str, wait_s: float) -> None:
        """Write an event ``away``."""
        self.write({"event": "away", "reason": reason, "wait_s": round(wait_s, 3)})

    def say(self, text: str) -> None:
        """Remarks are for people."""

    def close(self) -> None:
        """Nothing is open."""

    def write(self, event: dict[str, object]) -> None:
        """Write one event of our own."""
        self._print(json.dumps(event))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Several:
    """Tells several at once."""

    def __init__(self, talks: Sequence[Talk]) -> None:
        self._talks = talks

    def event(self, event: Event, line: bytes) -> None:
        """Tell all."""
        for talk in self._talks:
            talk.event(event, line)

    def problem(self, problem: Problem) -> None:
        """Tell all."""
        for talk in self._talks:
            talk.problem(problem)

    def away(self, reason: str, wait_s: float) -> None:
        """Tell all."""
        for talk in self._talks:
            talk.away(reason, wait_s)

    def say(self, text: str) -> None:
        """Tell all."""
        for talk in self._talks:
            talk.say(text)

    def close(self) -> None:
        """End all."""
        for talk in self._talks:
            talk.close()


def clean(text: str) -> str:
    """Return ``text`` with everything spelled out that would steer a terminal or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe(event: Event) -> str | None:
    """Return an event in words, None if there is nothing to tell."""
    if isinstance(event, Plan):
        return _plan_text(event)
    if isinstance(event, Step):
        return _step_text(event)
    if isinstance(event, End):
        return None
    return _verified_text(event)


def _plan_text(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for placement in plan.placements:
        counts[placement.action] = counts.get(placement.action, 0) + 1
    if plan.refused:
        counts["refused"] = len(plan.refused)
    tokens = sum(p.tokens for p in plan.placements if p.action == "warm")
    found = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    return f"plan: {found or 'nothing'}; {tokens:,} tokens to compute at most"


def _step_text(step: Step) -> str | None:
    where = step.id if step.worker is None else f"{step.id} on {step.worker}"
    if step.event == "failed":
        return f"failed {where}: {step.reason or 'no reason given'}"
    if step.event == "done":
        took = "" if step.elapsed_s is None else f" in {step.elapsed_s:.2f} s"
        computed = "" if step.computed_tokens is None else f", {step.computed_tokens:,} computed"
        return f"done {where}: {step.tokens or 0:,} tokens{computed}{took}"
    if step.event == "start":
        return f"start {where}"
    return f"progress {where}: {step.tokens or 0:,} tokens"


def _verified_text(seen: Verified) -> str:
    if seen.is_proof:
        return f"warm {seen.id} on {seen.worker}: {seen.cached_tokens:,} tokens found in its cache"
    wanted = f"{seen.cached_tokens or 0:,} of {seen.wanted_tokens or 0:,} tokens"
    why = f" ({seen.reason})" if seen.reason else ""
    return f"not warm {seen.id} on {seen.worker}: {wanted}{why}"


def _is_usual(event: Event) -> bool:
    if isinstance(event, Plan):
        return True
    if isinstance(event, Step):
        return event.event != "failed"
    return isinstance(event, End) or event.is_proof

"""What a line of the checklist comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line's outcome.

    Attributes:
        status: Whether to go live with it.
        evidence: What was seen, with its numbers.
        advice: What to do; empty where nothing is to be done.
        is_known: False = the evidence is missing; the status is ``warn`` then.
    """

    status: Status
    evidence: str
    advice: str = ""
    is_known: bool = True


def passed(evidence: str) -> Verdict:
    """Return that nothing is to be done."""
    return Verdict("pass", evidence)


def warned(evidence: str, advice: str) -> Verdict:
    """Return that it costs something, and may be meant."""
    return Verdict("warn", evidence, advice)


def failed(evidence: str, advice: str) -> Verdict:
    """Return that one should not go live with it."""
    return Verdict("fail", evidence, advice)


def unknown(why: str, advice: str) -> Verdict:
    """Return that there is no evidence, and how to get it."""
    return Verdict("warn", f"unknown: {why}", advice, is_known=False)


def listed(names: list[str], most: int = 5) -> str:
    """Return names with commas, the first ones only where there are many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

"""What the gateway tells while it warms, as typed values.

Everything comes from outside: a line is checked whole or refused; events of a newer gateway are
passed over.
"""

from __future__ import annotations

from typing import Any

from msgspec import DecodeError, Struct
from msgspec.json import Decoder


class EventError(Exception):
    """A line is no event; the message says what was expected."""


class Placement(Struct, frozen=True):
    """Where one copy of a document goes, or why it goes nowhere.

    Attributes:
        id: The document.
        worker: None where no worker fits.
        action: ``warm``, ``skip_held``, or another ``skip_*`` or ``no_worker`` with its reason.
        tier: Where it will lie.
        tokens: Its shareable tokens.
        bytes: Of KV.
        seconds: What computing it is expected to take.
        gain_s: What keeping it is expected to save.
        reason: Why this action.
    """

    id: str
    action: str
    worker: str | None = None
    tier: str | None = None
    tokens: int = 0
    bytes: int | None = None
    seconds: float | None = None
    gain_s: float | None = None
    reason: str | None = None


class Refusal(Struct, frozen=True):
    """A document that the gateway cannot take."""

    id: str
    reason: str


class Plan(Struct, frozen=True):
    """What will be done."""

    placements: list[Placement]
    refused: list[Refusal] = []


class Step(Struct, frozen=True):
    """One copy on its way: ``start``, ``progress``, ``done`` or ``failed``.

    Attributes:
        event: Which of these.
        id: The document.
        worker: None if it failed before it had one.
        tokens: Sent so far, or in all.
        cached_tokens: Of them found in the worker's cache.
        computed_tokens: Of them computed.
        elapsed_s: Since its start.
        reason: Why it failed.
    """

    event: str
    id: str
    worker: str | None = None
    tokens: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    elapsed_s: float | None = None
    reason: str | None = None


class Verified(Struct, frozen=True):
    """What a worker was seen to hold of one document.

    Attributes:
        id: The document.
        worker: Who was asked.
        warm: The gateway's verdict.
        proven: False if the worker does not tell how much it found.
        cached_tokens: What a probe found in the worker's cache.
        wanted_tokens: What it has to find.
        held_tokens: What the index says the worker holds.
        reason: Why it is not warm.
    """

    id: str
    worker: str
    warm: bool
    proven: bool = True
    cached_tokens: int | None = None
    wanted_tokens: int | None = None
    held_tokens: int | None = None
    reason: str | None = None

    @property
    def is_proof(self) -> bool:
        """Whether the numbers themselves show that the document is warm."""
        if not self.warm or not self.proven:
            return False
        if self.cached_tokens is None or self.wanted_tokens is None:
            return False
        return self.cached_tokens >= self.wanted_tokens > 0


class End(Struct, frozen=True):
    """The last word of a run.

    Attributes:
        stopped: Whether it ended before its time.
    """

    stopped: bool = False


Event = Plan | Step | Verified | End


class _Kind(Struct):
    event: str


_KIND = Decoder(_Kind)
_STEP = Decoder(Step)
_DECODERS: dict[str, Decoder[Any]] = {
    "plan": Decoder(Plan),
    "start": _STEP,
    "progress": _STEP,
    "done": _STEP,
    "failed": _STEP,
    "verified": Decoder(Verified),
    "end": Decoder(End),
}


def decode(line: bytes) -> Event | None:
    """Return the event in a line, None if it is of a kind that is not known here.

    Raises:
        EventError: If it is no event.
    """
    try:
        decoder = _DECODERS.get(_KIND.decode(line).event)
        return None if decoder is None else decoder.decode(line)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"expected an event, got {line[:80]!r}: {error}") from error

"""Read the values of ``warmlane replay``'s options; the impossible is refused with its bound."""

from __future__ import annotations

import re
from math import inf, isfinite
from typing import TYPE_CHECKING

from gateway.replay.simulate import Failure, Scaling

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_NUMBER = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


class OptionError(ValueError):
    """A value cannot be used; the message says what was expected."""


def number(option: str, text: str, *, above: float = 0.0) -> float:
    """Read a positive number.

    Raises:
        OptionError: If it is none, or not above the bound.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise OptionError(f"{option}: expected a number, not {text!r}") from error
    if not (value > above and isfinite(value)):
        raise OptionError(f"{option}: must be above {above:g}, not {text}")
    return value


def numbers(option: str, text: str) -> list[float]:
    """Read comma-separated positive numbers.

    Raises:
        OptionError: If one of them is none.
    """
    return [number(option, part) for part in text.split(",")]


def seconds(option: str, text: str) -> float:
    """Read a duration such as ``50ms``, ``2s`` or ``5m``; a bare number is seconds.

    Raises:
        OptionError: If it is none.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNIT_S:
        raise OptionError(f"{option}: expected a duration such as 50ms or 2s, not {text!r}")
    try:
        return float(match[1]) * _UNIT_S[match[2].lower()]
    except ValueError as error:
        raise OptionError(f"{option}: expected a duration, not {text!r}") from error


def load_delay(option: str, text: str) -> float:
    """Read how often load is shared: a duration above 0, or ``none``.

    Raises:
        OptionError: If it is neither.
    """
    if text == "none":
        return inf
    value = seconds(option, text)
    if not value > 0:
        raise OptionError(f"{option}: must be above 0, or none; 0 would be one gateway")
    return value


def failure(text: str, num_workers: int) -> Failure:
    """Read ``TIME:DURATION[:WORKERS]``.

    Raises:
        OptionError: If it is not of that form, or has more workers than there are.
    """
    parts = text.split(":")
    if len(parts) not in (2, 3):
        raise OptionError(
            f"--fail: expected TIME:DURATION[:WORKERS] as in 300s:30s:2, not {text!r}"
        )
    count = whole("--fail", parts[2]) if len(parts) == 3 else 1
    if not 1 <= count <= num_workers:
        raise OptionError(f"--fail: WORKERS must be 1 to {num_workers}, not {count}")
    return Failure(seconds("--fail", parts[0]), seconds("--fail", parts[1]), count)


def scalings(texts: Sequence[str], num_workers: int) -> tuple[Scaling, ...]:
    """Read ``TIME:+WORKERS`` and ``TIME:-WORKERS``, in order of time.

    Args:
        texts: The options.
        num_workers: Workers at the start; those that join later may go first.

    Raises:
        OptionError: If one is not of that form, or all of them leave no worker.
    """
    parsed = sorted(map(_scaling, texts))
    left = num_workers
    for scaling in parsed:
        if left + scaling.num_workers < 1:
            raise OptionError(f"--scale: at most {left - 1} of {left} workers can go")
        left += scaling.num_workers
    return tuple(parsed)


def _scaling(text: str) -> Scaling:
    at, _, change = text.partition(":")
    if change[:1] not in ("+", "-"):
        raise OptionError(f"--scale: expected TIME:+WORKERS or TIME:-WORKERS, not {text!r}")
    count = whole("--scale", change[1:])
    return Scaling(seconds("--scale", at), count if change[0] == "+" else -count)


def whole(option: str, text: str) -> int:
    """Read a whole number.

    Raises:
        OptionError: If it is none.
    """
    try:
        return int(text)
    except ValueError as error:
        raise OptionError(f"{option}: expected a whole number, not {text!r}") from error

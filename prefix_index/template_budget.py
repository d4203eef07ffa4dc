"""What one rendering of a template may use, and what its values may grow to.

The bounds are far above what any conversation needs and far below what a process can bear.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# Ten times the loop steps of a conversation with 10,000 messages and 100 tools.
MAX_STEPS = 1_000_000
# The longest context windows are 10M tokens of about 4 characters.
MAX_CHARS = 64_000_000
# CPU time of the rendering thread; 1,000 times what a long conversation takes.
MAX_CPU_S = 1.0
# Rendering reads the clock this often: at most 10 ms of work apart, and no visible cost.
_STEPS_PER_CLOCK = 4096
# Numbers and repetitions in real templates are far below; 10,000 bits are 3,010 digits.
_MAX_COUNT = 1_000_000
_MAX_BITS = 10_000
# Walking over this many known values takes about as long as a step.
_VALUES_PER_STEP = 64
# A width or precision of five digits or from an argument, in either kind of format.
_WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*?(?:\d{5}|\*)|\{[^{}]*:[^{}]*\d{5}")


class TooMuchError(RuntimeError):
    """A rendering has used up what one may use."""


class Budget:
    """What is left to one rendering; used by one thread."""

    __slots__ = ("_chars", "_clock_at", "_deadline_s", "_known", "_steps")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._clock_at = MAX_STEPS - _STEPS_PER_CLOCK
        self._deadline_s = 0.0
        # Containers that were kept: id -> values in it, and itself.
        self._known: dict[int, tuple[int, Any]] = {}

    def step(self, chars: int = 0) -> None:
        """Spend one step that prints ``chars``.

        Raises:
            TooMuchError: If nothing is left.
        """
        self._steps -= 1
        if chars:
            self.print(chars)
        if self._steps < self._clock_at:
            self._check_clock()

    def keep(self, value: Any) -> None:
        """Spend steps on a list, tuple or dict that a template keeps.

        Raises:
            TooMuchError: If it has too many values in it, or nothing is left.
        """
        self._steps -= 1 + len(value) // _VALUES_PER_STEP
        if self._steps < self._clock_at:
            self._check_clock()
        if _num_values(value, self._known) > _MAX_COUNT:
            raise TooMuchError(f"the template keeps more than {_MAX_COUNT:,} values")

    def print(self, chars: int) -> None:
        """Spend characters of output.

        Raises:
            TooMuchError: If there were none left.
        """
        self._chars -= chars
        if self._chars < 0:
            raise TooMuchError(f"the template prints more than {MAX_CHARS:,} characters")

    def _check_clock(self) -> None:
        if self._steps < 0:
            raise TooMuchError(f"the template takes more than {MAX_STEPS:,} steps")
        self._clock_at = self._steps - _STEPS_PER_CLOCK
        now_s = time.thread_time()
        if not self._deadline_s:  # short renderings never read the clock
            self._deadline_s = now_s + MAX_CPU_S
        elif now_s > self._deadline_s:
            raise TooMuchError(f"the template takes more than {MAX_CPU_S} s")


def check_count(value: Any) -> None:
    """Check a number that may mean repetitions or columns.

    Raises:
        TooMuchError: If it is too much.
    """
    if type(value) is int and value > _MAX_COUNT:
        raise TooMuchError(f"the template asks for {value.bit_length()}-bit repetitions")


def check_size(size: int) -> None:
    """Check the length of a text that is kept.

    Raises:
        TooMuchError: If it is too much.
    """
    if size > MAX_CHARS:
        raise TooMuchError(f"the template makes a value of more than {MAX_CHARS:,} characters")


def check_format(form: str) -> None:
    """Check the widths of a format.

    Raises:
        TooMuchError: If it is too much.
    """
    if _WIDE_FORMAT.search(form):
        raise TooMuchError("the template formats to a huge width")


def check_power(base: Any, exponent: Any) -> None:
    """Check a power of whole numbers.

    Raises:
        TooMuchError: If it is too much.
    """
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * abs(exponent))


def check_product(left: Any, right: Any) -> None:
    """Check a product of numbers, or a repeated text or list.

    Raises:
        TooMuchError: If it is too much.
    """
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(value, str):
                check_size(len(value) * times)
            elif isinstance(value, list | tuple) and len(value) * times > _MAX_COUNT:
                check_size(MAX_CHARS + 1)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooMuchError("the template computes a huge number")


def _num_values(value: Any, known: dict[int, tuple[int, Any]]) -> int:
    """Count nested values, shared ones each time they occur; only new containers are walked."""
    if isinstance(value, dict):
        children: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        children = value
    else:
        return 1
    entry = known.get(id(value))
    if entry is None:
        # The container is kept, so that its id is not used again; nothing can change it.
        entry = (1 + sum(_num_values(child, known) for child in children), value)
        known[id(value)] = entry
    return entry[0]

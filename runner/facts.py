"""Typed reading of model metadata: a wrong value is refused naming file, key and expectation."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

D = TypeVar("D")

_REQUIRED: Any = object()

# Beyond any model's sizes and constants; keeps absurd values from overflowing later on.
_MAX_INTEGER = 2**40
_MIN_NUMBER, _MAX_NUMBER = 1e-12, 1e12


class UnsupportedModelError(ValueError):
    """The model is of a kind this runner does not compute; the message names those it does."""


class FactError(ValueError):
    """Metadata lacks something or says something impossible; the message names file and key."""


class Facts:
    """Reads members of one object; without a default a missing one is refused, as is ``null``."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        """Wrap ``values``, which messages will say are of ``place``."""
        self.values = values
        self.place = place

    def refuse(self, key: str, expected: str) -> FactError:
        """Return the error that says what this member should have been."""
        value = self.values.get(key)
        got = "nothing" if value is None else reprlib.repr(value)
        return FactError(f"{self.place}: `{key}` must be {expected}, got {got}")

    def integer(
        self, key: str, default: D = _REQUIRED, *, low: int = 1, high: int = _MAX_INTEGER
    ) -> int | D:
        """Read an integer of ``[low, high]``."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an integer between {low} and {high}")
        return value

    def number(self, key: str, default: D = _REQUIRED) -> float | D:
        """Read a number above 0 (and within reason)."""
        value: Any = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _MIN_NUMBER <= value <= _MAX_NUMBER:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Read ``true`` or ``false``."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def string(self, key: str, default: str) -> str:
        """Read a string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Read a list of strings; empty when absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "a list of strings")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Read an integer or a list of them, none below 0; empty when absent."""
        value = self.values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= _MAX_INTEGER for item in items):
            raise self.refuse(key, "an integer or a list of integers of at least 0")
        return tuple(items)

    def object(self, key: str) -> Facts:
        """Read an object; an empty one when absent."""
        value = self.values.get(key)
        if value is None:
            return Facts({}, f"{self.place} {key}")
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Facts(value, f"{self.place} {key}")


def read_facts(path: Path) -> Facts:
    """Read a JSON file that holds one object.

    Raises:
        FactError: If it does not.
        OSError: If it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FactError(f"{path}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise FactError(f"{path}: expected a JSON object")
    return Facts(values, str(path))

"""Typed reading of JSON objects: every refusal names the field, what was expected and what came.

``null`` counts as absent, since clients send unset options so.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from runner.errors import ApiError, invalid

D = TypeVar("D")

# Wrong values are quoted back, but not whole documents.
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = 60
_QUOTE.maxlevel = 2


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a request body that must be one JSON object.

    Raises:
        ApiError: 400 if it is not.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {_describe(body)}", code="invalid_json")
    return body


class Fields:
    """Reads members of one object; ``path`` prefixes the names in messages (``a.b``)."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, key: str) -> str:
        """Return the full name of a member."""
        return f"{self.path}.{key}" if self.path else key

    def refuse(self, key: str, expected: str) -> ApiError:
        """Return the 400 that says what this member should have been."""
        name = self.name(key)
        return invalid(f"`{name}` must be {expected}, got {_describe(self.values.get(key))}", name)

    def integer(
        self, key: str, default: D, *, low: int | None = None, high: int | None = None
    ) -> int | D:
        """Read an integer of ``[low, high]``."""
        value = self.values.get(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or (low is not None and value < low)
            or (high is not None and value > high)
        ):
            raise self.refuse(key, "an integer" + _range(low, high))
        return value

    def number(self, key: str, default: float, *, low: float, high: float | None = None) -> float:
        """Read a finite number of ``[low, high]``."""
        value = self.values.get(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < low
            or (high is not None and value > high)
        ):
            raise self.refuse(key, "a number" + _range(low, high))
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        """Read ``true`` or ``false``."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def string(self, key: str, default: D) -> str | D:
        """Read a string that is not empty."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self.refuse(key, "a non-empty string")
        return value

    def object(self, key: str) -> Fields | None:
        """Read an object; None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return Fields(value, self.name(key))

    def objects(self, key: str) -> list[Fields] | None:
        """Read a list of objects; None when absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(key, "a list of objects")
        for at, item in enumerate(value):
            if not isinstance(item, Mapping):
                name = f"{self.name(key)}[{at}]"
                raise invalid(f"`{name}` must be an object, got {_describe(item)}", name)
        return [Fields(item, f"{self.name(key)}[{at}]") for at, item in enumerate(value)]

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """Read a list of integers of ``[low, high]``; empty when absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_integer(item, low, high) for item in value):
            raise self.refuse(key, "a list of integers" + _range(low, high))
        return tuple(value)


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" between {low} and {high}"
    return f" of at least {low}" if low is not None else ""


def _describe(value: object) -> str:
    """Quote a wrong value briefly, with its JSON type."""
    if value is None:
        return "nothing"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
    kind = kinds.get(type(value), "object")
    return f"{_QUOTE.repr(value)} ({kind})"

"""Checks of single fields of operators' requests; errors name what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


def text(document: Mapping[str, Any], name: str, max_chars: int) -> str:
    """Return a text; empty if it is absent or null.

    Raises:
        InvalidRequest: If it is anything else, too long, or no Unicode.
    """
    value = document.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > max_chars:
        raise InvalidRequest(
            f"{name}: expected a text of at most {max_chars} characters.", param=name
        )
    return value


def is_flag(document: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a truth value.

    Raises:
        InvalidRequest: If it is anything else.
    """
    value = document.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: expected true or false.", param=name)
    return value


def count(
    document: Mapping[str, Any], name: str, default: int, least: int = 0, most: int = 1 << 53
) -> int:
    """Return a whole number.

    Raises:
        InvalidRequest: If it is anything else, or out of bounds.
    """
    value = document.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{name}: expected a whole number, {least} to {most}.", param=name)
    return value


def share(document: Mapping[str, Any], name: str, default: float) -> float:
    """Return a share above 0 and up to 1.

    Raises:
        InvalidRequest: If it is anything else.
    """
    value = document.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise InvalidRequest(f"{name}: expected a share above 0, at most 1.", param=name)
    return float(value)

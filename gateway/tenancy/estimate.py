"""How many tokens a request will take, before anything is known of it but its body.

Estimates are corrected once the worker has told the real number, so they only have to be of the
right size. The text alone counts: encoded pictures and sound are long and take few tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# English text and code in common vocabularies.
CHARS_PER_TOKEN = 4
# What routing expects of an answer whose length nobody knows.
COMPLETION_TOKENS = 200
_TEXT_MEMBERS = ("system", "instructions", "messages", "prompt", "input")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# Deeper than any content part; hostile bodies end here.
_MAX_DEPTH = 6


def prompt_estimate(body: Mapping[str, Any]) -> int:
    """Estimate the tokens of a body's prompt."""
    size = 0
    for name in _TEXT_MEMBERS:
        value = body.get(name)
        if value is not None:
            size += _size(value, _MAX_DEPTH)
    return max(1, size // CHARS_PER_TOKEN)


def completion_estimate(body: Mapping[str, Any]) -> int:
    """Estimate the tokens of the answer."""
    for name in _LIMITS:
        limit = body.get(name)
        if type(limit) is int and limit >= 0:
            return min(limit, COMPLETION_TOKENS)
    return COMPLETION_TOKENS


def _size(value: Any, depth: int) -> int:
    """Return the characters in a value's text; a token id counts as a token."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is list and depth:
        if value and type(value[0]) is int:
            return len(value) * CHARS_PER_TOKEN
        return sum([_size(item, depth - 1) for item in value])
    if kind is dict and depth:
        content = value.get("content")
        if content is None:
            content = value.get("text")
        return len(content) if type(content) is str else _size(content, depth - 1)
    return 0

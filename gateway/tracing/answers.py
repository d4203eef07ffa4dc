"""What a worker's answer tells of itself: who made it, why it ended, more token counts. Pure.

Read for traced requests only, when they are over, of whole answers or of a stream's first and last
events. Anthropic's events hold the message one level down, those of the responses API the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.protocols.events import parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Workers choose these texts, and a collector keeps them.
MAX_TEXT_CHARS = 256
# With more choices than that, their reasons are all alike.
MAX_REASONS = 16


@dataclass(slots=True)
class Told:
    """What an answer told; None or empty where it did not.

    Attributes:
        response_id: Of the answer.
        model: That made it.
        finish_reasons: Of its choices, in the order in which they ended.
        cache_write_tokens: Prompt tokens that were written to a cache.
        reasoning_tokens: Generated tokens that are not in the answer.
    """

    response_id: str | None = None
    model: str | None = None
    finish_reasons: list[str] = field(default_factory=list)
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


def told_by(said: Iterable[bytes | dict[str, Any]]) -> Told:
    """Read documents of one answer, in order: bytes, or parsed a stream's first event."""
    told = Told()
    for given in said:
        document = parsed(given) if isinstance(given, bytes) else given
        if isinstance(document, dict):
            # A stream's first event may be among its last ones, too.
            _read(document, told, is_first=document is given)
    return told


def _read(document: dict[str, Any], told: Told, *, is_first: bool) -> None:
    inner = next(
        (part for name in ("message", "response") if isinstance(part := document.get(name), dict)),
        document,
    )
    told.response_id = told.response_id or _text(inner.get("id"))
    told.model = told.model or _text(inner.get("model"))
    if is_first:
        return
    for reason in _reasons(document, inner):
        if len(told.finish_reasons) < MAX_REASONS:
            told.finish_reasons.append(reason)
    usage = inner.get("usage") or document.get("usage")
    if isinstance(usage, dict):
        _count(usage, told)


def _reasons(document: dict[str, Any], inner: dict[str, Any]) -> Iterator[str]:
    choices = inner.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and (reason := _text(choice.get("finish_reason"))):
            yield reason
    delta = document.get("delta")
    for part in (inner, delta if isinstance(delta, dict) else {}):
        if reason := _text(part.get("stop_reason")):
            yield reason


def _count(usage: dict[str, Any], told: Told) -> None:
    prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    output = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    written = prompt.get("cache_write_tokens") if isinstance(prompt, dict) else None
    if written is None:
        written = usage.get("cache_creation_input_tokens")
    if isinstance(written, int):
        told.cache_write_tokens = written
    reasoning = output.get("reasoning_tokens") if isinstance(output, dict) else None
    if isinstance(reasoning, int):
        told.reasoning_tokens = reasoning


def _text(value: object) -> str | None:
    return value[:MAX_TEXT_CHARS] if isinstance(value, str) and value else None

"""Which tokens of a prompt belong to which message: spans for explain.

Spans are parts of the prompt's one tokenization. The end of a message is found by rendering the
conversation up to it; where that is not a beginning of the whole prompt (templates that hoist or
drop text), the span's tokens are unknown and left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefix_index.chat import TemplateRefusedError

if TYPE_CHECKING:
    from gateway.routing.dispatch import Plan

STABLE_KINDS = ("system", "tools", "knowledge", "history")
INSTRUCTION_ROLES = ("system", "developer")


def segments(plan: Plan) -> list[dict[str, Any]]:
    """Return the prompt's segments: kind, start_token, end_token, volatile.

    Neighbouring messages of one kind are one segment. The last one, with the generation prompt,
    is ``current``. A prompt that could not be read has no segments.
    """
    prompt = plan.prompt
    if prompt is None:
        return []
    messages = plan.inbound.body.get("messages")
    if plan.inbound.surface != "chat" or not isinstance(messages, list) or not messages:
        return [_segment("current", 0, prompt.num_tokens)]
    kinds = [_kind(message, is_last=m == len(messages) - 1) for m, message in enumerate(messages)]
    spans: list[dict[str, Any]] = []
    start: int | None = 0
    for m, kind in enumerate(kinds):
        if m + 1 < len(kinds) and kinds[m + 1] == kind:
            continue
        last = m + 1 == len(kinds)
        end = prompt.num_tokens if last else _end_token(plan, messages[: m + 1])
        spans.append(_segment(kind, start, end))
        start = end
    return spans


def stable_tokens(spans: list[dict[str, Any]], block_size: int) -> int:
    """Return the end of the last full block of everything before the current message."""
    ends = [s["end_token"] for s in spans if s["kind"] in STABLE_KINDS and "end_token" in s]
    return max(ends, default=0) // block_size * block_size


def _segment(kind: str, start: int | None, end: int | None) -> dict[str, Any]:
    span: dict[str, Any] = {"kind": kind, "volatile": []}
    if start is not None and end is not None:
        span |= {"start_token": start, "end_token": end}
    return span


def _kind(message: Any, *, is_last: bool) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if is_last:
        return "current"
    return "system" if role in INSTRUCTION_ROLES else "history"


def _end_token(plan: Plan, messages: list[Any]) -> int | None:
    """Return how many tokens the first messages are, None when that cannot be told."""
    reader, prompt = plan.pool.reader, plan.prompt
    if reader is None or prompt is None:
        return None
    body = {**plan.inbound.body, "messages": messages, "add_generation_prompt": False}
    salt = body.get("cache_salt")
    try:
        part = reader.chat(body, salt=salt if isinstance(salt, str) else "").complete()
    except (TemplateRefusedError, TypeError, ValueError):
        return None
    is_beginning = prompt.token_ids[: part.num_tokens] == part.token_ids
    return part.num_tokens if is_beginning else None

"""Which characters of each message are instructions, knowledge, history or the current question."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefix_index.spans import message_text, text_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.recurrence import Run

INSTRUCTION_ROLES = frozenset({"system", "developer"})
TOOL_ROLES = frozenset({"tool", "function"})
# About 250 tokens: shorter recurring text is a phrase, an example or a habit, not a document.
MIN_KNOWLEDGE_CHARS = 1000
# A chunk given as a hint is looked for word for word; shorter ones would be found anywhere.
_MIN_CHUNK_CHARS = 32
# Bounds on looking: hints and marked documents of one request.
_MAX_CHUNKS = 256
_MAX_DOCUMENTS = 256

_MAX_OPENINGS = 2048
_OPEN = re.compile(r"<(doc|document|source|passage|chunk|context)(?=[ _>-])[^<>\n]{0,256}")

SegmentKind: TypeAlias = Literal["system", "tools", "knowledge", "history", "current"]


@dataclass(frozen=True, slots=True)
class Label:
    """A stretch of one message's text.

    Attributes:
        start: First character.
        end: One behind the last.
        kind: What it is.
    """

    start: int
    end: int
    kind: SegmentKind


def labels_of(
    messages: Sequence[Any],
    chunks: Sequence[str],
    has_documents: bool,
    runs: Sequence[Sequence[Run]],
    num_shared: int,
) -> list[list[Label]]:
    """Label each message's text from its first to its last character that is not blank.

    Args:
        messages: As the client sent them.
        chunks: Texts of documents, looked for word for word.
        has_documents: Whether the request names documents.
        runs: Recurring text of each message; may be empty.
        num_shared: Leading messages that other conversations begin with too.

    Returns:
        Per message, consecutive stretches; none for one without text.
    """
    current = current_from(messages)
    examples = _examples(messages, min(num_shared, current))
    labels: list[list[Label]] = []
    for m, message in enumerate(messages):
        text = message_text(message)
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        if not isinstance(message, dict) or start >= end:
            labels.append([])
            continue
        role = message.get("role")
        is_system = role in INSTRUCTION_ROLES
        kind: SegmentKind = "system" if is_system else "current" if m >= current else "history"
        if m in examples:
            labels.append([Label(start, end, "knowledge")])
            continue
        row = runs[m] if m < len(runs) else ()
        spans = _hinted(message, text, chunks, has_documents, is_system=is_system)
        spans += _recurring(text, row, is_system=is_system)
        labels.append(_painted(text, start, end, kind, spans))
    return labels


def current_from(messages: Sequence[Any]) -> int:
    """Return the first message of the current turn.

    That is the last user message with the tool results behind it; behind an assistant's tool calls
    it is the results alone; an answer to be continued belongs to the question before it.
    """
    at = len(messages) - 1
    if at > 0 and _role(messages[at]) == "assistant":
        at -= 1
    while at > 0 and _role(messages[at]) in TOOL_ROLES and _role(messages[at - 1]) != "assistant":
        at -= 1
    return max(at, 0)


def documents_in(text: str) -> list[tuple[int, int]]:
    """Return the spans of ``<doc ...>...</doc>`` and its like, marks included; not nested ones.

    Linear in the text, and of what looks like a mark only the first 2,048 are tried.
    """
    spans: list[tuple[int, int]] = []
    unclosed = set()
    at = 0
    for _ in range(_MAX_OPENINGS):
        opening = _OPEN.search(text, at)
        if opening is None:
            break
        at = opening.end()
        closing = f"</{opening[1]}>"
        if closing in unclosed or not text.startswith(">", at):
            continue
        end = text.find(closing, at)
        if end < 0:
            unclosed.add(closing)
            continue
        at = end + len(closing)
        spans.append((opening.start(), at))
    return spans[:_MAX_DOCUMENTS]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _examples(messages: Sequence[Any], num_shared: int) -> frozenset[int]:
    """Return the leading user and assistant messages, in pairs, that conversations share."""
    first = 0
    while first < num_shared and _role(messages[first]) in INSTRUCTION_ROLES:
        first += 1
    last = num_shared
    while last > first and _role(messages[last - 1]) != "assistant":
        last -= 1
    return frozenset(range(first, last))


def _hinted(
    message: dict[str, Any],
    text: str,
    chunks: Sequence[str],
    has_documents: bool,
    *,
    is_system: bool,
) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    if not is_system and (marked := _marked_end(message.get("content"))):
        spans.append((0, marked))
    for chunk in chunks[:_MAX_CHUNKS]:
        at = text.find(chunk) if len(chunk) >= _MIN_CHUNK_CHARS else -1
        if at >= 0:
            spans.append((at, at + len(chunk)))
    if has_documents and not spans:
        spans += documents_in(text)
        last_line = text.rstrip().rfind("\n") + 1
        if not spans and not is_system and last_line >= MIN_KNOWLEDGE_CHARS:
            spans.append((0, last_line))
    return spans


def _marked_end(content: Any) -> int:
    """Return the end of the last part with ``cache_control``, in the text of the message."""
    end = at = 0
    for part in content if isinstance(content, list) else ():
        texts = text_parts([part])
        if not texts:
            continue
        at += len(texts[0])
        if isinstance(part, dict) and part.get("cache_control"):
            end = at
        at += 1
    return end


def _recurring(text: str, runs: Sequence[Run], *, is_system: bool) -> list[tuple[int, int]]:
    """Return large recurring text and marked documents; of instructions the latter alone."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        if spans and spans[-1][1] == run.start_char:
            spans[-1] = (spans[-1][0], run.end_char)
        else:
            spans.append((run.start_char, run.end_char))
    if not spans:
        return []
    known = [
        (start, end)
        for start, end in documents_in(text)
        if 2 * sum(max(0, min(end, b) - max(start, a)) for a, b in spans) > end - start
    ]
    if not is_system:
        known += [(start, end) for start, end in spans if end - start >= MIN_KNOWLEDGE_CHARS]
    return known


def _painted(
    text: str, start: int, end: int, kind: SegmentKind, knowledge: list[tuple[int, int]]
) -> list[Label]:
    """Return consecutive labels of one text, with knowledge where the spans are.

    Blanks between two documents belong to them.
    """
    labels: list[Label] = []
    at = start
    for begin, stop in sorted(knowledge):
        begin, stop = max(begin, at), min(stop, end)
        if begin >= stop:
            continue
        if labels and not text[at:begin].strip():
            begin = at
        if begin > at:
            labels.append(Label(at, begin, kind))
        if labels and labels[-1].kind == "knowledge":
            begin = labels.pop().start
        labels.append(Label(begin, stop, "knowledge"))
        at = stop
    if at < end:
        labels.append(Label(at, end, kind))
    return labels

"""What each part of a prompt is: system, tools, knowledge, history or the current question.

Read from the messages, with hints first and recurrence after; never from the rendered text, which
user text can imitate. Segments are spans of the prompt's one tokenization: they follow each other
without gaps from its first token to its last.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefix_index.chat import TemplateRefusedError
from prefix_index.pieces import find_pieces
from prefix_index.regions import SegmentKind, labels_of
from prefix_index.spans import Placed, message_text, token_ends, tokens_before
from prefix_index.volatile import MAX_SPANS, Volatile, find_volatile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefix_index.prompts import Prompt, PromptReader
    from prefix_index.recurrence import Run

Source: TypeAlias = Literal["message", "template", "prompt"]

# Shorter text that recurs somewhere else is a phrase.
_MIN_MOVED_CHARS = 160
# What a template prints by itself is in this prompt too.
_PROBE = [{"role": "system", "content": "qzx1"}, {"role": "user", "content": "qzx2"}]


@dataclass(frozen=True, slots=True)
class Found(Volatile):
    """A volatile span of a prompt.

    Attributes:
        source: ``message``: in the text of one message, where its characters are counted.
            ``template``: printed by the template itself; ``prompt``: printed by it for tools and
            the like, or a completion's; both are counted in the rendered prompt.
        message: Index of that message; None for the others.
        start_token: First token that the span touches.
        value: What a template printed by itself; empty for what users wrote.
    """

    source: Source = "message"
    message: int | None = None
    start_token: int = 0
    value: str = ""


@dataclass(slots=True)
class Segment:
    """A span of tokens of one kind.

    Attributes:
        kind: What it is.
        start_token: First token.
        end_token: One behind the last.
        volatile: What in it probably changes.
    """

    kind: SegmentKind
    start_token: int
    end_token: int
    volatile: list[Volatile] = field(default_factory=list)


@dataclass(slots=True)
class Moved:
    """Recurring text that stands behind text which changes, so that no cache can reuse it.

    Attributes:
        kind: Kind of the segment it is in.
        start_token: Its first token.
        num_tokens: Tokens of it.
    """

    kind: SegmentKind
    start_token: int
    num_tokens: int


@dataclass(slots=True)
class Layout:
    """All that is known about the parts of one prompt.

    Attributes:
        segments: In order, without gaps.
        moved: Recurring text behind changing text, in order.
    """

    segments: list[Segment]
    moved: list[Moved] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about itself.

    Attributes:
        chunks: Texts of documents that stand in the messages word for word.
        has_documents: Whether it names documents at all: marked or large text is theirs then.
    """

    chunks: tuple[str, ...] = ()
    has_documents: bool = False


def read_segments(
    reader: PromptReader,
    body: Mapping[str, Any],
    hints: Hints,
    prompt: Prompt,
    runs: Sequence[Sequence[Run]] = (),
    num_shared: int = 0,
) -> list[Segment]:
    """Return a prompt's segments; see ``read_layout``."""
    return read_layout(reader, body, hints, prompt, runs, num_shared).segments


def read_layout(
    reader: PromptReader,
    body: Mapping[str, Any],
    hints: Hints,
    prompt: Prompt,
    runs: Sequence[Sequence[Run]] = (),
    num_shared: int = 0,
) -> Layout:
    """Find the segments of a prompt, what in them changes, and stable text in bad places.

    Not for the hot path: renders up to five times and tokenizes once. Where marks do not survive
    the template, a message's end is where the prompt rendered up to it ends.

    Args:
        reader: What the prompt was read with.
        body: The request as read; not changed.
        hints: What the request says about its documents.
        prompt: The prompt as read.
        runs: Recurring text of each message (``Recurrence.recurring``).
        num_shared: Leading messages that other conversations begin with too.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return _completion(body, prompt)
    try:
        rendered = reader.render(body)
    except TemplateRefusedError:
        return Layout(_whole(prompt))
    ends = token_ends(reader, rendered, prompt)
    if ends is None:
        return Layout(_whole(prompt))
    labels = labels_of(messages, hints.chunks, hints.has_documents, runs, num_shared)
    placed, pieces = find_pieces(reader, body, rendered, labels)
    segments = _segments(pieces, ends)
    _attach(segments, _volatile(messages, placed, ends) + _printed(reader, placed, ends, rendered))
    return Layout(segments, _moved(runs, placed, segments, ends))


def printed_dates(reader: PromptReader) -> frozenset[str]:
    """Return the dates and times that the template itself prints from the clock, as it does.

    A date that stands in the template as text is none of them: it does not change.
    """
    body: dict[str, Any] = {"messages": _PROBE}
    # A request's variables win over the environment's functions.
    timeless = {**body, "chat_template_kwargs": {"strftime_now": lambda _form: ""}}
    try:
        text, text_without = reader.render(body), reader.render(timeless)
    except TemplateRefusedError:
        return frozenset()
    values = (text[v.start_char : v.end_char] for v in find_volatile(text))
    return frozenset(value for value in values if value not in text_without)


def stable_end(segments: Sequence[Segment]) -> int:
    """Return the end of system, tools, knowledge and history, as far as nothing else is before it.

    What stands behind the current question, where a template prints it there, is no stable prefix.
    """
    end = 0
    for segment in segments:
        if segment.kind == "current":
            break
        end = segment.end_token
    return end


def stable_tokens(segments: Sequence[Segment], block_size: int) -> int:
    """Return the end of the last full block of system, tools, knowledge and history."""
    return stable_end(segments) // block_size * block_size


def _whole(prompt: Prompt) -> list[Segment]:
    return [Segment("current", 0, prompt.num_tokens)]


def _completion(body: Mapping[str, Any], prompt: Prompt) -> Layout:
    segments = _whole(prompt)
    text = body.get("prompt")
    if isinstance(text, str):
        segments[0].volatile += [
            Found(v.kind, v.start_char, v.end_char, v.text_hint, "prompt")
            for v in find_volatile(text)
        ]
    return Layout(segments)


def _segments(pieces: Sequence[tuple[int, SegmentKind]], ends: Sequence[int]) -> list[Segment]:
    """Turn consecutive pieces of text into spans of tokens; a token belongs where it ends.

    So what is stable never holds a token that unstable text has a part in.
    """
    segments: list[Segment] = []
    start = 0
    for k, (end_char, kind) in enumerate(pieces):
        end = len(ends) if k == len(pieces) - 1 else tokens_before(ends, end_char)
        if end <= start:
            continue
        if segments and segments[-1].kind == kind:
            segments[-1].end_token = end
        else:
            segments.append(Segment(kind, start, end))
        start = end
    return segments or [Segment("current", 0, len(ends))]


def _volatile(
    messages: Sequence[Any], placed: Sequence[Placed], ends: Sequence[int]
) -> list[Found]:
    """Find what changes in the messages' texts."""
    stretches: dict[int, list[Placed]] = {}
    for stretch in placed:
        stretches.setdefault(stretch.message, []).append(stretch)
    found = []
    for m, row in stretches.items():
        for v in find_volatile(message_text(messages[m])):
            token = _token_at(ends, _rendered_at(row, v.start_char))
            found.append(_found(v, token, "message", message=m))
    return found


def _printed(
    reader: PromptReader, placed: Sequence[Placed], ends: Sequence[int], rendered: str
) -> list[Found]:
    """Find what changes in what the template prints between the messages' texts."""
    if not placed:
        return []
    dates = printed_dates(reader)
    found = []
    done = 0
    for at, until in [*((s.at, s.until) for s in placed), (len(rendered), len(rendered))]:
        for v in find_volatile(rendered[done:at]):
            value = rendered[done + v.start_char : done + v.end_char]
            is_own = value in dates
            shifted = Volatile(v.kind, done + v.start_char, done + v.end_char, v.text_hint)
            token = _token_at(ends, shifted.start_char)
            source: Source = "template" if is_own else "prompt"
            found.append(_found(shifted, token, source, value=value if is_own else ""))
        done = max(done, until)
    return found[:MAX_SPANS]


def _found(
    v: Volatile, token: int, source: Source, *, message: int | None = None, value: str = ""
) -> Found:
    return Found(
        v.kind,
        v.start_char,
        v.end_char,
        v.text_hint,
        source,
        message,
        start_token=token,
        value=value,
    )


def _rendered_at(stretches: Sequence[Placed], char: int) -> int:
    """Return where a character of a message stands in the rendered prompt."""
    inside = [s for s in stretches if s.start <= char]
    stretch = inside[-1] if inside else stretches[0]
    return min(stretch.at + max(0, char - stretch.start), stretch.until)


def _token_at(ends: Sequence[int], char: int) -> int:
    """Return the token that holds a character."""
    return min(tokens_before(ends, char), max(0, len(ends) - 1))


def _attach(segments: Sequence[Segment], found: Sequence[Found]) -> None:
    starts = [segment.start_token for segment in segments]
    for span in sorted(found, key=lambda span: span.start_token):
        segments[max(0, bisect_right(starts, span.start_token) - 1)].volatile.append(span)


def _moved(
    runs: Sequence[Sequence[Run]],
    placed: Sequence[Placed],
    segments: Sequence[Segment],
    ends: Sequence[int],
) -> list[Moved]:
    """Count the tokens of recurring text behind changing text, by the segment it starts in."""
    starts = [segment.start_token for segment in segments]
    moved: list[Moved] = []
    for m, row in enumerate(runs):
        stretches = [stretch for stretch in placed if stretch.message == m]
        for run in row if stretches else ():
            if not run.is_moved or run.end_char - run.start_char < _MIN_MOVED_CHARS:
                continue
            first = _token_at(ends, _rendered_at(stretches, run.start_char))
            last = tokens_before(ends, _rendered_at(stretches, run.end_char))
            if last > first:
                kind = segments[max(0, bisect_right(starts, first) - 1)].kind
                moved.append(Moved(kind, first, last - first))
    return moved

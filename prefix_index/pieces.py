"""Which text of a rendered prompt is of which kind: messages' texts, and what surrounds them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefix_index.chat import TemplateRefusedError
from prefix_index.regions import current_from
from prefix_index.spans import (
    Placed,
    difference,
    headers,
    is_only_control,
    place,
    split_gap,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefix_index.prompts import PromptReader
    from prefix_index.regions import Label, SegmentKind


def find_pieces(
    reader: PromptReader, body: Mapping[str, Any], rendered: str, labels: Sequence[Sequence[Label]]
) -> tuple[list[Placed], list[tuple[int, SegmentKind]]]:
    """Return where the labelled texts stand, and (end, kind) of consecutive pieces of the prompt.

    Where marks do not survive the template, nothing is placed, and a message's end is where the
    prompt rendered up to it ends.

    Args:
        reader: Renders the request.
        body: The request; not changed.
        rendered: The prompt rendered from it.
        labels: Of each message's text (``labels_of``).
    """
    placed = _placed(reader, body, rendered, labels)
    if placed:
        return placed, _pieces(reader, body, rendered, labels, placed)
    return [], _pieces_by_prefix(reader, body, rendered, labels)


def _placed(
    reader: PromptReader, body: Mapping[str, Any], rendered: str, labels: Sequence[Sequence[Label]]
) -> list[Placed]:
    """Find the labelled stretches; none if not one message could be found."""
    exact = [[label.start for label in row] + [row[-1].end] if row else [] for row in labels]
    placed = place(reader.render, body, rendered, exact)
    if not placed:
        # Without marks inside: templates that take a message's text apart.
        outer = [[offsets[0], offsets[-1]] if offsets else [] for offsets in exact]
        placed = place(reader.render, body, rendered, outer)
    return placed


def _pieces(
    reader: PromptReader,
    body: Mapping[str, Any],
    rendered: str,
    labels: Sequence[Sequence[Label]],
    placed: Sequence[Placed],
) -> list[tuple[int, SegmentKind]]:
    """Return (end, kind) of consecutive pieces of the rendered text."""
    head = headers(reader.render)
    roles = [m.get("role") if isinstance(m, dict) else None for m in body["messages"]]
    inserts = _inserts(reader, body, rendered)
    pieces: list[tuple[int, SegmentKind]] = []
    done = 0
    before: Placed | None = None
    for stretch in placed:
        if stretch.at < done:
            continue  # printed inside another text
        kind = _kind_of(labels[stretch.message], stretch.start)
        if before is None or before.message != stretch.message:
            split = None
            if pieces and pieces[-1][1] != kind:
                split = _end_before(reader, body, rendered, stretch.message, done, stretch.at)
            if split is None:
                gap = rendered[done : stretch.at]
                split = done + split_gap(gap, head.get(str(roles[stretch.message])))
            last = pieces[-1][1] if pieces else _first_kind(kind, rendered, split, inserts)
            pieces += _overlaid(done, split, last, inserts)
            pieces += _overlaid(split, stretch.at, kind, inserts)
        elif stretch.at > done:
            pieces.append((stretch.at, pieces[-1][1]))
        pieces.append((stretch.until, kind))
        done = stretch.until
        before = stretch
    current = current_from(body["messages"])
    if before is not None and before.message < current:
        # The current messages have no text.
        split = _end_before(reader, body, rendered, current, done, len(rendered))
        if split is not None:
            pieces += _overlaid(done, split, pieces[-1][1], inserts)
            done = split
    return pieces + _overlaid(done, len(rendered), "current", inserts)


def _end_before(
    reader: PromptReader, body: Mapping[str, Any], rendered: str, message: int, low: int, high: int
) -> int | None:
    """Return where the prompt of the messages before one ends; None if not in this range."""
    part = {**body, "messages": body["messages"][:message], "add_generation_prompt": False}
    try:
        text = reader.render({**part, "continue_final_message": False})
    except TemplateRefusedError:
        return None
    return len(text) if low <= len(text) <= high and rendered.startswith(text) else None


def _first_kind(
    kind: SegmentKind, rendered: str, end: int, inserts: Sequence[tuple[int, int, SegmentKind]]
) -> SegmentKind:
    """Say what stands before the first message: a template's own instructions, or only marks."""
    own = rendered[:end]
    inside = [insert for insert in inserts if insert[0] < end]
    for start, stop, _ in reversed(inside):
        own = own[:start] + own[stop:]
    if not is_only_control(own):
        return "system"
    return inside[0][2] if inside else kind


def _kind_of(row: Sequence[Label], start: int) -> SegmentKind:
    at = bisect_right([label.start for label in row], start) - 1
    return row[max(at, 0)].kind


def _inserts(
    reader: PromptReader, body: Mapping[str, Any], rendered: str
) -> list[tuple[int, int, SegmentKind]]:
    """Find what the template prints for tools and documents: what is missing without them."""
    found: list[tuple[int, int, SegmentKind]] = []
    kinds: tuple[tuple[str, SegmentKind], ...] = (("documents", "knowledge"), ("tools", "tools"))
    for key, kind in kinds:
        if not body.get(key):
            continue
        try:
            without = reader.render(
                {k: v for k, v in body.items() if k not in (key, "tool_choice")}
            )
        except TemplateRefusedError:
            continue
        start, end = difference(rendered, without)
        if end > start:
            found.append((start, end, kind))
    return sorted(found)


def _overlaid(
    start: int, end: int, kind: SegmentKind, inserts: Sequence[tuple[int, int, SegmentKind]]
) -> list[tuple[int, SegmentKind]]:
    """Return the pieces of template text, with what is printed for tools and documents in it."""
    pieces: list[tuple[int, SegmentKind]] = []
    for begin, stop, other in inserts:
        begin, stop = max(begin, start), min(stop, end)
        if begin < stop:
            pieces += [(begin, kind), (stop, other)]
            start = stop
    return [*pieces, (end, kind)]


def _pieces_by_prefix(
    reader: PromptReader, body: Mapping[str, Any], rendered: str, labels: Sequence[Sequence[Label]]
) -> list[tuple[int, SegmentKind]]:
    """Find the ends of messages by rendering the conversation up to each; unknown ones are left."""
    kinds = [row[0].kind if row else None for row in labels]
    pieces: list[tuple[int, SegmentKind]] = []
    for m, (kind, following) in enumerate(pairwise(kinds)):
        if kind is None or kind == following:
            continue
        low = pieces[-1][0] + 1 if pieces else 0
        end = _end_before(reader, body, rendered, m + 1, low, len(rendered))
        if end is not None:
            pieces.append((end, kind))
    return [*pieces, (len(rendered), "current")]

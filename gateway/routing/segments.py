"""The parts of a request's prompt, as explain and the offload cap need them.

What recurs across conversations is remembered per pool; ``observe`` feeds that memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from prefix_index.chat import TemplateRefusedError
from prefix_index.regions import INSTRUCTION_ROLES, current_from
from prefix_index.segments import Hints, Layout, Segment, read_layout, stable_end
from prefix_index.spans import message_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.dispatch import Inbound, Plan
    from prefix_index.prompts import PromptReader

Scope: TypeAlias = Literal["knowledge", "history"]
"""Which stable boundary: behind what several conversations share, or behind this one's past."""

# Messages of one prompt that are remembered: examples stand first, and what is far behind them
# belongs to one conversation.
MAX_OBSERVED_MESSAGES = 32
# Conversation that shows how many pieces a template's last turn has.
_PROBE = [
    {"role": role, "content": content}
    for role, content in (("user", "qzx1"), ("assistant", "qzx2"), ("user", "qzx3"))
]


@dataclass(frozen=True, slots=True)
class Shape:
    """How many pieces a template's prompts have where.

    Attributes:
        num_tail: In the last turn, with what the template prints behind it.
        num_each: In one more message, at most.
        num_head: Up to the end of the first instructions; 0 where they do not lead the prompt.
    """

    num_tail: int
    num_each: int
    num_head: int


_shapes: WeakKeyDictionary[PromptReader, Shape] = WeakKeyDictionary()


def observe(plan: Plan) -> None:
    """Remember which text a request had, by hash; once per request, when it is over.

    About 1 us per message that is known where it stands, 15 us per KB of new text.
    """
    texts = _texts(plan.inbound)
    if texts:
        plan.pool.recurrence.observe(_owner(plan.inbound), texts[:MAX_OBSERVED_MESSAGES])


def layout_of(plan: Plan) -> Layout:
    """Find the segments of a plan's prompt; none for a prompt that could not be read.

    Not for the hot path, see ``read_layout``. Changes nothing.
    """
    return layout_reader(plan)()


def layout_reader(plan: Plan) -> Callable[[], Layout]:
    """Return what finds the segments of a plan's prompt; it may be called in any thread.

    What the pool remembers of recurring text is read now, on the event loop.
    """
    reader, prompt, inbound = plan.pool.reader, plan.prompt, plan.inbound
    if prompt is None or reader is None:
        return lambda: Layout([])
    if inbound.surface != "chat":
        body = _without_messages(inbound.body)
        return partial(read_layout, reader, body, Hints(), prompt)
    texts = _texts(inbound)
    memory, owner = plan.pool.recurrence, _owner(inbound)
    return partial(
        read_layout,
        reader,
        inbound.body,
        hints_of(inbound),
        prompt,
        memory.recurring(owner, texts),
        memory.shared_messages(owner, texts),
    )


def segments(plan: Plan) -> list[Segment]:
    """Return the segments of a plan's prompt; see ``layout_of``."""
    return layout_of(plan).segments


_NO_HINTS = Hints()


def hints_of(inbound: Inbound) -> Hints:
    """Read what a request says about its documents; most say nothing, which is quickly told."""
    ours = inbound.body.get("warmlane")
    if ours is None and "x-document-id" not in inbound.headers:
        return _NO_HINTS
    documents = ours.get("documents") if isinstance(ours, dict) else None
    documents = documents if isinstance(documents, list) else []
    chunks = [
        chunk
        for document in documents
        if isinstance(document, dict) and isinstance(document.get("chunks"), list)
        for chunk in document["chunks"]
        if isinstance(chunk, str)
    ]
    has_documents = bool(documents or inbound.headers.get("x-document-id", "").strip())
    return Hints(tuple(chunks), has_documents)


def quick_stable_tokens(plan: Plan, scope: Scope = "history") -> int:
    """Return a lower bound of the stable tokens for the hot path, without rendering.

    About 2 us; with the scope ``history`` also 0.4 us per KB of the current turn.

    It is the end of the last full block before the current turn's messages, or with the scope
    ``knowledge`` of the instructions that lead the prompt. What the exact one adds is knowledge in
    user messages, and whatever imitated control tokens made uncertain.
    """
    reader, prompt = plan.pool.reader, plan.prompt
    messages = plan.inbound.body.get("messages")
    if reader is None or prompt is None or plan.inbound.surface != "chat":
        return 0
    if not isinstance(messages, list) or not messages:
        return 0
    pieces, shape = prompt.pieces, _shape(reader)
    if scope == "knowledge":
        num_head = _num_head(shape, messages)
        # Behind it something must follow, or the template had no piece for the instructions.
        end = sum(map(len, pieces[:num_head])) if num_head < len(pieces) else 0
    else:
        num_tail = _num_tail(reader, shape, messages)
        is_all = not num_tail or num_tail >= len(pieces)
        end = 0 if is_all else prompt.num_tokens - sum(map(len, pieces[-num_tail:]))
    return max(0, end) // prompt.block_size * prompt.block_size


def estimated_stable_tokens(plan: Plan, scope: Scope = "history") -> int:
    """Estimate the stable tokens of a prompt whose tokens are not there, by its share of text."""
    messages = plan.inbound.body.get("messages")
    if plan.inbound.surface != "chat" or not isinstance(messages, list) or not messages:
        return 0
    sizes = [len(message_text(message)) for message in messages]
    num_stable = _num_instructions(messages) if scope == "knowledge" else current_from(messages)
    tokens = plan.num_tokens * sum(sizes[:num_stable]) // max(1, sum(sizes))
    return tokens // plan.pool.block_size * plan.pool.block_size


def _num_tail(reader: PromptReader, shape: Shape, messages: list[Any]) -> int:
    """Return how many pieces the current turn has at most; 0 if that cannot be told."""
    if not shape.num_tail:
        return 0
    current = messages[current_from(messages) :]
    num_pieces = shape.num_tail + (len(current) - 1) * shape.num_each
    return num_pieces + sum(_num_cuts(reader, message) for message in current)


def _num_head(shape: Shape, messages: list[Any]) -> int:
    """Return how many pieces the first instructions have at least; 0 if that cannot be told."""
    first = messages[0]
    if not shape.num_head or not isinstance(first, dict) or first.get("role") != "system":
        return 0
    # Text that imitates a cut makes more pieces, so that these end sooner. Without any text a
    # template may print nothing for the message.
    text = message_text(first)
    return shape.num_head if text and not text.isspace() else 0


def _num_instructions(messages: list[Any]) -> int:
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in INSTRUCTION_ROLES:
            return number
    return len(messages)


def _num_cuts(reader: PromptReader, message: object) -> int:
    text = message_text(message)
    return sum(text.count(cut.decode()) for cut in reader._cuts)


def _shape(reader: PromptReader) -> Shape:
    known = _shapes.get(reader)
    if known is None:
        try:
            known = Shape(*_read_tail(reader), _read_head(reader))
        except Exception:  # templates raise what they like, and a request is waiting
            known = Shape(0, 0, 0)
        _shapes[reader] = known
    return known


def _read_tail(reader: PromptReader) -> tuple[int, int]:
    body: dict[str, Any] = {"messages": _PROBE}
    try:
        prompt = reader.chat(body).complete()
    except TemplateRefusedError:
        return 0, 0
    end = stable_end(read_layout(reader, body, Hints(), prompt).segments)
    num_before = sum(piece_end <= end for piece_end in prompt.segment_ends)
    num_all = len(prompt.segment_ends)
    return num_all - num_before, num_all


def _read_head(reader: PromptReader) -> int:
    """Return how many pieces end with the instructions, the last one exactly where they do."""
    body: dict[str, Any] = {"messages": [{"role": "system", "content": "qzx0"}, *_PROBE]}
    try:
        prompt = reader.chat(body).complete()
    except TemplateRefusedError:
        return 0
    segments = read_layout(reader, body, Hints(), prompt).segments
    if segments[0].kind != "system":
        return 0
    return sum(end <= segments[0].end_token for end in prompt.segment_ends)


def _owner(inbound: Inbound) -> str:
    """Return whose text it is: tenants and salts never meet."""
    return f"{len(inbound.tenant)}:{inbound.tenant}|{inbound.cache_salt}"


def _texts(inbound: Inbound) -> list[tuple[str, str]]:
    messages = inbound.body.get("messages")
    if inbound.surface != "chat" or not isinstance(messages, list):
        return []
    return [(str(m.get("role")) if isinstance(m, dict) else "", message_text(m)) for m in messages]


def _without_messages(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "messages"}

"""Where the text of each message stands in the rendered prompt, and in its tokens.

Found by rendering the request a second time with marks inside its texts: whatever user text
imitates, only the marks are looked for, and what they show counts only if the prompt without them
is the true prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefix_index.chat import TemplateRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prefix_index.prompts import Prompt, PromptReader

# Keys under which content parts have text, as ``prefix_index.messages`` reads them.
_TEXT_KEYS = ("text", "refusal", "thinking")
# What looks like a control token in text that a template printed: ``<|im_end|>``, ``<eos>``,
# ``</s>``, ``[INST]``, and DeepSeek's wide bars.
_CONTROL = re.compile(r"<[|\uff5c]?/?[^<>\s]{1,40}[|\uff5c]?>|\[/?[A-Z_]{2,24}\]")
_PROBES = ("qzx1", "qzx2", "qzx3")


@dataclass(frozen=True, slots=True)
class Placed:
    """A stretch of one message's text in the rendered prompt.

    Attributes:
        message: Index of the message.
        start: First character in the message's text.
        end: One behind the last.
        at: Where it starts in the rendered prompt.
        until: Where it ends there; the text between may be another form (JSON escapes).
    """

    message: int
    start: int
    end: int
    at: int
    until: int


def text_parts(content: object) -> list[str]:
    """Return the texts of a message's content; a message's text is these, joined by newlines."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    parts = []
    for part in content:
        text = part if isinstance(part, str) else _part_text(part)[1]
        if text is not None:
            parts.append(text)
    return parts


def message_text(message: object) -> str:
    """Return the text of a message: what offsets of segments and volatile spans refer to."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else "\n".join(text_parts(content))


def place(
    render: Callable[[Mapping[str, Any]], str],
    body: Mapping[str, Any],
    rendered: str,
    cuts: Sequence[Sequence[int]],
) -> list[Placed]:
    """Find stretches of the messages' texts in the rendered prompt, in its order.

    Args:
        render: Renders a request body.
        body: The request; not changed.
        rendered: The prompt rendered from it.
        cuts: Per message, the offsets in its text between which the stretches are; none or one for
            a message that is not looked for.

    Returns:
        The stretches whose both ends are found. None at all where marks change the prompt, as for
        templates that look at what a text starts with.
    """
    mark = _unused_mark(rendered)
    messages: list[Any] = list(body["messages"])
    places: list[tuple[int, int]] = []
    for m, offsets in enumerate(cuts):
        if len(offsets) < 2:
            continue
        first = len(places)
        places += [(m, offset) for offset in offsets]
        messages[m] = _marked(messages[m], offsets, mark, first)
    if not places:
        return []
    try:
        marked = render({**body, "messages": messages})
    except TemplateRefusedError:
        return []
    found = _read_marks(marked, rendered, mark)
    stretches = [
        Placed(m, start, end, found[k], found[k + 1])
        for k, ((m, start), (n, end)) in enumerate(pairwise(places))
        if m == n and k in found and k + 1 in found and found[k] <= found[k + 1]
    ]
    stretches.sort(key=lambda placed: (placed.at, placed.until))
    return stretches


def difference(rendered: str, other: str) -> tuple[int, int]:
    """Return the middle of a text that another one, equal before and behind it, lacks.

    Of several such middles the first: ``<turn>a</turn>`` and not ``a</turn><turn>``.
    """
    start = _num_equal(rendered, other)
    end = len(rendered) - _num_equal(rendered[start:][::-1], other[start:][::-1])
    while 0 < start < end and rendered[start - 1] == rendered[end - 1]:
        start, end = start - 1, end - 1
    return start, end


def headers(render: Callable[[Mapping[str, Any]], str]) -> dict[str, str]:
    """Return role -> what a template prints before such a message, as far as a probe shows it."""
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": probe} for role, probe in zip(roles, _PROBES, strict=True)
    ]
    try:
        pieces = re.split("|".join(_PROBES), render({"messages": messages}))
    except TemplateRefusedError:
        return {}
    if len(pieces) != len(_PROBES) + 1:
        return {}
    return {role: gap[_header_at(gap) :] for role, gap in zip(roles[1:], pieces[1:3], strict=True)}


def split_gap(gap: str, header: str | None) -> int:
    """Return where the next message starts in what stands between the texts of two messages."""
    # Not at the end only: some templates print tools between a message's header and its text.
    at = gap.rfind(header) if header else -1
    return at if at >= 0 else _header_at(gap)


def is_only_control(text: str) -> bool:
    """Whether a text is nothing but control tokens and blanks."""
    return not _CONTROL.sub("", text).strip()


def token_ends(reader: PromptReader, rendered: str, prompt: Prompt) -> list[int] | None:
    """Return the end of each token of a prompt, in characters of the rendered text. O(text).

    Tokenizes all of it anew: about 1 ms per 1,000 tokens, without the GIL. None if these are not
    the prompt's tokens.
    """
    encoder = reader._tokenizer._tokenizer
    ids = list(prompt.token_ids)
    for add_special_tokens in (False, True):
        # The batch call is the one that releases the GIL and knows offsets.
        encoding = encoder.encode_batch([rendered], add_special_tokens=add_special_tokens)[0]
        if encoding.ids == ids:
            return [end for _, end in encoding.offsets]
    return None


def tokens_before(ends: Sequence[int], char: int) -> int:
    """Return how many tokens end at or before a character: those that what follows cannot touch."""
    return bisect_right(ends, char)


def _num_equal(one: str, other: str) -> int:
    """Return how many leading characters two texts have in common, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _header_at(gap: str) -> int:
    """Guess where a message starts: at the second control token, behind the end of a turn."""
    controls = list(_CONTROL.finditer(gap))
    if not controls:
        return 0
    return controls[min(1, len(controls) - 1)].start()


def _part_text(part: object) -> tuple[str, str | None]:
    if isinstance(part, dict):
        for key in _TEXT_KEYS:
            if isinstance(part.get(key), str):
                return key, part[key]
    return "", None


def _unused_mark(rendered: str) -> str:
    """Return letters that the prompt does not contain; nobody can write them into it beforehand."""
    attempt = 0
    while True:
        seed = f"{attempt}{rendered}".encode("utf-8", "surrogatepass")
        mark = "wl" + blake2b(seed, digest_size=8).hexdigest() + "x"
        if mark not in rendered:
            return mark
        attempt += 1


def _marked(message: Mapping[str, Any], offsets: Sequence[int], mark: str, first: int) -> Any:
    """Return a message with marks first, first + 1, ... at these offsets of its text."""
    content = message.get("content")
    marks = [(offset, f"{mark}{first + k}y") for k, offset in enumerate(offsets)]
    if isinstance(content, str):
        return {**message, "content": _inserted(content, marks, 0)}
    parts: list[Any] = []
    at = 0
    for part in content if isinstance(content, list) else ():
        key, text = ("", part) if isinstance(part, str) else _part_text(part)
        if text is None:
            parts.append(part)
            continue
        inside = [pair for pair in marks if pair[0] <= at + len(text)]
        marks = marks[len(inside) :]
        text = _inserted(text, inside, at)
        parts.append({**part, key: text} if key else text)
        at += len(text) - sum(len(m) for _, m in inside) + 1
    return {**message, "content": parts}


def _inserted(text: str, marks: Sequence[tuple[int, str]], at: int) -> str:
    pieces = []
    done = 0
    for offset, mark in marks:
        # Between two parts is the start of the second.
        offset = max(offset - at, 0)
        pieces += [text[done:offset], mark]
        done = offset
    return "".join([*pieces, text[done:]])


def _read_marks(marked: str, rendered: str, mark: str) -> dict[int, int]:
    """Return mark -> its place in the prompt without marks; empty if that is another prompt."""
    pattern = re.compile(re.escape(mark) + r"(\d{1,9})y")
    found: dict[int, int] = {}
    doubled: set[int] = set()
    pieces = []
    done = length = 0
    for match in pattern.finditer(marked):
        pieces.append(marked[done : match.start()])
        length += match.start() - done
        done = match.end()
        number = int(match[1])
        if number in found:
            doubled.add(number)
        found[number] = length
    pieces.append(marked[done:])
    if "".join(pieces) != rendered:
        return {}
    return {number: at for number, at in found.items() if number not in doubled}

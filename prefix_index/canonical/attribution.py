"""Rule ``attribution-header``: lift the per-request billing line of a coding agent.

The line is taken only in the exact form that the agent writes and only where it puts it: as the
first text part, or the first line, of a conversation that begins with its system text. The same
line quoted anywhere else is somebody's text.

Source: Claude Code 2.1 (reports in vllm-project/vllm#36829, anthropics/claude-code#68900).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from prefix_index.canonical.spans import Edit, elements, locate
from prefix_index.canonical.system import Path, literal, literal_lines, system_texts

if TYPE_CHECKING:
    from collections.abc import Mapping

# ``x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch=1a2b3;``
_LINE = re.compile(
    r"x-anthropic-billing-header: cc_version=[\w.+-]+;(?: (?:cc_[a-z_]+|cch)=[^;\s]*;)* ?\r?"
)
_PART_KEYS = frozenset(("type", "text"))


def is_attribution_line(line: str) -> bool:
    """Say whether a line, without its newline, is a billing line and nothing else."""
    return _LINE.fullmatch(line) is not None


def lift_attribution(body: Mapping[str, Any], raw: bytes) -> Edit | None:
    """Return the edit that takes the billing line out; None when there is none in its place.

    A second such line behind the first is no form that an agent writes: nothing is changed then.
    """
    texts = system_texts(body)
    first = next(texts, None)
    if first is None or first.path not in _PLACES:
        return None
    line, _, rest = first.text.partition("\n")
    if not is_attribution_line(line):
        return None
    if not rest.strip():
        following = next(texts, None)
        if following is not None and is_attribution_line(following.text.partition("\n")[0]):
            return None
        return _lift_part(body, raw, first.path) or _lift_all(raw, first.path)
    if is_attribution_line(rest.partition("\n")[0]):
        return None
    inside = literal(raw, first.path)
    lines = literal_lines(raw[inside.start : inside.end])
    return Edit(inside.start, inside.end, rb"\n".join(lines[1:]))


# Where agents put it: the only text, a part that is text, the text of a part.
_PLACES: tuple[Path, ...] = (
    ("messages", 0, "content"),
    ("messages", 0, "content", 0),
    ("messages", 0, "content", 0, "text"),
)


def _lift_part(body: Mapping[str, Any], raw: bytes, path: Path) -> Edit | None:
    """Take the whole part out, where another one follows and nothing else hangs on it."""
    content = body["messages"][0]["content"]
    if len(path) < len(("messages", 0, "content", 0)) or len(content) < 2:
        return None
    if isinstance(content[0], dict) and not content[0].keys() <= _PART_KEYS:
        return None
    parts = elements(raw, locate(raw, ("messages", 0, "content")).start)
    # With the comma and the white space up to the next part.
    return Edit(next(parts).start, next(parts).start, b"")


def _lift_all(raw: bytes, path: Path) -> Edit:
    """Leave an empty text, so that the message keeps its shape."""
    inside = literal(raw, path)
    return Edit(inside.start, inside.end, b"")

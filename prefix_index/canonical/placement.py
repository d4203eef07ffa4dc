"""Where a chat template puts the system text: the condition for moving lines inside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Letters only, so that no template trims, escapes or splits them.
_MARKS = ("Qsystemq", "Quserq", "Qassistantq", "Qlatersystemq", "Qlastuserq")


def keeps_system_first(render: Callable[[Sequence[dict[str, Any]]], str]) -> bool:
    """Say whether a template prints the system text first and apart from the user's.

    Templates that merge it into a user turn, print it behind one, or hoist a later system message
    into it would put moved lines somewhere else than the sender sees them.

    Args:
        render: Messages -> prompt text; may raise, as templates do.
    """
    system, user, assistant, later, last = _MARKS
    head = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    turn = {"role": "assistant", "content": assistant}
    end = {"role": "user", "content": last}
    text = _render(render, [*head, turn, end])
    places = [text.find(mark) for mark in (system, user, assistant, last)]
    if -1 in places or places != sorted(places):
        return False
    # Templates that keep them apart print a mark of their own in between.
    if not text[places[0] + len(system) : places[1]].strip():
        return False
    text = _render(render, [*head, turn, {"role": "system", "content": later}, end])
    # A template that refuses or drops a later system message cannot hoist it.
    return later not in text or text.find(later) > text.find(assistant)


def _render(
    render: Callable[[Sequence[dict[str, Any]]], str], messages: Sequence[dict[str, Any]]
) -> str:
    try:
        return render(messages)
    except Exception:
        # Whatever a template raises: what it does not print is not known.
        return ""

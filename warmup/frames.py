"""From a frame and a document to the body that the application would send.

Pure. Placeholders are replaced in one pass over the frame's own text, so that nothing inside a
document is ever taken for one; all other characters stay as they are.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmup.manifest import Frame

# Stands where the user's question will: NUL is in no text document, so it is found again.
MARKER = "\x00question\x00"


class FrameError(ValueError):
    """The frame has no clear place for document and question; the message says why."""


def count_places(frame: Frame) -> None:
    """Check that document and question each have one place, the document first.

    Raises:
        FrameError: If not.
    """
    names = {frame.placeholders.document: "document", frame.placeholders.question: "question"}
    found = [
        names[match.group()]
        for text in _texts(_content(frame))
        for match in _pattern(frame).finditer(text)
    ]
    for placeholder, name in names.items():
        if found.count(name) != 1:
            raise FrameError(
                f"expected {placeholder} once in system, messages or prompt, found it "
                f"{found.count(name)} times (placeholders.{name} gives it another spelling)"
            )
    if found[0] == "question":
        raise FrameError(
            "the question stands before the document: no two questions would share the document"
        )
    if any("\x00" in text for text in _texts(_content(frame))):
        raise FrameError("expected text without NUL characters")


def to_json(value: object) -> bytes:
    """Return ``value`` as JSON in UTF-8, integers of any length included.

    Raises:
        ValueError: If it holds something that JSON has no spelling for: infinity, half a character.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def body_of(frame: Frame, model: str, document: str, question: str = MARKER) -> dict[str, Any]:
    """Return the request body around one document.

    Args:
        frame: The application's request.
        model: Name clients ask for.
        document: Its text, put in as it is.
        question: The user's text.
    """
    values = {frame.placeholders.document: document, frame.placeholders.question: question}
    pattern = _pattern(frame)

    def fill(text: str) -> str:
        # A function, since a replacement text would have its backslashes read.
        return pattern.sub(lambda match: values[match.group()], text)

    body: dict[str, Any] = {"model": model, **_mapped(_content(frame), fill)}
    if frame.tools is not None:
        body["tools"] = frame.tools
    if frame.chat_template_kwargs is not None:
        body["chat_template_kwargs"] = frame.chat_template_kwargs
    return {**body, **frame.body}


def _content(frame: Frame) -> dict[str, Any]:
    """Return the fields that may hold placeholders, in the order templates print them."""
    if frame.prompt is not None:
        return {"prompt": frame.prompt}
    first = [] if frame.system is None else [{"role": "system", "content": frame.system}]
    return {"messages": [*first, *(frame.messages or [])]}


def _pattern(frame: Frame) -> re.Pattern[str]:
    places = frame.placeholders
    return re.compile(f"{re.escape(places.document)}|{re.escape(places.question)}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, dict):
        return {key: _mapped(item, fill) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, fill) for item in value]
    return value

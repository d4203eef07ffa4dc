"""The fields of a ``multipart/form-data`` body: which model it names, and how some are taken out.

The body is searched from delimiter to delimiter; no part of it is copied, however large its files,
and between slices of it others get their turn.
Parsers differ in what they forgive, and what one of them takes for a field another may not see. So
a form that can be read in two ways is refused: then engines find the very fields that were found
here.

Source: RFC 7578 (form data), RFC 2046, 5.1.1 (delimiters).
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

FORM = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_BOUNDARIES = re.compile(r"boundary[*0-9]*[ \t]*=", re.IGNORECASE)
# One header a line, nothing folded, and no control that some take for the end of a line.
_HEAD = re.compile(rb"(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\x00-\x08\x0a-\x1f]*)+")
_DISPOSITION = re.compile(rb"\r\ncontent-disposition:([^\r]*)", re.IGNORECASE)
# Its parameters, each closed: whether a quote within quotes ends them depends on the parser.
_PARAMETER = rb""";[ \t]*([\w*-]+)=("(?:[^"\\]|\\[^"])*"|[^\s;"\\=,]+)[ \t]*"""
_PARAMETERS = re.compile(_PARAMETER)
_FORM_DATA = re.compile(rb"[ \t]*form-data[ \t]*(?:" + _PARAMETER + rb")+", re.IGNORECASE)
# Wherever else a parser could begin to read a name, inside of quotes too.
_NAMES = re.compile(rb"[;\s\"]name[*0-9]*[ \t]*=", re.IGNORECASE)
# Of characters that no parser takes for escaped or encoded.
_NAME = re.compile(rb"[\w.$@:/\[\]-]{1,200}")
# A part's headers are a disposition and a type.
_MAX_HEAD_BYTES = 4096
# Forms have a dozen fields; each costs a search.
MAX_PARTS = 256
MAX_MODEL_BYTES = 512
# What may stand behind the end: ends of lines.
_MAX_REST_BYTES = 16
# Searched at once: 0.1 ms for sound, 2 ms where the file is made to be slow (measured 2026-12).
SLICE_BYTES = 256 << 10


class Part(NamedTuple):
    """A part of a form: its name, where its delimiter and its value begin, where the value ends."""

    name: str
    at: int
    start: int
    end: int


class Field(NamedTuple):
    """A field's text and where it stands in the body."""

    value: str
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """Return what separates the parts of a body.

    Raises:
        InvalidRequest: If the header does not say, or says it twice.
    """
    match = _BOUNDARY.search(content_type)
    if match is None or len(_BOUNDARIES.findall(content_type)) != 1:
        raise _bad("multipart/form-data: expected one boundary.")
    return (match[1] or match[2]).encode("latin-1", "replace")


async def parts_of(body: bytes, content_type: str) -> list[Part]:
    """Return the parts of a form, in order.

    Raises:
        InvalidRequest: If the body is no form, or one that can be read in two ways.
    """
    mark = b"--" + boundary_of(content_type)
    at = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(mark, at):
        raise _bad("The body does not begin with its boundary.")
    parts: list[Part] = []
    while not body.startswith(b"--", at + len(mark)):
        if len(parts) == MAX_PARTS:
            raise _bad(f"The form has more than {MAX_PARTS} parts.")
        parts.append(await _part(body, at, mark))
        at = parts[-1].end + 2
    end = at + len(mark) + 2
    if len(body) - end > _MAX_REST_BYTES or body[end:].strip(b"\r\n"):
        raise _bad("The form goes on behind its end.")
    return parts


def model_of(body: bytes, parts: Iterable[Part]) -> Field:
    """Return the one field ``model`` of a form, of which these are all parts.

    Raises:
        InvalidRequest: If there is none or several.
    """
    found = [part for part in parts if part.name == "model"]
    if not found:
        raise InvalidRequest("'model' is required in the form.", param="model")
    if len(found) > 1:
        raise InvalidRequest("'model' stands twice in the form.", param="model")
    return _field(body, found[0].start, found[0].end)


def with_model(body: bytes, field: Field, model: str) -> bytes:
    """Return the form with another model; all other bytes stay."""
    view = memoryview(body)  # slices would be copies
    return b"".join((view[: field.start], model.encode(), view[field.end :]))


def with_parts(body: bytes, changes: Iterable[tuple[Part, bytes | None]]) -> bytes:
    """Return the form with other values of some parts, in their order; without those of None."""
    view = memoryview(body)  # slices would be copies
    pieces: list[bytes | memoryview] = []
    at = 0
    for part, value in changes:
        if value is None:
            # The delimiter that follows now separates from what stands before.
            pieces.append(view[at : part.at])
            at = part.end + 2
        else:
            pieces += (view[at : part.start], value)
            at = part.end
    return b"".join((*pieces, view[at:]))


async def _part(body: bytes, at: int, mark: bytes) -> Part:
    """Return the part whose delimiter stands at ``at``."""
    head_at = at + len(mark)
    head_end = body.find(b"\r\n\r\n", head_at, head_at + _MAX_HEAD_BYTES)
    head = body[head_at:head_end] if head_end >= 0 else b""
    name = _name(head) if _HEAD.fullmatch(head) else b""
    if not name:
        raise _bad("Each part of the form needs one plain name.")
    start = head_end + 4
    return Part(name.decode(), at, start, await _end(body, start, mark))


def _name(head: bytes) -> bytes:
    """Return the one name in a part's headers; empty if it is not sure that it is read alike."""
    dispositions = _DISPOSITION.findall(head)
    if len(dispositions) != 1 or not _FORM_DATA.fullmatch(dispositions[0]):
        return b""
    if len(_NAMES.findall(dispositions[0])) != 1:
        return b""
    found = [value for key, value in _PARAMETERS.findall(dispositions[0]) if key.lower() == b"name"]
    name = found[0].strip(b'"') if found else b""
    return name if _NAME.fullmatch(name) else b""


async def _end(body: bytes, start: int, mark: bytes) -> int:
    """Return where the value ends that begins at ``start``."""
    found = start
    for _ in range(MAX_PARTS):
        at = await _find(body, mark, found)
        if at < 0:
            raise _bad("The body breaks off inside a part.")
        before = body[at - 2 : at]
        if before == b"\r\n" and at - 2 >= start:
            return at - 2
        if before.endswith((b"\r", b"\n")):
            break  # some parsers end the part here
        found = at + len(mark)
    raise _bad("The boundary stands inside a part.")


async def _find(body: bytes, mark: bytes, start: int) -> int:
    """Return where ``mark`` stands first from ``start`` on, -1 if nowhere."""
    while True:
        end = start + SLICE_BYTES
        # One that begins in this slice may end in the next.
        at = body.find(mark, start, end + len(mark) - 1)
        if at >= 0 or end >= len(body):
            return at
        start = end
        await asyncio.sleep(0)


def _field(body: bytes, start: int, end: int) -> Field:
    if end - start > MAX_MODEL_BYTES:
        raise InvalidRequest("'model' is too long for a name.", param="model")
    try:
        value = body[start:end].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("'model' is not text in UTF-8.", param="model") from error
    if not value:
        raise InvalidRequest("'model' is required in the form.", param="model")
    return Field(value, start, end)


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="bad_multipart")

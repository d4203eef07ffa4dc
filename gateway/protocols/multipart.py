"""The model that a ``multipart/form-data`` body names. Pure.

The body is searched from delimiter to delimiter; no part of it is copied, however large its files.

Source: RFC 7578 (form data), RFC 2046, 5.1.1 (delimiters).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.errors import InvalidRequest

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(
    rb'^content-disposition:[^\n]*?;[ \t]*name="?model"?[ \t]*(?:;|$)', re.IGNORECASE | re.MULTILINE
)
# A part's headers are a disposition and a type.
_MAX_HEAD_BYTES = 4096
# Forms have a dozen fields; each costs a search.
MAX_PARTS = 256
MAX_MODEL_BYTES = 512


class Field(NamedTuple):
    """A field's text and where it stands in the body."""

    value: str
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """Return what separates the parts of a body.

    Raises:
        InvalidRequest: If the header does not say.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise InvalidRequest("multipart/form-data: expected a boundary.", code="bad_multipart")
    return (match[1] or match[2]).encode("latin-1", "replace")


def model_of(body: bytes, content_type: str) -> Field:
    """Return the one field ``model`` of a form.

    Raises:
        InvalidRequest: If there is none or several, or the body is no form.
    """
    delimiter = b"--" + boundary_of(content_type)
    if not body.startswith(delimiter) and b"\r\n" + delimiter not in body[:_MAX_HEAD_BYTES]:
        raise InvalidRequest("The body does not begin with its boundary.", code="bad_multipart")
    at = body.find(delimiter)
    delimiter = b"\r\n" + delimiter
    found: Field | None = None
    for _ in range(MAX_PARTS):
        at = body.find(b"\r\n", at + len(delimiter) - 2)
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES) if at >= 0 else -1
        if head_end < 0:
            break
        start, end = head_end + 4, body.find(delimiter, head_end + 2)
        if end < 0:
            raise InvalidRequest("The body breaks off inside a part.", code="bad_multipart")
        if _NAME.search(body[at:head_end].replace(b"\r\n", b"\n")):
            if found is not None:
                raise InvalidRequest("'model' stands twice in the form.", param="model")
            found = _field(body, start, end)
        if body.startswith(b"--", end + len(delimiter)):
            break
        at = end
    else:
        raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.", code="bad_multipart")
    if found is None:
        raise InvalidRequest("'model' is required in the form.", param="model")
    return found


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


def with_model(body: bytes, field: Field, model: str) -> bytes:
    """Return the form with another model; all other bytes stay."""
    return body[: field.start] + model.encode() + body[field.end :]

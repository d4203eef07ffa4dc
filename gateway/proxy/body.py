"""Read a client's request body within limits, and check the few fields that routing needs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import orjson
from aiohttp import web

from gateway.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedEncoding

if TYPE_CHECKING:
    from gateway.proxy.limits import Limits

Surface = Literal["chat", "completions"]


def check_length(request: web.Request, limits: Limits) -> None:
    """Refuse a body that is announced as too long, before any of it is read.

    Raises:
        BodyTooLarge: If ``content-length`` exceeds the limit.
    """
    length = request.content_length
    if length is not None and length > limits.body_bytes:
        raise BodyTooLarge(f"The body is {length} bytes, the limit is {limits.body_bytes}.")


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """Return the whole body.

    Raises:
        InvalidRequest: If it is too long, compressed, broken or does not come in time.
    """
    check_length(request, limits)
    encoding = request.headers.get("content-encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"Bodies with content-encoding {encoding!r} are not accepted; send it uncompressed."
        )
    content = request.content
    # Most bodies came together with their head: no waiting, no timer, no copy.
    if content.is_eof() and content.exception() is None:
        body = content.read_nowait()
        if len(body) > limits.body_bytes:
            raise BodyTooLarge(f"The body is longer than the limit of {limits.body_bytes} bytes.")
        return body
    try:
        async with asyncio.timeout(limits.body_s):
            return await _read_pieces(request, limits.body_bytes)
    except TimeoutError as error:
        raise BodyTimeout(f"The body did not arrive within {limits.body_s:g} s.") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("The framing of the body is broken.", code="bad_framing") from error


async def _read_pieces(request: web.Request, max_bytes: int) -> bytes:
    pieces, size = [], 0
    while piece := await request.content.readany():
        size += len(piece)
        if size > max_bytes:
            raise BodyTooLarge(f"The body is longer than the limit of {max_bytes} bytes.")
        pieces.append(piece)
    return b"".join(pieces)


def parse_body(body: bytes, surface: Surface) -> dict[str, Any]:
    """Return the parsed body; everything but these checks is the engine's business.

    Raises:
        InvalidRequest: If it is not a JSON object with a model and something to complete.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json"
        ) from error
    if not isinstance(document, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("'model' is required and must be a string.", param="model")
    if surface == "chat" and not isinstance(document.get("messages"), list):
        raise InvalidRequest("'messages' is required and must be a list.", param="messages")
    if surface == "completions" and not isinstance(document.get("prompt"), str | list):
        raise InvalidRequest(
            "'prompt' is required and must be text or a list of token ids or of prompts.",
            param="prompt",
        )
    return document

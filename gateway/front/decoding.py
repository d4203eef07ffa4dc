"""Undo content codings: of clients' bodies here, of workers' answers in ``proxy/encoding.py``.

What comes out is bounded while it comes out, so a few bytes can never become many.

Source: RFC 9110, 8.4.1 (codings); RFC 1950 and 1952 (zlib, gzip); RFC 7932 (brotli).
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import brotli

from gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

# zlib's window bits: 16 more expects a gzip header, none more a zlib header, as deflate has.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": 15}
# Bodies up to this size are decompressed at once: they become 4 MB at the most, within 10 ms.
# Larger ones go to a thread, since zlib and brotli let the event loop run meanwhile.
MAX_INLINE_BYTES = 4 << 10


class DecodeError(Exception):
    """The data is not in that coding, or not all of it."""


class TooLargeError(DecodeError):
    """The data becomes larger than allowed."""


class Decoder:
    """Undoes one coding, piece by piece.

    Args:
        coding: One that ``can`` knows.
        max_bytes: Limit on what comes out in all.
    """

    __slots__ = ("_brotli", "_left_bytes", "_zlib")

    def __init__(self, coding: str, max_bytes: int) -> None:
        self._left_bytes = max_bytes
        # One of the two is there.
        self._brotli: Any = brotli.Decompressor() if coding == "br" else None
        self._zlib: Any = None if coding == "br" else zlib.decompressobj(_WINDOW_BITS[coding])

    @staticmethod
    def can(coding: str) -> bool:
        """Whether ``coding`` (in lower case) is one this class undoes."""
        return coding == "br" or coding in _WINDOW_BITS

    def feed(self, data: bytes) -> bytes:
        """Return what ``data`` adds.

        Raises:
            TooLargeError: If it becomes more than allowed.
            DecodeError: If it is not in that coding, or goes on behind its end.
        """
        try:
            plain = self._inflate(data) if self._brotli is None else self._unbrotli(data)
        except (zlib.error, brotli.error) as error:
            raise DecodeError(str(error)) from error
        return plain

    def end(self) -> None:
        """Check that the data ended where it should.

        Raises:
            DecodeError: If it was cut off.
        """
        is_whole = self._zlib.eof if self._zlib is not None else self._brotli.is_finished()
        if not is_whole:
            raise DecodeError("the compressed data was cut off")

    def _inflate(self, data: bytes) -> bytes:
        plain: bytes = self._zlib.decompress(data, self._left_bytes + 1)
        self._count(plain)
        if self._zlib.unused_data:
            raise DecodeError("bytes stand behind the end of the compressed data")
        return plain

    def _unbrotli(self, data: bytes) -> bytes:
        decoder = self._brotli
        pieces = []
        while True:
            # The limit is a soft one: it may be passed by a buffer's length.
            piece = decoder.process(data, output_buffer_limit=self._left_bytes + 1)
            self._count(piece)
            pieces.append(piece)
            if decoder.is_finished() or decoder.can_accept_more_data():
                return b"".join(pieces)
            data = b""

    def _count(self, plain: bytes) -> None:
        self._left_bytes -= len(plain)
        if self._left_bytes < 0:
            raise TooLargeError("too large once decompressed")


def content_coding(value: str | None) -> str | None:
    """Return the coding that a request's ``content-encoding`` names; None if the body is plain.

    Raises:
        UnsupportedEncoding: If it is not one coding that can be undone.
    """
    coding = "" if value is None else value.strip().lower()
    if coding in ("", "identity"):
        return None
    if not Decoder.can(coding):
        raise UnsupportedEncoding(
            f"Bodies with content-encoding {value!r} are not accepted; expected gzip, deflate, br "
            "or an uncompressed body."
        )
    return coding


async def decoded(body: bytes, coding: str | None, max_bytes: int) -> bytes:
    """Return a client's body without its coding.

    Raises:
        BodyTooLarge: If it becomes larger than ``max_bytes``.
        InvalidRequest: If it is not in that coding.
    """
    if coding is None:
        return body
    if len(body) <= MAX_INLINE_BYTES:
        return _decode(body, coding, max_bytes)
    return await asyncio.to_thread(_decode, body, coding, max_bytes)


def _decode(body: bytes, coding: str, max_bytes: int) -> bytes:
    decoder = Decoder(coding, max_bytes)
    try:
        plain = decoder.feed(body)
        decoder.end()
    except TooLargeError as error:
        raise BodyTooLarge(
            f"The decompressed body is longer than the limit of {max_bytes} bytes."
        ) from error
    except DecodeError as broken:
        raise InvalidRequest(
            f"The body is not valid {coding}: {broken}.", code="bad_encoding"
        ) from broken
    return plain

"""Undo a worker's content encoding, so that what reaches the client needs none."""

from __future__ import annotations

import zlib

from gateway.errors import MalformedAnswer

# zlib's window bits: 16 more expects a gzip header, 32 more accepts gzip or zlib.
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": 47}


class Inflater:
    """Decompresses one answer, piece by piece, up to ``max_bytes`` in all."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        self._inflate = zlib.decompressobj(_WINDOW_BITS[encoding])
        self._left_bytes = max_bytes

    @staticmethod
    def can(encoding: bytes) -> bool:
        """Whether ``encoding`` (in lower case) is one this class undoes."""
        return encoding in _WINDOW_BITS

    def feed(self, data: bytes) -> bytes:
        """Return what ``data`` adds.

        Raises:
            MalformedAnswer: If it is not in that encoding, or becomes too large.
        """
        try:
            plain = self._inflate.decompress(data, self._left_bytes + 1)
        except zlib.error as error:
            raise MalformedAnswer(f"answer is not in the encoding it names: {error}") from error
        self._left_bytes -= len(plain)
        if self._left_bytes < 0:
            raise MalformedAnswer("answer is too large once decompressed")
        return plain

    def end(self) -> None:
        """Check that the data ended where it should.

        Raises:
            MalformedAnswer: If it was cut off.
        """
        if not self._inflate.eof:
            raise MalformedAnswer("compressed answer was cut off")

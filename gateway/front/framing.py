"""Where a request's body ends: by its length, or by its chunks. Pure: no I/O, no clock.

Stricter than the standard allows: line ends are CRLF, chunk sizes are plain hexadecimal digits, and
nothing is read two ways by two parties.

Source: RFC 9112, 7.1 (chunked coding).
"""

from __future__ import annotations

import re

from gateway.errors import BodyTooLarge, InvalidRequest

# A chunk's size line, with extensions that are ignored. Sixteen digits are more than any body.
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t\x20-\x7e\x80-\xff]*")
# Of these some parsers (llhttp is one) believe in a trailer that another body follows.
_FRAMING_NAMES = frozenset(
    (b"connection", b"content-length", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
# Extensions and trailers serve nobody here; a little of both is tolerated and thrown away.
MAX_LINE_BYTES = 4 << 10
MAX_TRAILER_BYTES = 16 << 10
# Reads are joined by so many: a client that sends byte by byte must not cost an object for each.
_READS_JOINED = 256


class SizedBody:
    """A body of a known length that has not come as a whole yet.

    Args:
        length: In bytes.
    """

    __slots__ = ("_missing", "_pieces", "_reads")

    def __init__(self, length: int) -> None:
        self._missing = length
        self._pieces: list[bytes] = []
        self._reads: list[bytes] = []

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes; None while the body goes on, else what stands after its end."""
        missing = self._missing
        self._missing = missing - len(data)
        self._reads.append(data[:missing] if self._missing < 0 else data)
        if self._missing <= 0:
            return data[missing:]
        if len(self._reads) >= _READS_JOINED:
            self._pieces.append(b"".join(self._reads))
            self._reads.clear()
        return None

    def value(self) -> bytes:
        """Return the body; valid once ``feed`` has returned a rest."""
        return b"".join(self._pieces + self._reads)


class ChunkedBody:
    """A body in chunks.

    Args:
        max_bytes: Limit on the body without its framing.
    """

    __slots__ = ("_body", "_held", "_max_bytes", "_missing", "_trailer_bytes")

    # States beside "so many bytes of a chunk are missing".
    _SIZE = -1
    _CHUNK_END = -2
    _TRAILER = -3

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._body = bytearray()
        self._held = b""
        self._trailer_bytes = 0
        self._missing = self._SIZE

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes; None while the body goes on, else what stands after its end.

        Raises:
            BodyTooLarge: If there is more of it than allowed.
            InvalidRequest: If the framing is broken.
        """
        data = self._held + data
        at = 0
        while True:
            if self._missing > 0:
                piece = data[at : at + self._missing]
                if not piece:
                    self._held = b""
                    return None
                self._body += piece
                at += len(piece)
                self._missing = self._missing - len(piece) or self._CHUNK_END
                continue
            end = data.find(b"\r\n", at)
            line = data[at : end if end >= 0 else None]
            self._check(line)
            if end < 0:
                self._held = line
                return None
            at = end + 2
            if self._take_line(line):
                return data[at:]

    def value(self) -> bytes:
        """Return the body; valid once ``feed`` has returned a rest."""
        return bytes(self._body)

    def _check(self, line: bytes) -> None:
        """Refuse what no further byte could make a line of."""
        if self._missing == self._CHUNK_END and line not in (b"", b"\r"):
            raise _broken("a chunk is longer than its size says")
        if len(line) > MAX_LINE_BYTES or b"\n" in line:
            raise _broken("a line is too long or has no CRLF")

    def _take_line(self, line: bytes) -> bool:
        """Act on a whole line; True if it ends the body."""
        if self._missing == self._CHUNK_END:
            if line:
                raise _broken("a chunk is longer than its size says")
            self._missing = self._SIZE
        elif self._missing == self._SIZE:
            self._take_size(line)
        elif not line:
            return True
        else:
            self._trailer_bytes += len(line)
            match = _TRAILER_LINE.fullmatch(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES or match is None:
                raise _broken("a trailer is not a header")
            if match[1].lower() in _FRAMING_NAMES:
                raise _broken("a trailer names what frames a message")
        return False

    def _take_size(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise _broken("a chunk's size is not a hexadecimal number")
        size = int(match[1], 16)
        if len(self._body) + size > self._max_bytes:
            raise BodyTooLarge(f"The body is longer than the limit of {self._max_bytes} bytes.")
        self._missing = size or self._TRAILER


def _broken(what: str) -> InvalidRequest:
    return InvalidRequest(f"The framing of the body is broken: {what}.", code="bad_framing")

"""Undo a worker's content encoding, so that what reaches the client needs none."""

from __future__ import annotations

from gateway.errors import MalformedAnswer
from gateway.front.decoding import DecodeError, Decoder, TooLargeError


class Inflater:
    """Decompresses one answer, piece by piece, up to ``max_bytes`` in all."""

    def __init__(self, encoding: bytes, max_bytes: int) -> None:
        self._decoder = Decoder(encoding.decode("ascii"), max_bytes)

    @staticmethod
    def can(encoding: bytes) -> bool:
        """Whether ``encoding`` (in lower case) is one this class undoes."""
        return Decoder.can(encoding.decode("latin-1"))

    def feed(self, data: bytes) -> bytes:
        """Return what ``data`` adds.

        Raises:
            MalformedAnswer: If it is not in that encoding, or becomes too large.
        """
        try:
            return self._decoder.feed(data)
        except TooLargeError as error:
            raise MalformedAnswer("answer is too large once decompressed") from error
        except DecodeError as broken:
            raise MalformedAnswer(f"answer is not in the encoding it names: {broken}") from broken

    def end(self) -> None:
        """Check that the data ended where it should.

        Raises:
            MalformedAnswer: If it was cut off.
        """
        try:
            self._decoder.end()
        except DecodeError as error:
            raise MalformedAnswer(f"compressed answer: {error}") from error

"""The head of a request, parsed by httptools, which takes nothing that could be read two ways.

Refused by it: bare LF, folded lines, control characters, names that are not tokens, space before
a colon, repeated or odd lengths, a length beside a transfer coding, codings other than chunked.
"""

from __future__ import annotations

import httptools

from gateway.errors import InvalidRequest
from gateway.front.exchange import RequestHead

# Names are chosen by clients, so what is remembered of them must end somewhere.
_MAX_KNOWN_NAMES = 1000


class _Names(dict[bytes, str]):
    """Name as sent -> the name in lower case."""

    def __missing__(self, name: bytes) -> str:
        lower = name.decode("ascii").lower()
        if len(self) < _MAX_KNOWN_NAMES:
            self[name] = lower
        return lower


_names = _Names()


class Head(RequestHead):
    """A parsed head. The length of the body is an attribute only, not among the headers.

    Attributes:
        content_length: None if the body is chunked; 0 if there is none.
        is_http11: Whether the version is 1.1.
        keep_alive: Whether the client wants the connection to go on.
    """

    __slots__ = ("content_length", "is_http11", "keep_alive")

    def __init__(self, data: bytes, *, is_http11: bool, max_headers: int) -> None:
        """Parse ``data``, which ends with the empty line.

        Raises:
            InvalidRequest: If it is not a valid head, or has more than ``max_headers`` headers.
        """
        pairs = _pairs(data)
        if len(pairs) > max_headers:
            raise InvalidRequest(
                f"The request has {len(pairs)} headers, the limit is {max_headers}."
            )
        names = [_names[name] for name, _ in pairs]
        raw = [pair for pair, name in zip(pairs, names, strict=True) if name != "content-length"]
        # Reversed, so that of a repeated header the first is kept.
        values = zip(reversed(names), reversed(pairs), strict=True)
        headers = {name: pair[1].decode("utf-8", "surrogateescape") for name, pair in values}
        super().__init__(raw, headers, names.count("host"))
        self.is_http11 = is_http11
        length = headers.pop("content-length", None)
        self.content_length = int(length or 0) if "transfer-encoding" not in headers else None
        if self.content_length is None and not is_http11:
            raise InvalidRequest("HTTP/1.0 knows no transfer-encoding.", code="bad_framing")
        connection = headers.get("connection")
        self.keep_alive = connection is None or not any(
            token.strip() == "close" for token in connection.lower().split(",")
        )


class _Collector:
    """Takes the parser's headers."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name, value))


def _pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    collector = _Collector()
    try:
        httptools.HttpRequestParser(collector).feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an upgrade is the server's choice, and this one takes none
    except httptools.HttpParserError as error:
        raise InvalidRequest(f"The request is not valid HTTP: {error}.") from error
    return collector.pairs

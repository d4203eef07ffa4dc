"""The head of a request, parsed by httptools, which takes nothing that could be read two ways.

Refused by it: bare LF, folded lines, control characters, names that are not tokens, space before
a colon, repeated or odd lengths, a length beside a transfer coding, codings other than chunked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import httptools

from gateway.errors import InvalidRequest

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


class Headers(Mapping[str, str]):
    """Headers by lower-case name; values are decoded when they are asked for."""

    __slots__ = ("_values",)

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        names = _names
        # Reversed, so that of a repeated header the first is kept.
        self._values = {names[name]: value for name, value in reversed(pairs)}

    def __getitem__(self, name: str) -> str:
        return self._values[name].decode("utf-8", "surrogateescape")

    def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
        """Return a value, or ``default``."""
        value = self._values.get(name)
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Head:
    """A parsed head.

    Attributes:
        raw: Pairs as sent, in order.
        headers: The same by name.
        content_length: None if the body is chunked; 0 if there is none.
        is_http11: Whether the version is 1.1.
        keep_alive: Whether the client wants the connection to go on.
    """

    __slots__ = ("content_length", "headers", "is_http11", "keep_alive", "raw")

    def __init__(self, data: bytes, *, is_http11: bool, max_headers: int) -> None:
        """Parse ``data``, which ends with the empty line.

        Raises:
            InvalidRequest: If it is not a valid head, or has more than ``max_headers`` headers.
        """
        self.raw: list[tuple[bytes, bytes]] = []
        self.is_http11 = is_http11
        try:
            httptools.HttpRequestParser(self).feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade is the server's choice, and this one takes none
        except httptools.HttpParserError as error:
            raise InvalidRequest(f"The request is not valid HTTP: {error}.") from error
        if len(self.raw) > max_headers:
            raise InvalidRequest(
                f"The request has {len(self.raw)} headers, the limit is {max_headers}."
            )
        self.headers = headers = Headers(self.raw)
        if "transfer-encoding" in headers:
            if not is_http11:
                raise InvalidRequest("HTTP/1.0 knows no transfer-encoding.", code="bad_framing")
            self.content_length = None
        else:
            self.content_length = int(headers.get("content-length") or 0)
        connection = headers.get("connection")
        self.keep_alive = connection is None or not any(
            token.strip() == "close" for token in connection.lower().split(",")
        )

    @property
    def num_hosts(self) -> int:
        """How many ``host`` headers there are."""
        if len(self.headers) == len(self.raw):
            return int("host" in self.headers)
        return sum(name.lower() == b"host" for name, _ in self.raw)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; called by the parser."""
        self.raw.append((name, value))

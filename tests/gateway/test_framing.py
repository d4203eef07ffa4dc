"""Where a body ends, whatever pieces it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.front.framing import ChunkedBody, SizedBody


@given(st.binary(max_size=300), st.integers(1, 50), st.lists(st.integers(1, 40)), st.binary())
def test_chunks_cut_anywhere_make_the_same_body(
    body: bytes, size: int, cuts: list[int], rest: bytes
) -> None:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    sent = chunks + b"0\r\nx-trailer: 1\r\n\r\n"
    for reader in (ChunkedBody(300), SizedBody(len(sent))):
        data, at, left = sent + rest, 0, None
        for cut in [*cuts, len(data)]:
            if left is not None:
                left += data[at : at + cut]
            else:
                left = reader.feed(data[at : at + cut])
            at += cut
        assert (reader.value(), left) == (
            body if isinstance(reader, ChunkedBody) else sent,
            rest,
        )


def test_a_body_of_single_bytes_costs_no_object_for_each() -> None:
    body = SizedBody(10_000)
    for _ in range(9_999):
        assert body.feed(b"x") is None

    assert len(body._reads) + len(body._pieces) < 600
    assert body.feed(b"xy") == b"y"
    assert body.value() == b"x" * 10_000


@pytest.mark.parametrize(
    "line", [b"Transfer-Encoding: chunked", b"content-length: 5", b"upgrade: h2c", b"Connection: a"]
)
def test_a_trailer_frames_nothing(line: bytes) -> None:
    with pytest.raises(InvalidRequest, match="trailer"):
        ChunkedBody(100).feed(b"0\r\nx-a: b\r\n" + line + b"\r\n\r\n")


def test_trailers_and_lines_are_bounded() -> None:
    for endless in (b"5;" + b"a" * 10_000, b"0\r\n" + b"a: b\r\n" * 10_000):
        body = ChunkedBody(100)
        with pytest.raises(InvalidRequest, match="framing"):
            body.feed(endless)

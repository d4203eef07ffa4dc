"""The Redis client: what a server may say, and what it may do to us."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from runner.tiers.resp import Address, OversizedError, ReplyError, RespClient, parse_url
from runner.tiers.wire import BUFFER_BYTES, Target
from tests.runner.wire_parts import LONG_S, hangs, says, scripted, soon
from tests.valkey import Valkey, binary_of, server_binaries

URL = "redis://:s%20p%2Fa%3Ace@127.0.0.1:{}"


def client_of(url: str) -> RespClient:
    return RespClient(parse_url(url), soon(), time.monotonic)


@pytest.fixture(scope="module", params=server_binaries())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("v")
    started = Valkey(folder, "--requirepass", "s p/a:ce", binary=binary_of(request.param))
    started.start()
    yield started
    started.stop()


def test_a_password_a_database_and_many_values_in_one_go(server: Valkey) -> None:
    client = client_of(URL.format(server.port) + "/3")
    sizes = [0, 1, 15, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 1, 700_000]
    values = [bytes([size % 251]) * size for size in sizes]
    client.send([(b"SETEX", b"k%d" % len(v), b"60", v) for v in values], soon())
    assert [client.reply(soon()) for _ in sizes] == [b"OK"] * len(sizes)

    client.send([(b"GET", b"k%d" % size) for size in sizes], soon())
    for value in values:
        buffer = memoryview(bytearray(len(value)))
        assert client.reply(soon(), buffer) == len(value)
        assert buffer == value
    client.send([(b"GET", b"absent"), (b"EXISTS", b"k1"), (b"GET", b"k15")], soon())
    assert [client.reply(soon()) for _ in range(3)] == [None, 1, values[2]]
    assert client.num_pending == 0
    client.close()


def test_a_value_in_pieces_is_one_value(server: Valkey) -> None:
    pieces = (b"head", memoryview(bytes(100_000)), b"", memoryview(b"tail"))
    client = client_of(URL.format(server.port))
    client.send([(b"SETEX", b"k", b"60", pieces), (b"STRLEN", b"k")], soon())
    assert [client.reply(soon()) for _ in range(2)] == [b"OK", 100_008]
    client.close()


def test_a_unix_socket_is_spoken_to_as_well(server: Valkey) -> None:
    client = client_of(f"unix://:s%20p%2Fa%3Ace@{server.socket_path}")
    client.send([(b"PING",)], soon())
    assert client.reply(soon()) == b"PONG"
    client.close()


def test_a_refused_command_leaves_the_connection_usable(server: Valkey) -> None:
    client = client_of(URL.format(server.port))
    client.send([(b"NOSUCH",), (b"PING",)], soon())
    with pytest.raises(ReplyError, match="NOSUCH") as refused:
        client.reply(soon())
    assert refused.value.code == "ERR"
    assert client.reply(soon()) == b"PONG"
    client.close()


def test_a_wrong_password_is_refused_and_not_repeated(server: Valkey) -> None:
    with pytest.raises(ReplyError) as refused:
        client_of(f"redis://:hunter2@127.0.0.1:{server.port}/0")
    assert refused.value.code == "WRONGPASS"
    assert "hunter2" not in str(refused.value)


def test_a_value_longer_than_the_buffer_is_not_read(server: Valkey) -> None:
    client = client_of(URL.format(server.port))
    client.send([(b"SETEX", b"k", b"60", bytes(1000)), (b"GET", b"k")], soon())
    client.reply(soon())
    with pytest.raises(OversizedError, match="1000 bytes where 999"):
        client.reply(soon(), memoryview(bytearray(999)))
    client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b":many\r\n",
        b"$x\r\n",
        b"$5\r\nabc",
        b"$3\r\nabcdef\r\n",
        b"*1\r\n:1\r\n",
        b"_\r\n",
        b"x" * (BUFFER_BYTES + 1),
        b"+OK",
        b"",
    ],
)
def test_what_is_no_such_reply_breaks_the_connection_and_nothing_else(answer: bytes) -> None:
    with scripted(says(answer)) as server:
        client = client_of(f"redis://127.0.0.1:{server.port}")
        client.send([(b"GET", b"k")], soon())
        with pytest.raises(ConnectionError):
            client.reply(soon(), memoryview(bytearray(5)))
        client.close()


@pytest.mark.parametrize("answer", [b"", b"$5", b"$5\r\nab", b"$2\r\nab\r"])
def test_a_server_that_stops_in_the_middle_is_left_at_the_deadline(answer: bytes) -> None:
    with scripted(says(answer, then=hangs)) as server:
        client = client_of(f"redis://127.0.0.1:{server.port}")
        client.send([(b"GET", b"k")], soon())
        with pytest.raises(TimeoutError):
            client.reply(soon(0.05), memoryview(bytearray(5)))
        client.close()


def test_a_server_that_reads_nothing_is_left_at_the_deadline() -> None:
    closed = threading.Event()
    with scripted(lambda _: closed.wait(LONG_S)) as server:
        client = client_of(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(TimeoutError):
            client.send([(b"SETEX", b"k", b"60", bytes(64_000_000))], soon(0.2))
        client.close()
        closed.set()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", Address(Target("h", 6379))),
        ("redis://h:7/2", Address(Target("h", 7), database=2)),
        ("rediss://u:p@[::1]:7", Address(Target("::1", 7, True), "u", "p")),
        ("unix:///run/r.sock", Address(Target("/run/r.sock", 0))),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:6379",
        "http://h",
        "redis://",
        "unix://",
        "redis://h/x",
        "redis://[::1",
        "redis://:secret@h:99999",
        "redis://u:secret/x@h",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - every message is looked at here
        parse_url(url)
    assert "secret" not in str(refused.value)


def test_an_address_is_written_without_its_password() -> None:
    assert "secret" not in str(parse_url("redis://user:secret@h:7/2"))


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 70 + ".invalid", "127.0.0.1"])
def test_a_server_that_cannot_be_reached_is_an_error_of_the_system(host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - refused, unknown, or no name at all
        client_of(f"redis://{host}:1")

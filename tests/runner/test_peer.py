"""Pulling blocks from a peer: both sides over a real socket, and whatever can go wrong between."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from runner import peers
from runner.kvkeys import KvKey, namespace_key
from runner.leases import Loan, LoanedBlock
from runner.peers import BlockServer, peers_document
from runner.responses import answer_errors
from runner.tiers.peer import PeerFigures, PeerStore, peer_url
from runner.tiers.record import encode_head
from runner.tiers.types import Deliver, Outcome, Place
from tests.runner.wire_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    LONG_S,
    NAMESPACE,
    Collected,
    Script,
    hangs,
    make_payloads,
    make_places,
    says,
    scripted,
    soon,
)
from tests.support import poll_until

NUM_BLOCKS = 400  # several batches
PLACES = make_places(NUM_BLOCKS)
PAYLOADS = make_payloads(NUM_BLOCKS)


# Not the loop's own threads: the server copies in those.
PULLING = ThreadPoolExecutor(max_workers=8)


class Library:
    """A lender of made-up blocks.

    Attributes:
        blocks: What is held.
        loans: Owners whose loans are out.
        answers: Whether a loan is answered at all.
        reads: Called for each block read, with its number.
    """

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.blocks = {
            place.record.key: (place, PAYLOADS[at]) for at, place in enumerate(PLACES[:num_blocks])
        }
        self.loans: set[str] = set()
        self.damaged: set[int] = set()
        self.answers = True
        self.error: Exception | None = None
        self.on_read: Any = lambda at: None

    def lend(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> Future[Loan]:
        answer: Future[Loan] = Future()
        self.loans.add(owner)
        if self.error is not None:
            answer.set_exception(self.error)
        elif self.answers:
            held = []
            for key in keys:
                if key not in self.blocks:
                    break
                held.append(self._lent(*self.blocks[key]))
            answer.set_result(Loan(owner, deadline_s, tuple(held)))
        return answer

    def give_back(self, owner: str) -> None:
        self.loans.discard(owner)

    def _lent(self, place: Place, payload: bytes) -> LoanedBlock:
        def read_into(target: memoryview) -> bool:
            self.on_read(place.record.depth)
            target[:] = payload
            return place.record.depth not in self.damaged

        return LoanedBlock(place.record, read_into)


class Side:
    """The serving runner."""

    def __init__(self, url: str, library: Library, server: BlockServer) -> None:
        self.url = url
        self.library = library
        self.server = server


@asynccontextmanager
async def serving(library: Library | None = None, **options: Any) -> AsyncIterator[Side]:
    library = library or Library()
    server = BlockServer(library, namespace=NAMESPACE, block_bytes=BLOCK_BYTES, **options)
    app = web.Application(middlewares=[answer_errors], client_max_size=2**25)
    app.router.add_post("/kv/blocks", server.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield Side(f"http://127.0.0.1:{port}", library, server)
        await poll_until(lambda: not library.loans, what="no loan left")
    finally:
        await runner.cleanup()


def store_for(url: str, namespace: KvKey = NAMESPACE) -> PeerStore:
    return PeerStore([url], namespace=namespace, block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE)


async def pull(
    store: PeerStore,
    url: str,
    deliver: Deliver,
    places: Sequence[Place] = PLACES,
    deadline_s: float | None = None,
) -> Outcome:
    until_s = soon() if deadline_s is None else deadline_s
    call = store.read_from, url, places, deliver, until_s
    return await asyncio.get_running_loop().run_in_executor(PULLING, *call)


async def test_a_prefix_comes_bit_by_bit_and_is_counted() -> None:
    async with serving() as side:
        store, got = store_for(side.url), Collected()
        assert await pull(store, side.url, got) == "done"
        assert got.blocks == PAYLOADS

        figures = store.figures()[side.url]
        assert figures.seconds > 0
        assert figures == PeerFigures(
            NUM_BLOCKS, NUM_BLOCKS * BLOCK_BYTES, NUM_BLOCKS * BLOCK_SIZE, figures.seconds, 0
        )
        assert side.server.served_blocks == NUM_BLOCKS
        assert side.server.served_bytes == NUM_BLOCKS * BLOCK_BYTES
        assert peers_document(side.server, store) == {
            "serves": True,
            "pulls": {
                side.url: {
                    "blocks": NUM_BLOCKS,
                    "bytes": NUM_BLOCKS * BLOCK_BYTES,
                    "tokens": NUM_BLOCKS * BLOCK_SIZE,
                    "seconds": figures.seconds,
                    "failed": 0,
                }
            },
        }


@pytest.mark.parametrize("held", [0, 1, 250])
async def test_a_peer_that_has_less_gives_what_it_has(held: int) -> None:
    async with serving(Library(held)) as side:
        store, got = store_for(side.url), Collected()
        assert await pull(store, side.url, got) == "missing"
        assert got.blocks == PAYLOADS[:held]
        assert store.figures()[side.url].failed == 0


async def test_who_asked_may_stop_and_the_loan_ends_with_it() -> None:
    async with serving() as side:
        store, got = store_for(side.url), Collected(stop_at=5)
        assert await pull(store, side.url, got) == "stopped"
        assert got.blocks == PAYLOADS[:5]
        assert store.figures()[side.url].failed == 0


async def test_a_runner_of_another_namespace_gets_nothing() -> None:
    async with serving() as side:
        store, got = store_for(side.url, namespace_key({"model": "another"})), Collected()
        assert await pull(store, side.url, got) == "failed"
        assert got.blocks == []
        assert store.figures()[side.url].failed == 1


async def test_only_configured_peers_are_asked() -> None:
    with scripted(hangs) as server:
        store = store_for("http://127.0.0.1:1")
        assert await pull(store, f"http://127.0.0.1:{server.port}", Collected()) == "failed"
        assert server.num_connections == 0


async def test_more_pulls_than_are_served_at_once_are_turned_away() -> None:
    release = threading.Event()
    library = Library()
    library.on_read = lambda at: release.wait(LONG_S)
    async with serving(library) as side:
        store = store_for(side.url)
        some = [
            asyncio.create_task(pull(store, side.url, Collected(), PLACES[:2]))
            for _ in range(peers.MAX_PULLS)
        ]
        await poll_until(lambda: len(library.loans) == peers.MAX_PULLS)
        assert await pull(store, side.url, Collected()) == "failed"
        assert side.server.refused == 1
        release.set()
        assert await asyncio.gather(*some) == ["done"] * peers.MAX_PULLS
        assert await pull(store, side.url, Collected(), PLACES[:2]) == "done"


async def test_what_was_copied_after_the_loan_ended_is_never_sent() -> None:
    now_s = [time.monotonic()]
    library = Library()

    def read(at: int) -> None:
        if at == NUM_BLOCKS - 1:
            now_s[0] += LONG_S  # the block may hold something else by the end of this copy

    library.on_read = read
    async with serving(library, clock=lambda: now_s[0]) as side:
        store, got = store_for(side.url), Collected()
        assert await pull(store, side.url, got) == "failed"
        assert len(got.blocks) < NUM_BLOCKS
        assert got.blocks == PAYLOADS[: len(got.blocks)]
        assert side.server.cut_short == 1


@pytest.mark.parametrize("damaged", [{0}, {1}, {200, 250}, {NUM_BLOCKS - 1}])
async def test_a_block_that_the_lender_finds_damaged_ends_the_answer_before_it(
    damaged: set[int],
) -> None:
    library = Library()
    library.damaged = damaged
    async with serving(library) as side:
        store, got = store_for(side.url), Collected()
        assert await pull(store, side.url, got) == "failed"
        assert got.blocks == PAYLOADS[: min(damaged)]
        assert store.figures()[side.url].failed == 1
        await poll_until(lambda: side.server.cut_short == 1)
        assert side.server.served_blocks == min(damaged)


async def test_a_reader_that_stands_still_is_left_when_its_loan_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "MAX_LOAN_S", 0.3)
    big = 8 * NUM_BLOCKS  # beyond what sockets buffer
    places, payload = make_places(big, seed=1), bytes(BLOCK_BYTES)
    library = Library()
    library.blocks = {place.record.key: (place, payload) for place in places}
    async with serving(library) as side:
        stopped = threading.Event()

        def stands_still(at: int, payload: memoryview) -> bool:
            return stopped.wait(LONG_S)

        pulling = asyncio.create_task(pull(store_for(side.url), side.url, stands_still, places))
        await poll_until(lambda: side.server.cut_short == 1)
        await poll_until(lambda: not library.loans)
        stopped.set()
        assert await pulling == "failed"


async def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    library = Library()
    library.answers = False
    async with serving(library) as side:
        store = store_for(side.url)
        assert await pull(store, side.url, Collected(), deadline_s=soon(0.2)) == "stopped"
        assert store.figures()[side.url].failed == 1


async def test_an_engine_that_stops_is_busy() -> None:
    library = Library()
    library.error = RuntimeError("stopped")
    async with serving(library) as side:
        assert await pull(store_for(side.url), side.url, Collected()) == "failed"


async def test_a_source_that_dies_in_the_middle_leaves_what_came_before() -> None:
    async with serving() as side:
        loop, died = asyncio.get_running_loop(), threading.Event()
        transports: list[asyncio.Transport] = []
        original = side.server._send

        async def spied(request: web.Request, loan: Loan) -> web.StreamResponse:
            assert isinstance(request.transport, asyncio.Transport)
            transports.append(request.transport)
            return await original(request, loan)

        side.server._send = spied  # type: ignore[method-assign]
        got = Collected()

        def deliver(at: int, payload: memoryview) -> bool:
            if at == 10:
                loop.call_soon_threadsafe(transports[0].abort)
                loop.call_soon_threadsafe(died.set)
                died.wait(LONG_S)
            return got(at, payload)

        store = store_for(side.url)
        assert await pull(store, side.url, deliver) == "failed"
        assert 10 < len(got.blocks) < NUM_BLOCKS
        assert got.blocks == PAYLOADS[: len(got.blocks)]
        assert store.figures()[side.url].failed == 1


# A peer that misbehaves


def record(at: int) -> bytes:
    payload = PAYLOADS[at]
    return encode_head(NAMESPACE, PLACES[at].record, memoryview(payload)) + payload


RECORD_BYTES = len(record(0))


def answer(body: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n".encode() + body


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BAD_ANSWERS: dict[str, tuple[Script, str, int]] = {
    "nothing": (says(), "failed", 0),
    "no HTTP": (says(b"+OK\r\n"), "failed", 0),
    "no length": (says(b"HTTP/1.1 200 OK\r\n\r\n"), "failed", 0),
    "chunked": (says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"), "failed", 0),
    "too many headers": (says(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100), "failed", 0),
    "an endless header": (says(b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000), "failed", 0),
    "refused": (says(answer(b"{}", status="503 Busy")), "failed", 0),
    "forbidden": (says(answer(b"{}", status="403 Forbidden")), "failed", 0),
    "a redirection": (says(answer(b"", status="307 Elsewhere")), "failed", 0),
    "a length of no whole block": (says(answer(record(0)[:-1])), "damaged", 0),
    "more than was asked for": (says(answer(b"", 4 * RECORD_BYTES)), "damaged", 0),
    "cut in a head": (says(answer(record(0)[:20], RECORD_BYTES)), "failed", 0),
    "cut in the bytes": (says(answer(record(0)[:-1], RECORD_BYTES)), "failed", 0),
    "cut between blocks": (says(answer(record(0), 2 * RECORD_BYTES)), "failed", 1),
    "flipped in a head": (says(answer(flipped(record(0), 40))), "damaged", 0),
    "flipped in the bytes": (says(answer(record(0) + flipped(record(1), 900))), "damaged", 1),
    "another block": (says(answer(record(1))), "damaged", 0),
    "a block twice": (says(answer(record(0) * 2)), "damaged", 1),
    "zeros": (says(answer(bytes(RECORD_BYTES))), "damaged", 0),
}


@pytest.mark.parametrize("fault", BAD_ANSWERS)
def test_whatever_a_peer_answers_only_sound_blocks_are_delivered(fault: str) -> None:
    script, outcome, num_blocks = BAD_ANSWERS[fault]
    with scripted(script) as server:
        store, got = store_for(url := f"http://127.0.0.1:{server.port}"), Collected()
        assert store.read_from(url, PLACES[:3], got, soon()) == outcome
        assert got.blocks == PAYLOADS[:num_blocks]
        assert store.figures()[url].failed == 1


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\n", answer(record(0)[:500], RECORD_BYTES)]
)
def test_a_peer_that_hangs_is_left_at_the_deadline(sent: bytes) -> None:
    with scripted(says(sent, then=hangs)) as server:
        store = store_for(url := f"http://127.0.0.1:{server.port}")
        assert store.read_from(url, PLACES, Collected(), soon(0.1)) == "stopped"
        assert store.figures()[url].failed == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nosuch.invalid:1"])
def test_a_peer_that_is_not_there_is_a_failed_pull(url: str) -> None:
    assert store_for(url).read_from(url, PLACES, Collected(), soon()) == "failed"


def test_nothing_wanted_asks_nobody() -> None:
    with scripted(hangs) as server:
        store = store_for(url := f"http://127.0.0.1:{server.port}")
        assert store.read_from(url, [], Collected(), soon()) == "done"
        assert server.num_connections == 0


# A reader that misbehaves

GOOD = {"namespace": NAMESPACE.hex(), "keys": [PLACES[0].record.key.hex()], "deadline_s": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        ({}, 409),
        (GOOD | {"namespace": "00"}, 409),
        (GOOD | {"namespace": 5}, 400),
        (GOOD | {"keys": []}, 400),
        (GOOD | {"keys": None}, 400),
        (GOOD | {"keys": "00"}, 400),
        (GOOD | {"keys": ["00" * 31]}, 400),
        (GOOD | {"keys": ["zz" * 32]}, 400),
        (GOOD | {"keys": [" " * 64]}, 400),
        (GOOD | {"keys": [7]}, 400),
        (GOOD | {"keys": ["00" * 32] * (peers.MAX_KEYS + 1)}, 400),
        (GOOD | {"deadline_s": -1}, 400),
        (GOOD | {"deadline_s": "soon"}, 400),
        (GOOD | {"deadline_s": 0}, 503),
        (GOOD | {"keys": ["00" * 32]}, 200),
        (GOOD, 200),
    ],
)
async def test_a_body_that_is_no_pull_is_refused_in_the_apis_shape(body: Any, status: int) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    library = Library()
    library.answers = status == 200
    async with (
        serving(library) as side,
        aiohttp.ClientSession() as session,
        session.post(f"{side.url}/kv/blocks", data=raw) as response,
    ):
        assert response.status == status
        text = await response.read()
        if status != 200:
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


async def test_a_reader_that_leaves_ends_its_loan() -> None:
    library = Library()
    library.on_read = lambda at: time.sleep(0.001)
    async with serving(library) as side:
        _, writer = await asyncio.open_connection("127.0.0.1", int(side.url.rpartition(":")[2]))
        keys = [place.record.key.hex() for place in PLACES]
        body = json.dumps(GOOD | {"keys": keys, "deadline_s": 10}).encode()
        writer.write(
            b"POST /kv/blocks HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await poll_until(lambda: bool(library.loans))
        writer.close()
        await poll_until(lambda: not library.loans)
        await poll_until(lambda: side.server.cut_short == 1)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://h:8101", "http://h:8101"),
        ("http://H:8101/", "http://h:8101"),
        ("http://h", "http://h:80"),
        ("http://[::1]:8101", "http://[::1]:8101"),
    ],
)
def test_peers_are_compared_by_host_and_port(url: str, same: str) -> None:
    assert peer_url(url) == same


@pytest.mark.parametrize(
    "url",
    [
        "",
        "*",
        "h:8101",
        "https://h",
        "http://",
        "http://h/x",
        "http://h:x",
        "http://u@h",
        "http://[",
    ],
)
def test_what_is_no_peer_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several messages, all of them about the URL
        peer_url(url)

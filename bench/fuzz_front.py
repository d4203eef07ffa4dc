"""The client port under fuzzing: both fronts get the same bytes, over transports in memory.

They need not agree on what is an error: one may be stricter. But what both serve must be the same
requests, and the one that serves fewer must have refused the next: if it were still waiting for
more, the two would not agree where a request ends, and that is what smuggling lives on.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateway.errors import InvalidRequest
from gateway.front.raw import RawFront
from gateway.proxy.limits import Limits
from gateway.proxy.responses import AiohttpExchange
from gateway.proxy.server import reference_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.front.exchange import Exchange

PATHS = ("/v1/chat/completions", "/v1/completions")
LIMITS = Limits(head_bytes=4096, headers=20, body_bytes=2000, decompressed_bytes=4000)
# Loop turns after which nothing happens any more: no step of serving takes half as many.
SETTLE_TURNS = 12
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
Served = list[tuple[str, bytes]]


class FakeSocket:
    """Takes every option."""

    family = type = proto = 0

    def setsockopt(self, *_args: object) -> None:
        """Take it."""


class MemoryTransport(asyncio.Transport):
    """A connection whose other end is a list of pieces."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"socket": FakeSocket(), "peername": ("127.0.0.1", 1)})
        self._loop = loop
        self.protocol: Any = None
        self.out = bytearray()
        self.is_closed = False
        self.is_paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closed:
            self.out += data

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nothing follows; nobody waits for it here."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""


class Fronts:
    """Both fronts over one handler that says what it was asked."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note)
        self._problems: list[str] = []
        self._served: Served = []
        app = web.Application()
        for path in PATHS:
            app.router.add_post(path, self._through_aiohttp, expect_handler=_expect_nothing)
        app.router.add_get("/v1/models", _models)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._loop.run_until_complete(self._runner.setup())
        self._reference = functools.partial(reference_connection, self._runner, LIMITS, self._loop)
        self._raw = RawFront(self._serve, self._reference, PATHS, LIMITS, self._loop)

    def close(self) -> None:
        """End the loop and what runs on it."""
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    def check(self, pieces: Sequence[bytes]) -> None:
        """Give both fronts the same pieces.

        Raises:
            AssertionError: If one fails, or they disagree.
        """
        raw, raw_statuses = self._run(self._raw.connection, pieces)
        ref, ref_statuses = self._run(self._reference, pieces)
        assert self._raw.num_connections == 0, "a connection is left"
        num = min(len(raw), len(ref))
        assert raw[:num] == ref[:num], f"read two ways: {raw!r} and {ref!r}"
        if len(raw) != len(ref):
            last = (raw_statuses if len(raw) < len(ref) else ref_statuses)[-1:]
            assert last, f"one serves what the other waits for: {raw!r} and {ref!r}"
            assert 400 <= last[0] < 500, f"{raw_statuses} and {ref_statuses}"

    def _run(
        self, factory: Callable[[], asyncio.Protocol], pieces: Sequence[bytes]
    ) -> tuple[Served, list[int]]:
        self._served = []
        out = self._loop.run_until_complete(self._play(factory, pieces))
        assert not self._problems, self._problems.pop()
        statuses = [int(status) for status in _STATUS.findall(out)]
        assert not any(status >= 500 for status in statuses if status != 505), out
        return self._served, [status for status in statuses if status != 100]

    async def _play(
        self, factory: Callable[[], asyncio.Protocol], pieces: Sequence[bytes]
    ) -> bytes:
        transport = MemoryTransport(self._loop)
        transport.protocol = factory()
        transport.protocol.connection_made(transport)
        await asyncio.sleep(0)
        for piece in pieces:
            if transport.is_paused:
                await _settled(transport)
            if transport.is_closed or transport.is_paused:
                break
            transport.protocol.data_received(piece)
            await asyncio.sleep(0)
        await _settled(transport)
        transport.close()
        await _settled(transport)
        return bytes(transport.out)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            exchange.admit_body(LIMITS.body_bytes)
            body = await exchange.read_body()
        except InvalidRequest as error:
            exchange.refuse(error, b"")
            return
        self._served.append((exchange.path, body))
        exchange.answer(200, b"", b"ok")

    async def _through_aiohttp(self, request: web.Request) -> web.StreamResponse:
        exchange = AiohttpExchange(request, LIMITS)
        await self._serve(exchange)
        return exchange.response()

    def _note(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._problems.append(repr(context.get("exception") or context["message"]))


async def _settled(transport: MemoryTransport) -> None:
    """Wait until nothing is sent any more."""
    num_bytes = -1
    while num_bytes != (num_bytes := len(transport.out)):
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)


async def _expect_nothing(_request: web.Request) -> None:
    """Leave ``Expect`` to the exchange."""


async def _models(_request: web.Request) -> web.Response:
    return web.Response(text="[]")

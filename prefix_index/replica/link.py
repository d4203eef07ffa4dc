"""The connection to Redis: up, or down and coming back by itself. Nothing else decides that.

A call that fails is told to the link (``report``), which asks the server at once: one slow answer
is a hiccup, a ping that fails twice is an outage. While the link is down nobody tries the server
but the link, so an outage costs no caller a timeout.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

from prefix_index.replica.address import close_client, make_client
from prefix_index.replica.keys import make_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prefix_index.replica.address import Client

# A server that stands still is noticed within this and two timeouts.
_PING_EVERY_S: Final = 1.0
# Reconnecting begins at once and settles where a server that returns is used within seconds.
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0
# The longest that a blocking read waits in the server before it is asked again.
BLOCK_S: Final = 1.0


_Answer = TypeVar("_Answer")


class LinkDown(Exception):
    """There is no connection to Redis at this moment."""


LINK_ERRORS: Final = (LinkDown, RedisError, OSError)
"""What any call through the link may raise; the last one includes timeouts."""


async def answer(command: Awaitable[_Answer]) -> _Answer:
    """Await a command of redis-py; every one goes through here.

    A cancellation that comes meanwhile always gets through: redis-py writes under
    ``asyncio.wait_for``, which before Python 3.12 forgets one that arrives when the write is done
    already, and the task would go on for ever. An earlier one is past: what cleans up may still
    send commands.

    Raises:
        LINK_ERRORS: Whatever fails. A connection that the link drops between being made and being
            written to has None where redis-py expects its stream.
    """
    task = asyncio.current_task()
    num_cancelled = task.cancelling() if task is not None else 0
    try:
        return await command
    except AttributeError as error:
        raise ConnectionLost("the connection was dropped") from error
    finally:
        if task is not None and task.cancelling() > num_cancelled:
            raise asyncio.CancelledError


class Link:
    """Keeps a client connected; used from one event loop.

    Args:
        url: Server, see ``address.make_client``.
        namespace: First part of every key.
        timeout_s: How long an answer may take until the server is doubted.
        tls: Encrypt although the URL's scheme does not say so.
        clock: Monotonic seconds.
        rng: Spreads the reconnects of many gateways.

    Attributes:
        is_up: Whether the server answered last time.
        down_since_s: When it stopped to (``clock``); None while it is up.
        num_outages: Times it went down after having been up.
        errors: What failed, by exception name.

    Raises:
        ValueError: If the URL cannot be understood.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        timeout_s: float = 0.05,
        tls: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.is_up = False
        self.down_since_s: float | None = clock()
        self.num_outages = 0
        self.errors: Counter[str] = Counter()
        self._namespace = namespace
        self._clock = clock
        self._rng = rng or random.Random()
        self._last_error = ""
        self._client = make_client(url, timeout_s=timeout_s, tls=tls)
        self._blocking = make_client(url, timeout_s=timeout_s + BLOCK_S, tls=tls)
        self._on_up: list[Callable[[], None]] = []
        self._on_down: list[Callable[[str], None]] = []
        self._doubt = asyncio.Event()

    @property
    def client(self) -> Client:
        """The client for quick commands.

        Raises:
            LinkDown: While the server is away.
        """
        if not self.is_up:
            raise LinkDown
        return self._client

    @property
    def blocking(self) -> Client:
        """The client for reads that wait in the server, at most ``BLOCK_S``.

        Raises:
            LinkDown: While the server is away.
        """
        if not self.is_up:
            raise LinkDown
        return self._blocking

    def key(self, pool: str, *parts: str) -> str:
        """Return the name of a key that belongs to a pool (or to any other one thing)."""
        return make_key(self._namespace, pool, *parts)

    def on_up(self, callback: Callable[[], None]) -> None:
        """Call back each time the server came (back); at once if it is there."""
        self._on_up.append(callback)
        if self.is_up:
            callback()

    def on_down(self, callback: Callable[[str], None]) -> None:
        """Call back with the reason each time the server went away."""
        self._on_down.append(callback)

    def report(self, error: BaseException) -> None:
        """Count what a caller met, and find out whether the server is still there."""
        self.errors[type(error).__name__] += 1
        self._doubt.set()

    async def run(self) -> None:
        """Connect and stay connected until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        try:
            while True:
                if await self._answers():
                    backoff_s = _FIRST_BACKOFF_S
                    self._set_up()
                    self._set_down(await self._watch())
                await self._disconnect()
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self.is_up = False
            await close_client(self._client)
            await close_client(self._blocking)

    async def _watch(self) -> str:
        """Return why the server is gone, when it is."""
        while True:
            try:
                async with asyncio.timeout(_PING_EVERY_S):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            self._doubt.clear()
            if not await self._answers() and not await self._answers():
                return self._last_error

    async def _answers(self) -> bool:
        try:
            await answer(self._client.ping())
        except (RedisError, OSError) as error:
            self.errors[type(error).__name__] += 1
            # Never the message: it may hold the address with its password.
            self._last_error = type(error).__name__
            return False
        return True

    async def _disconnect(self) -> None:
        """Drop all connections, so that whoever still waits on one is woken."""
        for client in (self._client, self._blocking):
            try:
                await client.connection_pool.disconnect()
            except (RedisError, OSError) as error:
                self.errors[type(error).__name__] += 1

    def _set_up(self) -> None:
        self.is_up = True
        self.down_since_s = None
        self._doubt.clear()
        for callback in self._on_up:
            callback()

    def _set_down(self, reason: str) -> None:
        self.is_up = False
        self.down_since_s = self._clock()
        self.num_outages += 1
        for callback in self._on_down:
            callback(reason)

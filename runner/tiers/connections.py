"""A few connections to one server for many threads, and the patience with one that is away."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from runner.tiers.resp import OversizedError, ReplyError, RespClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.tiers.resp import Address

T = TypeVar("T")

# The server serves one command at a time: more connections only hold more in flight.
MAX_CONNECTIONS = 4
# A server in the same network accepts within a millisecond, or is gone.
CONNECT_S = 1.0
# First and longest time in which a server that failed is not asked: a restart takes a second, and
# a server that is away for an hour must not cost every request a connection attempt.
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
# Silence for less says nothing of a server: whoever asked had hardly any time left.
MIN_SILENCE_S = 0.01


class Pause:
    """How long something that failed is left alone: twice as long after each failure in a row.

    From any thread; a lost race between two of them makes a pause a little shorter or longer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s = float("-inf")
        self._next_s = MIN_PAUSE_S

    @property
    def is_on(self) -> bool:
        """Whether it is to be left alone now."""
        return self._clock() < self._until_s

    def failed(self) -> None:
        """Begin a pause, unless one is on: threads that fail together failed once."""
        if not self.is_on:
            self._until_s = self._clock() + self._next_s
            self._next_s = min(2 * self._next_s, MAX_PAUSE_S)

    def succeeded(self) -> None:
        """End it: the next failure is the first again."""
        self._until_s = float("-inf")
        self._next_s = MIN_PAUSE_S


class Connections:
    """Lends a connection to one thread at a time; from any thread."""

    def __init__(self, address: Address, clock: Callable[[], float]) -> None:
        """Connect to nobody yet."""
        self._address = address
        self._clock = clock
        self._pause = Pause(clock)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: list[RespClient] = []
        self._is_closed = False

    @property
    def is_paused(self) -> bool:
        """Whether the server is left alone for a while."""
        return self._pause.is_on

    def use(self, work: Callable[[RespClient], T], deadline_s: float) -> T:
        """Run ``work`` on a connection and return what it returns.

        An idle connection may have died unnoticed: if nothing at all came on it, ``work`` is run
        once more on a new one.

        Args:
            work: Its exceptions come out of here. A connection that it leaves with replies pending
                is closed.
            deadline_s: For getting a connection; ``work`` has its own.

        Raises:
            TimeoutError: If no connection is to be had in time.
            ReplyError: If the server does not let us in, or ``work`` lets a refusal out.
            OSError: If the server is away, or is left alone since it was.
        """
        if self._pause.is_on:
            raise ConnectionError("the server was away and is left alone for a while")
        if self._clock() >= deadline_s:
            raise TimeoutError("the deadline has passed")
        if not self._slots.acquire(timeout=max(0.0, deadline_s - self._clock())):
            raise TimeoutError("all connections are busy")
        try:
            client = self._pop_idle()
            if client is not None:
                try:
                    return self._run(client, work)
                except TimeoutError:
                    raise
                except OSError:
                    if client.has_answered:
                        raise
                    self._close_idle()
            return self._run(self._connect(deadline_s), work)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close all that are idle; those in use when they come back."""
        with self._lock:
            self._is_closed = True
        self._close_idle()

    def _connect(self, deadline_s: float) -> RespClient:
        begun_s = self._clock()
        try:
            return RespClient(self._address, min(deadline_s, begun_s + CONNECT_S), self._clock)
        except TimeoutError:
            self._note_silence(begun_s)
            raise
        except (OSError, ReplyError):
            self._pause.failed()
            raise

    def _note_silence(self, begun_s: float) -> None:
        """Leave a server alone that said nothing since then, unless that is no time at all."""
        if self._clock() - begun_s >= MIN_SILENCE_S:
            self._pause.failed()

    def _run(self, client: RespClient, work: Callable[[RespClient], T]) -> T:
        client.has_answered = False
        begun_s = self._clock()
        try:
            result = work(client)
        except ReplyError:
            # It refuses whatever it is asked: loading, no permission, a cluster.
            self._pause.failed()
            self._put_back(client)
            raise
        except OversizedError:
            # A fault of that value, not of the server.
            client.close()
            raise
        except TimeoutError:
            client.close()
            # Late after it answered is slow, or a tight deadline; silent is away.
            if not client.has_answered:
                self._note_silence(begun_s)
            raise
        except OSError:
            client.close()
            self._pause.failed()
            raise
        except BaseException:
            client.close()
            raise
        self._pause.succeeded()
        self._put_back(client)
        return result

    def _pop_idle(self) -> RespClient | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, client: RespClient) -> None:
        with self._lock:
            if not client.num_pending and not self._is_closed:
                self._idle.append(client)
                return
        client.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for client in idle:
            client.close()

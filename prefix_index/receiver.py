"""One ZMQ socket of an endpoint, and whom what comes there is for.

Publishers either listen themselves, or connect to an address of ours; there several of them come in
through one socket and are told apart by their topic alone.

Source: vLLM 0.32 ``distributed/kv_events.py``: its publisher binds an address with ``*`` or ``::``
and connects to others, so we bind the addresses that stand for any host and connect to others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable

# Live batches that may queue in the socket: what the publishers' buffers still have, so that
# dropping more is repaired.
QUEUE_BATCHES: Final = 10_000
# What a worker may have waiting here while its replay runs: minutes of a busy engine's events.
# Beyond it all of it is dropped, which is a gap like any other.
MAX_WAITING_BYTES: Final = 32 * 2**20
# A message that is larger is refused by the transport before memory is taken for it, and its
# connection closed. Far above what a batch may have, which is counted instead.
MAX_MESSAGE_BYTES: Final = 64 * 2**20
# A peer that answers no ping for this long is gone, whatever TCP believes.
_PING_EVERY_MS: Final = 5_000
_PING_TIMEOUT_MS: Final = 15_000
# Messages taken before other tasks get their turn.
_MAX_MESSAGES_A_TURN: Final = 64
_ANY_HOSTS: Final = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::")


class TopicTakenError(ValueError):
    """Two workers of one endpoint have the same topic; the message names it."""


def is_bound(endpoint: str) -> bool:
    """Say whether an endpoint stands for any host, so that publishers connect to it."""
    return endpoint.startswith(_ANY_HOSTS)


class Inbox:
    """Messages for one subscriber, in the order they came.

    Args:
        on_message: Called when there is something to take.

    Attributes:
        num_dropped: Messages dropped because too many were waiting.
    """

    def __init__(self, on_message: Callable[[], None]) -> None:
        self.num_dropped = 0
        self._on_message = on_message
        self._messages: deque[list[bytes]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, parts: list[bytes]) -> None:
        """Add a message."""
        size = sum(map(len, parts))
        if self._num_bytes + size > MAX_WAITING_BYTES:
            self.num_dropped += len(self._messages)
            self._messages.clear()
            self._num_bytes = 0
        self._messages.append(parts)
        self._num_bytes += size
        self._on_message()

    def take(self) -> list[bytes]:
        """Return the oldest message; there must be one."""
        parts = self._messages.popleft()
        self._num_bytes -= sum(map(len, parts))
        return parts


class Receiver:
    """A SUB socket and the subscribers it serves; used from one event loop.

    The socket is open while somebody has joined.

    Attributes:
        endpoint: Where it connects or listens.
        num_unclaimed: Messages that were for nobody here.
    """

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self.num_unclaimed = 0
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Longest topic first: a message is for whom it names most precisely.
        self._inboxes: dict[bytes, Inbox] = {}

    def join(self, topic: str, inbox: Inbox) -> None:
        """Deliver messages whose topic begins with this one; call from the event loop.

        Raises:
            TopicTakenError: If somebody else takes them.
            zmq.ZMQError: If the endpoint cannot be bound or is none.
        """
        name = topic.encode()
        if name in self._inboxes:
            raise TopicTakenError(f"topic {topic!r} of {self.endpoint} is another worker's")
        socket = self._socket or self._open()
        self._inboxes[name] = inbox
        self._inboxes = dict(sorted(self._inboxes.items(), key=lambda item: -len(item[0])))
        socket.subscribe(name)
        # What came meanwhile may have used up the wake-up.
        self._drain()

    def leave(self, topic: str) -> None:
        """End what ``join`` began; whoever has not joined may leave."""
        if self._inboxes.pop(topic.encode(), None) is None or self._socket is None:
            return
        self._socket.unsubscribe(topic.encode())
        if not self._inboxes:
            assert self._loop is not None
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _open(self) -> zmq.Socket[bytes]:
        socket = open_socket(self._context, zmq.SUB, self.endpoint)
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket, self._drain)
        return socket

    def _drain(self) -> None:
        """Take what is there: ZMQ wakes its reader once, not as long as something is left."""
        for _ in range(_MAX_MESSAGES_A_TURN):
            if self._socket is None:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(parts)
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _deliver(self, parts: list[bytes]) -> None:
        for topic, inbox in self._inboxes.items():
            if parts[0].startswith(topic):
                inbox.put(parts)
                return
        self.num_unclaimed += 1


class Receivers:
    """The receivers of one process, one for each endpoint."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.context = context
        self._by_endpoint: dict[str, Receiver] = {}

    def at(self, endpoint: str) -> Receiver:
        """Return the receiver of an endpoint."""
        receiver = self._by_endpoint.get(endpoint)
        if receiver is None:
            receiver = self._by_endpoint[endpoint] = Receiver(self.context, endpoint)
        return receiver


def open_socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """Return a plain socket on an endpoint, with the limits that every socket here has."""
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
    opened = plain.socket(kind)
    configure(opened)
    try:
        if is_bound(endpoint):
            opened.bind(endpoint)
        else:
            opened.connect(endpoint)
    except zmq.ZMQError:
        opened.close()
        raise
    return opened


def configure(opened: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    """Set the limits."""
    opened.linger = 0
    opened.rcvhwm = QUEUE_BATCHES
    opened.maxmsgsize = MAX_MESSAGE_BYTES
    opened.ipv6 = True
    opened.setsockopt(zmq.HEARTBEAT_IVL, _PING_EVERY_MS)
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS)

"""Publishes KV events over ZMQ: a PUB socket for live batches, a ROUTER socket for replay.

Every batch gets the next sequence number from 0; the newest batches are kept for subscribers that
come late or lost some. A process start is a new epoch: numbers begin again and nothing is replayed
from before.

Source: vLLM 0.32 ``distributed/kv_events.py``. One difference: both sockets always bind, since
vLLM's rule (``tcp://127.0.0.1:PORT`` connects) makes the first messages get lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog
import zmq

from prefix_index.events import EventBatch, encode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.events import Event

# vLLM's defaults (`buffer_steps`, `hwm`): what operators and subscribers already reckon with.
BUFFER_BATCHES = 10_000
HIGH_WATER_MARK = 100_000

# vLLM marks the end of a replay with -1 as an unsigned number and an empty payload.
END_OF_REPLAY = b"\xff" * 8

# One runner process is one data-parallel rank.
DATA_PARALLEL_RANK = 0

# A batch is encoded and sent in well under a millisecond, so a longer wait means a stuck thread.
CLOSE_TIMEOUT_S = 5.0

# Time for the last batches to leave at close; only a stuck subscriber uses it up.
LINGER_MS = 500

log = structlog.get_logger(__name__)


class PublisherError(RuntimeError):
    """A socket could not be bound; the message names the endpoint."""


class EventPublisher:
    """Owns both sockets in a thread of its own.

    Attributes:
        endpoint: Where subscribers connect, with the real port.
        replay_endpoint: Where replays are asked for; None without replay.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str,
        clock: Callable[[], float] = time.time,
        buffer_batches: int = BUFFER_BATCHES,
    ) -> None:
        """Bind the sockets; nothing is sent before ``start``.

        Raises:
            PublisherError: If an endpoint cannot be bound.
        """
        self.topic = topic
        self._topic = topic.encode()
        self._clock = clock
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._next_sequence = 0
        self._inbox: deque[tuple[float, list[Event]]] = deque()
        self._is_closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        try:
            self._publish_socket, self.endpoint = self._bind(zmq.PUB, endpoint)
            self._replay_socket: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay_socket, self.replay_endpoint = self._bind(zmq.ROUTER, replay_endpoint)
        except PublisherError:
            self._release()
            raise

    def _bind(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        # The default of 1,000 would silently cut a replay of the whole buffer.
        opened.set_hwm(HIGH_WATER_MARK)
        if "[" in endpoint:
            opened.setsockopt(zmq.IPV6, 1)
        try:
            opened.bind(endpoint)
        except zmq.ZMQError as error:
            opened.close(0)
            raise PublisherError(f"cannot bind {endpoint}: {error}") from error
        return opened, _with_real_port(endpoint, opened.get_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def publish(self, events: list[Event]) -> None:
        """Queue the events of one engine step; returns at once, from any thread."""
        self._inbox.append((self._clock(), events))
        self._wake()

    def close(self) -> None:
        """Send what is queued, then close both sockets."""
        self._is_closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._release()

    def describe(self) -> dict[str, Any]:
        """Return this source as ``GET /kv_event_sources`` lists it."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self._buffer.maxlen,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": self.topic,
        }

    def _wake(self) -> None:
        # A full buffer means that a wake-up is on its way already.
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"\0")

    def _release(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._replay_socket is not None:
            poller.register(self._replay_socket, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._wake_receiver.fileno() in ready:
                self._clear_wake_ups()
            self._send_queued()
            if self._replay_socket is not None and self._replay_socket in ready:
                self._answer_replay(self._replay_socket)
        self._send_queued()

    def _clear_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _send_queued(self) -> None:
        while self._inbox:
            ts, events = self._inbox.popleft()
            payload = encode_batch(EventBatch(ts, events, DATA_PARALLEL_RANK))
            sequence = self._next_sequence
            self._next_sequence += 1
            self._buffer.append((sequence, payload))
            self._publish_socket.send_multipart((self._topic, _number(sequence), payload))

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        asked = replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            log.warning("replay_request_refused", num_frames=len(asked))
            return
        client, start = asked[0], int.from_bytes(asked[2], "big")
        for sequence, payload in self._buffer:
            if sequence >= start:
                replay.send_multipart((client, b"", self._topic, _number(sequence), payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _with_real_port(endpoint: str, bound: str) -> str:
    """Keep the endpoint as configured (``*`` included) but with the port the system chose."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    return f"{endpoint.rpartition(':')[0]}:{bound.rpartition(':')[2]}"

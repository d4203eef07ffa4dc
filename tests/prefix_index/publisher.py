"""A KV-event publisher over real sockets that can lose, forget and garble."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

import zmq
import zmq.asyncio

END = b"\xff" * 8


class Publisher:
    """PUB and ROUTER on loopback, as vLLM has them.

    Args:
        port: Of the PUB socket.
        replay_port: Of the ROUTER socket, which is always bound.
        topic: First part of what is sent.
        old: Answer replays in three parts.
        connects: The PUB socket connects to somebody who listens.

    Attributes:
        buffer: What the replay socket offers: (sequence, payload).
        questions: Sequences that were asked for.
        topic: First part of what is sent.
        answers: False: the replay socket reads and stays silent.
        max_answer: Batches of an answer that its queue takes, the last one among them.
    """

    def __init__(
        self,
        port: int,
        replay_port: int,
        *,
        topic: bytes = b"kv@w@m",
        old: bool = False,
        connects: bool = False,
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}"
        self.buffer: list[tuple[int, bytes]] = []
        self.questions: list[int] = []
        self.answers = True
        self.sequence = 0
        self.topic = topic
        self.max_answer: int | None = None
        self._old = old
        self._connects = connects

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        # XPUB tells when a subscription is in force, so that tests need not sleep.
        self._pub = self._socket(zmq.XPUB, self.endpoint, connects=self._connects)
        self._router = self._socket(zmq.ROUTER, self.replay_endpoint)
        self._task = asyncio.create_task(self._serve_replay())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._pub.close()
        self._router.close()
        self._context.term()

    async def subscribed(self) -> None:
        """Wait until somebody's subscription is in force."""
        async with asyncio.timeout(10):
            await self._pub.recv()

    async def publish(self, payload: bytes, *, live: bool = True, kept: bool = True) -> int:
        """Number a batch, keep it for replay, send it; return its number."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        if kept:
            self.buffer.append((sequence, payload))
        if live:
            await self.send(sequence.to_bytes(8, "big"), payload)
        return sequence

    async def send(self, *parts: bytes) -> None:
        """Send any parts behind the topic."""
        await self._pub.send_multipart([self.topic, *parts])

    def _socket(self, kind: int, endpoint: str, *, connects: bool = False) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        if connects:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
        return socket

    async def _serve_replay(self) -> None:
        while True:
            client, empty, asked = await self._router.recv_multipart()
            first = int.from_bytes(asked, "big")
            self.questions.append(first)
            if not self.answers:
                continue
            topic = [] if self._old else [self.topic]
            wanted = [batch for batch in self.buffer if batch[0] >= first]
            if self.max_answer is not None and len(wanted) > self.max_answer:
                # Its queue is full: a batch in between is dropped, then all others too.
                wanted = [*wanted[: self.max_answer - 1], wanted[-1]]
            for sequence, payload in wanted:
                parts = [client, empty, *topic, sequence.to_bytes(8, "big"), payload]
                await self._router.send_multipart(parts)
            end = [client, empty, *([] if self._old else [b""]), END, b""]
            await self._router.send_multipart(end)

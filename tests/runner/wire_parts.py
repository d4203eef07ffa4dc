"""Blocks with made-up bytes, and servers that misbehave on purpose, for the tests of transfers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

from runner.kvkeys import BlockChain, namespace_key, root_key
from runner.tiers.types import BlockRecord, Place

NAMESPACE = namespace_key({"model": "made up"})
BLOCK_SIZE = 4
BLOCK_BYTES = 10_000
# Far beyond what any of these tests takes, so that only a hang reaches it.
LONG_S = 20.0


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def make_places(num_blocks: int, *, seed: int = 0) -> list[Place]:
    """Return the neighbouring blocks of one made-up sequence."""
    rng = Random(seed)
    chain = BlockChain(root_key(NAMESPACE), BLOCK_SIZE)
    chain.extend([rng.randrange(2**31) for _ in range(num_blocks * BLOCK_SIZE)])
    return [
        Place(BlockRecord(key, chain.parent(at), chain.tokens[at], at))
        for at, key in enumerate(chain.keys)
    ]


def make_payloads(num_blocks: int, *, num_bytes: int = BLOCK_BYTES, seed: int = 0) -> list[bytes]:
    rng = Random(f"bytes {seed}")
    return [rng.randbytes(num_bytes) for _ in range(num_blocks)]


def views(payloads: list[bytes]) -> list[memoryview]:
    return [memoryview(payload) for payload in payloads]


class Collected:
    """A ``Deliver`` that keeps what it gets; it says stop at ``stop_at`` blocks."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.blocks: list[bytes] = []
        self._stop_at = stop_at

    def __call__(self, at: int, payload: memoryview) -> bool:
        if len(self.blocks) == self._stop_at:
            return False
        assert at == len(self.blocks), "not in order"
        self.blocks.append(bytes(payload))
        return True


Script = Callable[[socket.socket], object]


class ScriptedServer:
    """Answers every TCP connection by the same script, in a thread of its own.

    Attributes:
        port: On loopback.
        num_connections: Connections so far.
    """

    def __init__(self, script: Script) -> None:
        self.num_connections = 0
        self._script = script
        self._stopping = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def stop(self) -> None:
        self._stopping.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG_S)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.num_connections += 1
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self._script(connection)


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    try:
        yield server
    finally:
        server.stop()


def hangs(connection: socket.socket) -> None:
    """Take everything and never answer."""
    while connection.recv(65536):
        pass


def says(*pieces: bytes, then: Script | None = None) -> Script:
    """Wait for something, then send pieces; close the connection, or go on as ``then``."""

    def script(connection: socket.socket) -> None:
        connection.recv(65536)
        for piece in pieces:
            connection.sendall(piece)
        if then is not None:
            then(connection)

    return script

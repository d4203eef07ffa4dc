"""What is fuzzed: each target takes bytes and raises when something is wrong with how they went."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING

from bench import fuzz_forms
from bench.fuzz_front import PATHS, Fronts
from gateway.proxy.sse import StreamObserver
from gateway.proxy.sse_typed import TypedObserver
from prefix_index.events import EventDecodeError, decode_batch, encode_batch
from tests.fakes.engine import DONE, FINISH, ROLE, content, event, openai_engine, usage
from tests.fakes.gateway import Gateway, gateway
from tests.prefix_index.capture import FILES, FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}]}).encode()


def cut(data: bytes) -> list[bytes]:
    """Cut data in pieces, where its own bytes say: the same input always in the same pieces."""
    random = Random(data)
    sizes = random.choice(((len(data) + 1,), (100, 400), (1, 3, 20, 90)))
    pieces, at = [], 0
    while at < len(data):
        size = random.choice(sizes)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def observe(data: bytes) -> None:
    """A stream cut anywhere passes unchanged, and is taken for the same as in one piece."""
    for make in (StreamObserver, lambda: TypedObserver("messages")):
        whole, split = make(), make()
        passed = whole.feed(data)
        got = b"".join([split.feed(piece) for piece in cut(data)])
        assert passed + whole.rest() == data
        assert got + split.rest() == data
        assert whole.has_token >= split.has_token or not passed
        assert whole.end() == split.end()
    stripping, again = StreamObserver(strips_usage=True), StreamObserver(strips_usage=True)
    kept = b"".join([stripping.feed(piece) for piece in cut(data)]) + stripping.rest()
    assert again.feed(kept) + again.rest() == kept, "events are left out of what was left"


def decode(data: bytes) -> None:
    """A batch of KV events is decoded or refused, and what was decoded reads the same again."""
    try:
        batch = decode_batch(data)
    except EventDecodeError:
        return
    again = decode_batch(encode_batch(batch))
    assert again.events == batch.events


class Api:
    """Bodies for every path through a whole gateway: no failure of its own may come of any."""

    paths = (*PATHS, "/v1/responses", "/v1/embeddings", "/v1/messages", "/tokenize")

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engine = openai_engine()
        self._runner.run(self._engine.__aenter__())
        self._gateway = gateway(self._engine.url)
        self._running: Gateway = self._runner.run(self._gateway.__aenter__())

    def __call__(self, data: bytes) -> None:
        self._runner.run(self._post(data))

    async def _post(self, data: bytes) -> None:
        path = self.paths[len(data) % len(self.paths)]
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(20):
            status, body, _ = await self._running.post(path, data=data, headers=headers)
        # The engine of these tests does not know all that it is asked for: that is its 5xx.
        if status >= 500 and b"internal_error" in body:
            raise AssertionError(f"{path}: {status} {body!r}")


def captured() -> list[bytes]:
    """Return batches of every shape that engines were seen to send, a few of each file."""
    lines = [line for name in FILES for line in (FOLDER / f"{name}.jsonl").read_text().split("\n")]
    frames = [json.loads(line) for line in lines if '"frames"' in line]
    payloads = [bytes.fromhex(frame["parts"][-1]) for frame in frames]
    return [payload for payload in payloads if len(payload) < 2000]


class Front(Fronts):
    """Both fronts, given each input in pieces."""

    def __call__(self, data: bytes) -> None:
        self.check(cut(data))


def _post(body: bytes, *lines: str) -> bytes:
    head = ["POST /v1/chat/completions HTTP/1.1", "host: gw", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


_SIZED = _post(BODY, f"content-length: {len(BODY)}")
_CHUNKED = _post(
    b"7;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx-t: 1\r\n\r\n" % (BODY[:7], len(BODY) - 7, BODY[7:]),
    "transfer-encoding: chunked",
)
_STREAM = ROLE + content("a") + content("b") + FINISH
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n"

# Name -> (makes the target, inputs to begin with, words that mean something to it).
TARGETS: dict[str, tuple[Callable[[], Callable[[bytes], None]], list[bytes], list[bytes]]] = {
    "sse": (
        lambda: observe,
        [
            _STREAM + DONE,
            _STREAM + event(choices=[], usage=usage(7, 2, 3)) + DONE,
            _STREAM.replace(b"\n", b"\r\n"),
            b': comment\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
            event(error={"message": "oom"}),
        ],
        [
            b"data: ",
            b"\n\n",
            b"\r\n\r\n",
            b"\r\r",
            b"\r",
            b'"choices":[]',
            b'"usage":{}',
            b"[DONE]",
            b"\xc3",
            b'"prompt_tokens":1',
            b"event: ",
        ],
    ),
    "events": (
        lambda: decode,
        captured(),
        [
            b"BlockStored",
            b"BlockRemoved",
            b"AllBlocksCleared",
            b"\x93",
            b"\x80",
            b"\xc0",
            b"\xcf",
            b"type",
            b"token_ids",
            b"block_hashes",
            b"extra_keys",
        ],
    ),
    "forms": (lambda: fuzz_forms.check, fuzz_forms.SEEDS, fuzz_forms.WORDS),
    "front": (
        Front,
        [
            _SIZED,
            _SIZED * 2 + MODELS,
            _CHUNKED + _SIZED,
            MODELS + _CHUNKED,
            _post(BODY, f"content-length: {len(BODY)}", "expect: 100-continue"),
            _SIZED.replace(b"1.1", b"1.0"),
            _post(BODY, f"Content-Length:{len(BODY)}", "X-A: é"),
        ],
        [
            b"\r\n",
            b"\n",
            b"\r",
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"chunked",
            b" ",
            b"\t",
            b":",
            b"0\r\n\r\n",
            b"connection: close\r\n",
            b"HTTP/1.0",
            b"host: a\r\n",
            b"\x00",
            b"+",
            b"-",
            b"0x",
            b"upgrade: h2c\r\n",
            b"content-encoding: gzip",
        ],
    ),
    "api": (
        Api,
        [
            BODY,
            b'{"model":"m","stream":true,"messages":[{"role":"user","content":[{"type":"text"}]}]}',
            b'{"model":"m","prompt":[1,2],"max_tokens":1,"input":"x"}',
            b'{"model":"m","max_tokens":5,"system":[],"tools":[{"name":"f","input_schema":{}}],'
            b'"messages":[{"role":"user","content":"q"}]}',
            b'{"model":"m","messages":[{"role":"system","content":null}],"cache_salt":"s",'
            b'"stream_options":{"include_usage":true},"warmlane":{"documents":[{"id":"d"}]}}',
        ],
        [
            b"null",
            b"[]",
            b"{}",
            b'""',
            b"1e400",
            b"-1",
            b"true",
            b"\\ud800",
            b'"model":',
            b"1" * 30,
            b'"messages":',
            b'"stream":',
            b'"content":',
            b'"role":',
            b'"tools":',
            b'"tool_calls":',
            b'"type":"image"',
            b'"warmlane":',
            b'"kv_transfer_params":',
            b'"n":',
            b'"input":',
        ],
    ),
}

"""A whole gateway with warm-up over engines that cache, and documents to warm."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from prefix_index.blocks import usable_blocks
from tests.fakes.engine import RawEngine, Script, Seen, answer, usage
from tests.gateway.routing_parts import BLOCK, CHATML, byte_tokenizer, prompt_reader
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from prefix_index.blocks import BlockHash

MARKER = "\0question\0"
Event = dict[str, Any]


@dataclass
class Caching:
    """An engine that keeps what it computed, until it is told to forget, and reports hits.

    ``before`` may answer a POST itself. ``computed`` has the tokens of each prompt that it had to
    compute, by surface of the request.
    """

    reports_cached: bool = True
    context_tokens: int = 8192
    capacity_tokens: int = 0
    epoch: float = 1.0
    prefill_token_s: float = 0.0
    before: Callable[[Seen], Script | None] | None = None
    held: set[BlockHash] = field(default_factory=set)
    prompts: list[list[int]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = prompt_reader()

    @property
    def computed_tokens(self) -> int:
        return sum(self.computed)

    def respond(self, seen: Seen) -> Script:
        if seen.method == "GET":
            return self._get(seen)
        scripted = None if self.before is None else self.before(seen)
        if scripted is not None:
            return scripted
        if seen.target == "/reset_prefix_cache":
            self.held.clear()
            return answer(b"")
        body = seen.json()
        if seen.target == "/generate":
            ids, is_chat = body["input_ids"], False
        elif "messages" in body:
            ids, is_chat = list(self._reader.chat(body).complete().token_ids), True
        else:
            ids, is_chat = body["prompt"], False
        if seen.target == "/tokenize":
            return answer(b"{}", 404)
        self.bodies.append(body)
        prompt = self._reader.completion(ids).complete()
        usable, cached = usable_blocks(prompt.num_tokens, BLOCK), 0
        while cached < usable and prompt.block_hashes[cached] in self.held:
            cached += 1
        self.held.update(prompt.block_hashes)
        self.prompts.append(list(prompt.token_ids))
        computed = prompt.num_tokens - cached * BLOCK
        self.computed.append(computed)
        pause: Script = [computed * self.prefill_token_s]
        if seen.target == "/generate":
            counts = {"prompt_tokens": prompt.num_tokens, "completion_tokens": 1}
            counts["cached_tokens"] = cached * BLOCK
            return pause + answer(json.dumps({"text": "Y", "meta_info": counts}).encode())
        part = {"message": {"role": "assistant", "content": "Y"}} if is_chat else {"text": "Y"}
        choice = {"index": 0, "finish_reason": "length", **part}
        counts = usage(prompt.num_tokens, 1, cached * BLOCK if self.reports_cached else None)
        document = {"id": "x", "model": "m", "choices": [choice], "usage": counts}
        return pause + answer(json.dumps(document).encode())

    def restart(self) -> None:
        """Become a new process with an empty cache."""
        self.epoch += 1.0
        self.held.clear()

    def _get(self, seen: Seen) -> Script:
        if seen.target == "/v1/models":
            card = {"id": "m", "max_model_len": self.context_tokens}
            return answer(json.dumps({"data": [card]}).encode())
        if seen.target == "/metrics":
            lines = [f"process_start_time_seconds {self.epoch}"]
            if self.capacity_tokens:
                blocks = self.capacity_tokens // BLOCK
                labels = f'block_size="{BLOCK}",num_gpu_blocks="{blocks}"'
                lines.append(f"vllm:cache_config_info{{{labels}}} 1.0")
            return answer("\n".join([*lines, ""]).encode(), 200, "content-type: text/plain")
        return answer(b"{}")


@dataclass
class Warming:
    """What a test needs of a running gateway."""

    gateway: Gateway
    url: str
    session: aiohttp.ClientSession

    async def warm(self, items: list[Event], **more: Any) -> list[Event]:
        """Run a warm-up and return its events; an error's document if there is no stream."""
        body = {"model": "m", "items": items, **more}
        async with self.session.post(self.url + "/admin/v1/warm", json=body) as response:
            lines = (await response.read()).splitlines()
            return [json.loads(line) for line in lines if line]

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def ask(self, text: str, question: str, document_id: str = "", **headers: str) -> Any:
        """Ask a question about a document, as a client does."""
        if document_id:
            headers["x-document-id"] = document_id
        status, found = await self.post("/v1/chat/completions", asking(text, question),
                                        headers=headers)  # fmt: skip
        assert status == 200, found
        return found


@asynccontextmanager
async def warming(
    folder: Path, *urls: str, index: dict[str, Any] | None = None, **pool: Any
) -> AsyncIterator[Warming]:
    """Serve one pool of the model ``m`` over workers ``w0, w1, ...``."""
    workers = [{"id": f"w{k}", "url": url} for k, url in enumerate(urls)]
    config = {
        "name": "chat",
        "models": ["m"],
        "engine": "vllm",
        "tokenizer": str(byte_tokenizer_dir(folder)),
        "block_size": BLOCK,
        "workers": workers,
    } | pool
    flags: dict[tuple[str, ...], Any] = {("pools",): [config]}
    if index is not None:
        flags["index",] = index
    settings, _ = load(None, flags=flags, environ={})
    gateway = Gateway(settings)
    await gateway.start()
    listener = await Listener.start(gateway.app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        try:
            yield Warming(gateway, f"http://127.0.0.1:{listener.port}", session)
            books = [w.books for p in gateway.fleet.pools for w in p.workers.values()]
            await poll_until(lambda: not any(b.in_flight for b in books), what="nothing in flight")
            assert not any(b.queued_tokens or b.active_tokens for b in books)
        finally:
            await listener.stop(0.0)
            await gateway.close()


@asynccontextmanager
async def warming_over(
    folder: Path, *engines: Caching, **pool: Any
) -> AsyncIterator[tuple[Warming, list[RawEngine]]]:
    """Serve over scripted engines."""
    raws = [RawEngine(engine.respond) for engine in engines]
    for raw in raws:
        await raw.__aenter__()
    try:
        async with warming(folder, *(raw.url for raw in raws), **pool) as running:
            yield running, raws
    finally:
        for raw in raws:
            await raw.stop()


def byte_tokenizer_dir(folder: Path) -> Path:
    """A folder with the tokenizer of one token per byte."""
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(byte_tokenizer()._tokenizer.to_str())
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def text_of(name: str, chars: int = 800) -> str:
    """The text of a document, unlike any other's from its first character on."""
    line = f"{name}: section %d of the handbook says what to do. "
    text = "".join(line % number for number in range(chars // 20))
    return text[:chars]


def asking(text: str, question: str) -> dict[str, Any]:
    """A chat body about a document."""
    system = {"role": "system", "content": text}
    return {"model": "m", "messages": [system, {"role": "user", "content": question}]}


def item(name: str, text: str | None = None, **more: Any) -> Event:
    """An item to be warmed: the body that clients will send, the question as a mark."""
    body = asking(text_of(name) if text is None else text, MARKER)
    return {"id": name, "body": body, "marker": MARKER, **more}


def of(events: list[Event], kind: str) -> list[Event]:
    """The events of one kind."""
    return [event for event in events if event.get("event") == kind]


def end(events: list[Event]) -> Event:
    """The last event, which must be the end."""
    assert events, "no events"
    assert events[-1].get("event") == "end", events[-1]
    return events[-1]

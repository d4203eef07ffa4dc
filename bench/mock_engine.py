"""A mock engine in a process of its own: everything of an engine that a router sees, in real time.

    python -m bench.mock_engine --port 8101 --model m --tokenizer models/smollm2 \
        --kv-events tcp://127.0.0.1:5557 --kv-replay tcp://127.0.0.1:5657

It reads prompts as vLLM does, batches, prefills and decodes at the speed of a modelled GPU
(``gateway/replay/engine.py``: continuous batching, a paged LRU cache), announces its blocks over
ZMQ in vLLM's format with replay, and answers OpenAI requests with ``cached_tokens``. Only the words
are empty. Speeds are those of Llama 8B on one H100 unless ``--slowdown`` stretches time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateway.replay.engine import Engine, Job
from gateway.replay.presets import load_engine_model
from prefix_index.blocks import hash_blocks, root_hash
from prefix_index.chat import ChatTemplate
from prefix_index.event_types import AllBlocksCleared, BlockRemoved, BlockStored, Event
from prefix_index.prompts import Prompt, PromptReader
from prefix_index.tokens import PromptTokenizer
from runner.publisher import EventPublisher

if TYPE_CHECKING:
    from gateway.replay.engine import EngineModel
    from gateway.replay.kv_cache import Change
    from prefix_index.blocks import BlockHash

# Tokens leave in bunches, as from an engine whose API server is busy.
TICK_S = 0.01
DEFAULT_OUTPUT_TOKENS = 16
WORD = "word "
MEDIA = {"gpu": "GPU", "cpu": "CPU", "disk": "DISK"}


@dataclass(slots=True, eq=False)
class Running:
    """One request in the engine."""

    job: Job
    first: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class TimedEngine:
    """The modelled engine on the event loop's clock, with its announcements."""

    def __init__(self, model: EngineModel, publisher: EventPublisher) -> None:
        self.model = model
        self.prompt_tokens = self.hit_tokens = self.generation_tokens = 0
        self._engine = Engine(model, self._announce)
        self._publisher = publisher
        self._events: list[Event] = []
        # Tokens of every block that is cached or wanted, as events name them.
        self._tokens: dict[BlockHash, list[int]] = {}
        self._wanted: Counter[BlockHash] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._engine.waiting)

    @property
    def fill(self) -> float:
        return self._engine.cache.num_cached / self._engine.cache.gpu_blocks

    def submit(self, prompt: Prompt, output_tokens: int) -> Running:
        """Take a request.

        Raises:
            ValueError: If it can never fit.
        """
        size, ids = self.model.block_tokens, prompt.token_ids
        job = Job(prompt.block_hashes, prompt.num_tokens, output_tokens, None)
        job.tag = running = Running(job)
        for at, block in enumerate(job.blocks):
            self._wanted[block] += 1
            self._tokens.setdefault(block, ids[at * size : (at + 1) * size].tolist())
        try:
            self._turn()
            self._engine.submit(job, self._loop.time())
        except ValueError:
            self._forget(job)
            raise
        self.prompt_tokens += prompt.num_tokens
        self._turn()
        return running

    def generated(self, running: Running) -> int:
        """Return how many tokens of a request are out."""
        now_s = min(self._loop.time(), self._engine.next_s)
        return self._engine.generated_tokens(running.job, now_s)

    def reset(self) -> bool:
        """Drop the cache, if nothing runs."""
        if self.num_running or self.num_waiting:
            return False
        self._engine = Engine(self.model, self._announce)
        self._tokens.clear()
        self._publisher.publish([AllBlocksCleared()])
        return True

    def _turn(self) -> None:
        """Let the model catch up with the clock, and come back when its next step ends."""
        for job in self._engine.advance(self._loop.time()):
            running = job.tag
            assert isinstance(running, Running)
            if not running.first.is_set():
                running.first.set()
                self.hit_tokens += job.hit_tokens
            if job.finished_s is not None and not running.done.is_set():
                running.done.set()
                self.generation_tokens += job.output_tokens
                self._forget(job)
        if self._events:
            self._publisher.publish(self._events)
            self._events = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._engine.next_s < float("inf"):
            self._timer = self._loop.call_at(self._engine.next_s, self._turn)

    def _announce(self, change: Change) -> None:
        medium = MEDIA[change.tier]
        hashes: list[int | bytes] = [_engine_hash(block) for block in change.blocks]
        if not change.stored:
            self._events.append(BlockRemoved(hashes, medium=medium))
            for block in change.blocks:
                self._drop(block)
            return
        ids = [token for block in change.blocks for token in self._tokens[block]]
        parent = _engine_hash(change.parent) if change.parent else None
        self._events.append(
            BlockStored(hashes, parent, ids, self.model.block_tokens, medium=medium)
        )

    def _forget(self, job: Job) -> None:
        for block in job.blocks:
            self._wanted[block] -= 1
            if not self._wanted[block]:
                del self._wanted[block]
                self._drop(block)

    def _drop(self, block: BlockHash) -> None:
        if block not in self._wanted and not self._engine.cache.has(block):
            self._tokens.pop(block, None)


def _engine_hash(block: BlockHash) -> int:
    """Return the name of a block in the engine's own hashes, which are nobody else's."""
    return int.from_bytes(block[:8], "little") ^ 0x5A5A5A5A5A5A5A5A


class Server:
    """The HTTP side."""

    def __init__(
        self, engine: TimedEngine, reader: PromptReader | None, model: str, started_s: float
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._model = model
        self._started_s = started_s

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/reset_prefix_cache", self.reset),
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "chat.completion")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, "text_completion")

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model}]})

    async def reset(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.reset() else 409)

    async def tokenize(self, request: web.Request) -> web.Response:
        prompt = await asyncio.to_thread(self._read, await request.json())
        ids = prompt.token_ids.tolist()
        return web.json_response({"count": len(ids), "tokens": ids, "max_model_len": 131_072})

    async def metrics(self, _request: web.Request) -> web.Response:
        engine, model = self._engine, self._engine.model
        name = f'engine="0",model_name="{self._model}"'
        config = f'block_size="{model.block_tokens}",num_gpu_blocks="{model.gpu_blocks}"'
        lines = [
            f"process_start_time_seconds {self._started_s}",
            f"vllm:cache_config_info{{{config},{name}}} 1.0",
            f"vllm:num_requests_running{{{name}}} {engine.num_running}",
            f"vllm:num_requests_waiting{{{name}}} {engine.num_waiting}",
            f"vllm:kv_cache_usage_perc{{{name}}} {engine.fill}",
            f"vllm:prompt_tokens_total{{{name}}} {engine.prompt_tokens}",
            f"vllm:generation_tokens_total{{{name}}} {engine.generation_tokens}",
            f"vllm:prefix_cache_queries_total{{{name}}} {engine.prompt_tokens}",
            f"vllm:prefix_cache_hits_total{{{name}}} {engine.hit_tokens}",
        ]
        return web.Response(text="\n".join([*lines, ""]))

    def _read(self, body: dict[str, Any]) -> Prompt:
        if "messages" not in body:
            given = body["prompt"]
            if isinstance(given, list) and given and isinstance(given[0], int):
                size = self._engine.model.block_tokens
                ids, root = array("I", given), root_hash(self._model)
                return Prompt(len(ids), hash_blocks(ids, size, root), size, root, [ids])
            if self._reader is None:
                raise web.HTTPBadRequest(text="without --tokenizer prompts must be token ids")
            return self._reader.completion(given).complete()
        if self._reader is None:
            raise web.HTTPBadRequest(text="without --tokenizer there is no chat")
        return self._reader.chat(body).complete()

    async def _serve(self, request: web.Request, kind: str) -> web.StreamResponse:
        body = await request.json()
        prompt = await asyncio.to_thread(self._read, body)
        output = body.get("max_completion_tokens") or body.get("max_tokens")
        try:
            running = self._engine.submit(prompt, int(output or DEFAULT_OUTPUT_TOKENS))
        except ValueError as error:
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        if body.get("stream"):
            return await self._stream(request, running, body, kind)
        await running.done.wait()
        text = WORD * running.job.output_tokens
        part = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": "length"}
        choice |= part if kind == "chat.completion" else {"text": text}
        return web.json_response(
            {**self._head(kind), "choices": [choice], "usage": _usage(running.job)}
        )

    async def _stream(
        self, request: web.Request, running: Running, body: dict[str, Any], kind: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        is_chat = kind == "chat.completion"
        head = self._head("chat.completion.chunk" if is_chat else kind)

        async def send(text: str, finish: str | None = None) -> None:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            await response.write(_event({**head, "choices": [choice]}))

        await running.first.wait()
        await response.prepare(request)
        sent = 0
        while not running.done.is_set():
            ready = max(1, self._engine.generated(running))
            if ready > sent:
                await send(WORD * (ready - sent))
                sent = ready
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await running.done.wait()
        await send(WORD * (running.job.output_tokens - sent), "length")
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({**head, "choices": [], "usage": _usage(running.job)}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "mock", "object": kind, "created": int(time.time()), "model": self._model}


def _usage(job: Job) -> dict[str, Any]:
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.output_tokens,
        "total_tokens": job.prompt_tokens + job.output_tokens,
        "prompt_tokens_details": {"cached_tokens": job.hit_tokens},
    }


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def make_reader(folder: str | None, model: str, block_size: int) -> PromptReader | None:
    """Make what reads prompts as vLLM does, from a model's folder."""
    if folder is None:
        return None
    tokenizer = PromptTokenizer.from_dir(Path(folder))
    source = tokenizer.template_source
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens) if source else None
    return PromptReader(tokenizer, template, model=model, block_size=block_size, engine="vllm")


def make_model(options: argparse.Namespace) -> EngineModel:
    """Make the engine's model: a preset, its time stretched, its memory as asked."""
    preset, slowdown = load_engine_model(options.preset), options.slowdown
    cost = msgspec.structs.replace(
        preset.cost,
        token_s=preset.cost.token_s * slowdown,
        attention_s=preset.cost.attention_s * slowdown,
        step_s=preset.cost.step_s * slowdown,
        context_s=preset.cost.context_s * slowdown,
    )
    return msgspec.structs.replace(
        preset,
        cost=cost,
        weights_s=preset.weights_s * slowdown,
        gpu_tokens=options.pool_tokens,
        cpu_tokens=options.cpu_tokens,
        block_tokens=options.block_size,
    )


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    publisher = EventPublisher(
        options.kv_events, options.kv_replay, topic=f"kv@mock@{options.model}"
    )
    publisher.start()
    engine = TimedEngine(make_model(options), publisher)
    reader = make_reader(options.tokenizer, options.model, options.block_size)
    server = Server(engine, reader, options.model, time.time())
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port, backlog=1024).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await runner.cleanup()
    publisher.close()


def main() -> None:
    """Parse the options and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="m", help="name it serves")
    parser.add_argument("--tokenizer", help="model folder; without it prompts are token ids")
    parser.add_argument("--kv-events", default="tcp://127.0.0.1:0")
    parser.add_argument("--kv-replay")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=120_000, help="KV tokens on the device")
    parser.add_argument("--cpu-tokens", type=int, default=0, help="KV tokens of a CPU tier")
    parser.add_argument("--preset", default="8b", help="engine model")
    parser.add_argument("--slowdown", type=float, default=1.0, help="stretches all its times")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

"""A whole gateway over an engine with a prefix cache, for what operators ask it."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from gateway.admin import Admin
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.misses.report import MissReport
from gateway.proxy.limits import Limits
from gateway.proxy.server import Listener, make_app
from gateway.routing.dispatch import Dispatcher, Plan, Ticket
from gateway.telemetry.requests import Telemetry
from gateway.tokenize import Tokenize
from gateway.worth.metrics import WorthCollector
from gateway.worth.worth import Worth
from prefix_index.blocks import usable_blocks
from tests.fakes.engine import Script, Seen, answer, usage
from tests.gateway.miss_parts import message
from tests.gateway.routing_parts import BLOCK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prefix_index.blocks import BlockHash
    from prefix_index.prompts import PromptReader


@dataclass
class CachingEngine:
    """An engine over HTTP that caches prefixes for ever and reports the hit tokens of each answer.

    It renders as ``reader`` does, which a test sets before it serves anything, and takes
    ``prefill_token_s`` for each token that it does not hold.
    """

    reader: PromptReader | None = None
    held: set[BlockHash] = field(default_factory=set)
    missed_tokens: list[int] = field(default_factory=list)
    prefill_token_s: float = 0.0

    def respond(self, seen: Seen) -> Script:
        if seen.method == "GET":
            models = {"data": [{"id": "m", "max_model_len": 4096}]}
            return answer(json.dumps(models).encode())
        body = seen.json()
        assert self.reader is not None
        is_chat = "messages" in body
        draft = self.reader.chat(body) if is_chat else self.reader.completion(body["prompt"])
        prompt = draft.complete()
        if seen.target == "/tokenize":
            return answer(json.dumps({"tokens": list(prompt.token_ids)}).encode())
        usable, cached = usable_blocks(prompt.num_tokens, BLOCK), 0
        while cached < usable and prompt.block_hashes[cached] in self.held:
            cached += 1
        self.held.update(prompt.block_hashes)
        self.missed_tokens.append((usable - cached) * BLOCK)
        choice = {"index": 0, "message": message("assistant", "Yes."), "finish_reason": "stop"}
        counts = usage(prompt.num_tokens, 1, cached * BLOCK)
        document = {"id": "x", "model": "m", "choices": [choice], "usage": counts}
        return [
            self.missed_tokens[-1] * self.prefill_token_s,
            *answer(json.dumps(document).encode()),
        ]


@dataclass
class Running:
    """A whole gateway but for its process: fleet, report, admin and the client port."""

    url: str
    fleet: Fleet
    report: MissReport
    session: aiohttp.ClientSession
    worth: Worth
    telemetry: Telemetry

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@asynccontextmanager
async def running_gateway(*urls: str, **pool: Any) -> AsyncIterator[Running]:
    """Serve one pool of the model ``m`` over workers ``w0, w1, ...``."""
    workers = [{"id": f"w{k}", "url": url} for k, url in enumerate(urls)]
    config = {"name": "chat", "models": ["m"], "workers": workers, "block_size": BLOCK, **pool}
    settings = Settings.model_validate({"pools": [config]})
    fleet = Fleet(settings)
    report, worth = MissReport(), Worth(settings)

    def finished(plan: Plan, ticket: Ticket) -> None:
        fleet.finished(plan, ticket)
        report.observe(plan, ticket)
        worth.observe(plan, ticket)

    routes = Dispatcher(fleet.pools, seed=0, on_finish=finished)
    telemetry, limits = Telemetry(), Limits()
    telemetry.register(WorthCollector(worth.account))
    admin = Admin(
        routes, fleet, telemetry, limits, None, time.monotonic, report, worth=worth.account
    )
    extra = [*admin.routes(), *Tokenize(routes, limits).routes()]
    app = make_app(routes, observe=fleet.observe, limits=limits, extra_routes=extra)
    await fleet.start()
    listener = await Listener.start(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        try:
            yield Running(
                f"http://127.0.0.1:{listener.port}", fleet, report, session, worth, telemetry
            )
        finally:
            await listener.stop(0.0)
            await report.close()
            await worth.close()
            await fleet.stop()

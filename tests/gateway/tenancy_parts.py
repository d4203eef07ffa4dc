"""A whole gateway with tenants, over engines that answer anything and keep what they were sent."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

import tests.fakes.gateway as fakes
from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.fakes.engine import Script, Seen, answer, usage
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from tests.fakes.engine import RawEngine

CHAT = "/v1/chat/completions"
# What a test's tenants prove themselves with.
KEYS = {
    "K1": "key-t1",
    "K2": "key-t2",
    "SALT": "what only the operator knows",
    "ADMIN": "the admin's token",
}
T1 = {"name": "t1", "key_env": "K1"}
T2 = {"name": "t2", "key_env": "K2"}


def respond(seen: Seen) -> Script:
    """Answer as an engine does, with usage where it was asked to complete something."""
    if seen.method == "GET":
        return answer(b"{}")
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ok"},
        "finish_reason": "stop",
    }
    document = {"id": "x", "model": "m", "choices": [choice], "usage": usage(40, 10, 0)}
    return answer(json.dumps(document).encode())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def asking(text: str = "q", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@dataclass
class Serving:
    """What a test needs of it."""

    gateway: Gateway
    url: str
    session: aiohttp.ClientSession

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """POST JSON; return status, document and headers of the answer."""
        options |= {} if "data" in options else {"json": body}
        async with self.session.post(self.url + path, headers=headers, **options) as response:
            return response.status, json.loads(await response.read()), response.headers

    async def ask(self, key: str, body: object = None, **headers: str) -> int:
        """Send a chat with a key; return the status."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        status, _, _ = await self.post(CHAT, body or asking(), bearer(key) | names)
        return status

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        async with self.session.get(self.url + path, headers=headers) as response:
            data = await response.read()
            return (
                response.status,
                json.loads(data) if data[:1] in b"{[" else data,
                response.headers,
            )


@asynccontextmanager
async def serving(
    *engines: RawEngine, pool: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Serving]:
    """Run a gateway over the engines; ``config`` are sections of its configuration."""
    workers = [{"id": f"w{k}", "url": engine.url} for k, engine in enumerate(engines)]
    pools = config.pop("pools", None) or [
        {"name": "chat", "models": ["m"], "engine": "vllm", "workers": workers} | (pool or {})
    ]
    flags = {("pools",): pools} | {(name,): value for name, value in config.items()}
    settings, _ = load(None, flags=flags, environ={})
    gateway = Gateway(settings)
    await gateway.start()
    listener = await Listener.start(gateway.app, "127.0.0.1", 0, front=fakes.default_front)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            yield Serving(gateway, f"http://127.0.0.1:{listener.port}", session)
            pools_of = gateway.fleet.pools
            await poll_until(
                lambda: not any(w.books.in_flight for p in pools_of for w in p.workers.values()),
                what="nothing is in flight",
            )
        finally:
            await listener.stop(0.0)
            await gateway.close()


def sent(engine: RawEngine) -> list[Seen]:
    """Return the requests to complete something that an engine got."""
    return [
        seen for seen in engine.seen if seen.method == "POST" and "/tokenize" not in seen.target
    ]

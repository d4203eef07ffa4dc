"""A whole gateway with its console, over engines that cache."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.fakes.engine import RawEngine
from tests.gateway.routing_parts import BLOCK
from tests.gateway.warm_parts import Caching, asking, byte_tokenizer_dir, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKEN = "console-token-for-tests"  # noqa: S105  # protects nothing


@dataclass
class Consoled:
    """What a test needs of a running gateway."""

    gateway: Gateway
    listener: Listener
    session: aiohttp.ClientSession
    engines: list[RawEngine]

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, number: int, name: str = "handbook", **headers: str) -> None:
        """Ask a question about a document, as a client does."""
        headers = {"x-document-id": name, **headers}
        body = asking(text_of(name), f"Question {number}?")
        url = self.url + "/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def data(self, **headers: str) -> Any:
        async with self.session.get(self.url + "/console/data", headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def status(self, path: str, url: str | None = None, **headers: str) -> int:
        async with self.session.get((url or self.url) + path, headers=headers) as response:
            await response.read()
            return response.status

    async def leave(self) -> int:
        """Stop listening, as a gateway that is away; return the port."""
        port = self.port
        await self.listener.stop(0.0)
        return port

    async def come_back(self, port: int) -> None:
        self.listener = await Listener.start(self.gateway.app, "127.0.0.1", port)


@asynccontextmanager
async def consoled(
    folder: Path,
    *,
    num_engines: int = 2,
    pool: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **sections: Any,
) -> AsyncIterator[Consoled]:
    """Serve one pool of the model ``m`` over workers ``w0, w1, ...``."""
    raws = [RawEngine(Caching(prefill_token_s=1e-4).respond) for _ in range(num_engines)]
    for raw in raws:
        await raw.__aenter__()
    config = {
        "name": "chat",
        "models": ["m"],
        "engine": "vllm",
        "tokenizer": str(byte_tokenizer_dir(folder)),
        "block_size": BLOCK,
        "workers": [{"id": f"w{k}", "url": raw.url} for k, raw in enumerate(raws)],
    } | (pool or {})
    flags = {(name,): section for name, section in sections.items()}
    settings, _ = load(None, flags={("pools",): [config], **flags}, environ=environ or {})
    gateway = Gateway(settings)
    await gateway.start()
    listener = await Listener.start(gateway.app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        running = Consoled(gateway, listener, session, raws)
        try:
            yield running
        finally:
            await running.listener.stop(0.0)
            await gateway.close()
            for raw in raws:
                await raw.stop()

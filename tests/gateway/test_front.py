"""The gateway's own front: what it serves itself, what it hands over, and what it never keeps."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.proxy.limits import Limits
from tests.fakes.engine import openai_engine
from tests.fakes.gateway import Gateway, RawClient, chat, gateway, wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY = json.dumps(chat()).encode()
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n"


@asynccontextmanager
async def raw(*urls: str, limits: Limits | None = None) -> AsyncIterator[Gateway]:
    """A gateway whose front is its own."""
    async with gateway(*urls, limits=limits, front="raw") as gw:
        yield gw


async def answer_of(client: RawClient) -> tuple[int, dict[str, str], bytes]:
    """Read one answer with a content length."""
    async with asyncio.timeout(5):
        status, headers = await client.head()
        return status, headers, await client.reader.readexactly(int(headers["content-length"]))


async def test_inference_requests_stay_and_any_other_hands_the_connection_over_once() -> None:
    async with openai_engine() as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        kept = []
        for data in (wire(BODY), wire(BODY), MODELS, wire(BODY), MODELS):
            await client.send(data)
            assert (await answer_of(client))[0] == 200
            kept.append(gw.listener.num_raw_connections)
        await client.close()

    assert kept == [1, 1, 0, 0, 0]
    assert len(engine.seen) == 3

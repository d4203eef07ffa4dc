"""Which models a worker serves, asked of the worker itself before it gets requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from gateway.errors import UpstreamError
from gateway.fleet.adapters import cards

if TYPE_CHECKING:
    from gateway.upstream.client import Upstream

# A worker that is starting refuses connections for seconds to minutes.
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
# The answer is in the engine's memory; a busy one takes a second to its HTTP thread.
DEADLINE_S = 5.0


async def ask_models(upstream: Upstream) -> tuple[str, ...]:
    """Ask a worker until it answers, and return the names of its base models.

    Returns:
        The names; none if it answers and has no such list.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            response = await upstream.request(
                "GET", "/v1/models", [], first_byte_s=DEADLINE_S, total_s=DEADLINE_S
            )
            try:
                body = await response.read()
            finally:
                response.close()
            # A server error is one that is not up yet, not one without a list.
            if response.status < 500:
                return base_models(_parsed(body)) if response.status == 200 else ()
        except UpstreamError:
            pass
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def base_models(document: object) -> tuple[str, ...]:
    """Return the names in a list of models that are no adapters'."""
    return tuple(card["id"] for card in cards(document) if card.get("parent") is None)


def _parsed(body: bytes) -> object:
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return document

"""LoRA adapters as models: which of them a worker serves, from its own list of models.

vLLM and SGLang list a loaded adapter beside the base model, with the base as its ``parent``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import UpstreamError

if TYPE_CHECKING:
    from gateway.routing.pool import Pool, Worker
    from gateway.upstream.client import Upstream

# The list is a few entries; a worker that loads a model may be slow to answer anything.
MODELS_DEADLINE_S = 5.0
# Engines keep tens of adapters loaded. What is beyond this is no list of models.
MAX_ADAPTERS = 10_000
MAX_NAME_CHARS = 256


async def fetch_models(upstream: Upstream) -> object | None:
    """Return a worker's ``GET /v1/models`` as parsed; None if it has no such list to give now."""
    try:
        response = await upstream.request(
            "GET", "/v1/models", [], first_byte_s=MODELS_DEADLINE_S, total_s=MODELS_DEADLINE_S
        )
        try:
            body = await response.read()
        finally:
            response.close()
    except UpstreamError:
        return None
    if response.status != 200:
        return None
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return document


def cards(document: object) -> list[dict[str, Any]]:
    """Return the entries of a list of models that have a usable name; none of what is no list."""
    data = document.get("data") if isinstance(document, dict) else None
    found = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
    return [card for card in found if _is_name(card.get("id"))]


def take_adapters(pool: Pool, worker: Worker, document: object) -> None:
    """Write down which adapters a worker serves.

    A name stays known to the pool when the last worker that had it is gone: a known model answers
    503, never 404.

    Args:
        pool: The worker's pool; its names come before an adapter's.
        worker: Whose list it is.
        document: What ``fetch_models`` returned.
    """
    names = [card["id"] for card in cards(document) if _is_name(card.get("parent"))]
    own = {*pool.models, *pool.aliases}
    worker.adapters = frozenset(name for name in names[:MAX_ADAPTERS] if name not in own)
    pool.adapters |= worker.adapters
    if len(pool.adapters) > MAX_ADAPTERS:
        pool.adapters = pool.adapters_served()


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS

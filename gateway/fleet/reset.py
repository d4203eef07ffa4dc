"""Have a worker drop its prefix cache, and forget it here at once.

vLLM says that it did only with the next step it computes: until then its events still claim what is
gone. Source: vLLM 0.32 (captured: ``b32-reset``), SGLang 0.5.23 ``/flush_cache``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.fleet.feed import Feed
    from gateway.upstream.client import Upstream

# A reset waits for the step that is being computed, which may be a long prefill.
DEADLINE_S = 30.0
PATHS = {
    "vllm": "/reset_prefix_cache",
    "runner": "/reset_prefix_cache",
    "sglang": "/flush_cache",
}


async def reset_cache(upstream: Upstream, engine: str, feeds: Sequence[Feed]) -> bool:
    """Ask for the reset, and let the worker's feeds forget what they have if it was done.

    A feed whose events told of it meanwhile is ahead of us: what it has is new.

    Args:
        upstream: The worker's connections.
        engine: Kind of engine.
        feeds: Of the worker, one for each rank that is followed.
    """
    path = PATHS.get(engine)
    if path is None:
        return False
    resets = [feed.ingest.resets for feed in feeds]
    try:
        response = await upstream.request(
            "POST", path, [], first_byte_s=DEADLINE_S, total_s=DEADLINE_S
        )
        try:
            body = await response.read()
        finally:
            response.close()
    except UpstreamError:
        return False
    if response.status != 200 or _says_no(body):
        return False
    for feed, before in zip(feeds, resets, strict=True):
        if feed.ingest.resets == before:
            feed.forget()
    return True


def _says_no(body: bytes) -> bool:
    """Say whether an answer tells that running requests kept the cache from being dropped."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False  # vLLM answers without a body, SGLang with text
    return isinstance(document, dict) and document.get("success") is False

"""Handlers beside inference: models, tokenizing, health, metrics and what the gateway asks for."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runner.errors import invalid
from runner.fields import Fields, parse_object
from runner.openai import check_chat
from runner.peers import kv_blocks, peers_document
from runner.responses import json_response, service_of
from runner.tiers.peer import PATH

if TYPE_CHECKING:
    from prefix_index.tokens import PromptTokenizer
    from runner.service import Service
    from runner.tiers.types import TierStats

# Prometheus text exposition format, as prometheus_client writes it.
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: web.Request) -> web.Response:
    """Answer 200 while requests are taken; 503 while draining, or with an engine past help."""
    service_of(request).check_open()
    return web.Response()


async def models(request: web.Request) -> web.Response:
    """List the served model and, as vLLM does, its LoRA adapters below it."""
    service = service_of(request)
    cards = [_model(service, name) for name in (service.facts.name, *service.facts.adapters)]
    return json_response({"object": "list", "data": cards})


async def model(request: web.Request) -> web.Response:
    """Describe a model by name."""
    service = service_of(request)
    name = request.match_info["name"]
    service.check_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts
    return {
        "id": name,
        "object": "model",
        "created": service.started_at_s,
        "owned_by": "warmlane",
        "root": facts.adapters.get(name, facts.root),
        "parent": facts.name if name in facts.adapters else None,
        "max_model_len": facts.max_model_len,
    }


async def tokenize(request: web.Request) -> web.Response:
    """Tokenize a ``prompt``, or ``messages`` as a chat request would be, as vLLM does."""
    service = service_of(request)
    body = parse_object(await request.read())
    fields = Fields(body)
    service.check_model(fields.string("model", None))
    if "messages" in body:
        check_chat(fields)
        tokens = await service.prompts.chat(body)
        if fields.boolean("add_special_tokens"):
            tokens = service.prompts.with_special_tokens(tokens)
    else:
        tokens = await _tokenize_text(service.prompts.tokenizer, fields)
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": service.facts.max_model_len,
            "tokens": tokens,
            "token_strs": _token_texts(service, fields, tokens),
        }
    )


async def _tokenize_text(tokenizer: PromptTokenizer, fields: Fields) -> list[int]:
    text = fields.values.get("prompt")
    if not isinstance(text, str):
        raise invalid("`prompt` must be a string, or `messages` given", "prompt")
    return await asyncio.to_thread(
        tokenizer.encode, text, fields.boolean("add_special_tokens", default=True)
    )


def _token_texts(service: Service, fields: Fields, tokens: list[int]) -> list[str] | None:
    if not fields.boolean("return_token_strs"):
        return None
    return [service.texts.text_of(token_id) for token_id in tokens]


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached blocks; ``success`` is false if running requests keep some."""
    reset = service_of(request).engine.reset_prefix_cache
    return json_response({"success": await asyncio.to_thread(reset)})


async def metrics(request: web.Request) -> web.Response:
    """Return the Prometheus text."""
    text = service_of(request).metrics.render()
    return web.Response(body=text, headers={"content-type": METRICS_CONTENT_TYPE})


async def cache(request: web.Request) -> web.Response:
    """Tell how many blocks are in which state, by tier, and who shares them."""
    service = service_of(request)
    stats = service.engine.stats()
    blocks = {
        "total": stats.pool_blocks,
        "free": stats.free_blocks,
        "cached": stats.cached_blocks,
        "active": stats.active_blocks,
        "loading": stats.loading_blocks,
        "pinned": stats.pinned_blocks,
    }
    tiers: dict[str, Any] = {"gpu": {"blocks": blocks}}
    tiers |= {tier.tier: _tier(tier) for tier in stats.tiers}
    return json_response(
        {
            "block_size": stats.block_size,
            "block_bytes": stats.block_bytes,
            "tiers": tiers,
            "peers": peers_document(service.peers, service.puller),
        }
    )


def _tier(stats: TierStats) -> dict[str, Any]:
    """Return a lower tier's figures; what it cannot know is left out."""
    figures = asdict(stats)
    del figures["tier"]
    return {name: value for name, value in figures.items() if value is not None}


async def decisions(request: web.Request) -> web.Response:
    """List the last decisions between restoring and recomputing, predicted and actual."""
    listed = await asyncio.to_thread(service_of(request).engine.decisions)
    return json_response({"decisions": listed})


async def selftest(request: web.Request) -> web.Response:
    """Stress-test the lower tiers that have a medium to test; ``disk`` is null without one."""
    found = service_of(request).selftest
    return json_response({"disk": None if found is None else await found.run()})


async def tokenizer(request: web.Request) -> web.Response:
    """Hand out the tokenizer, so that a gateway needs no copy of its files."""
    service = service_of(request)
    return json_response(
        {
            "tokenizer_json": service.files.tokenizer_json,
            "tokenizer_config": service.files.config,
            "chat_template": service.prompts.tokenizer.template_source,
            "fingerprint": service.prompts.tokenizer.fingerprint,
        }
    )


async def software_version(request: web.Request) -> web.Response:
    """Tell the version of this software."""
    return json_response({"version": version("warmlane")})


async def kv_event_sources(request: web.Request) -> web.Response:
    """Tell where KV events are published, by data-parallel rank; empty when they are not."""
    publisher = service_of(request).publisher
    return json_response({} if publisher is None else {"0": publisher.describe()})


ROUTES = [
    web.get("/health", health),
    web.get("/v1/models", models),
    web.get("/v1/models/{name:.+}", model),
    web.post("/tokenize", tokenize),
    web.post("/reset_prefix_cache", reset_prefix_cache),
    web.get("/metrics", metrics),
    web.get("/cache", cache),
    web.get("/cache/decisions", decisions),
    web.post("/cache/selftest", selftest),
    web.post(PATH, kv_blocks),
    web.get("/tokenizer", tokenizer),
    web.get("/version", software_version),
    web.get("/kv_event_sources", kv_event_sources),
]

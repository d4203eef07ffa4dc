"""``POST /tokenize``: the tokens of a chat body or a prompt, as vLLM's endpoint of that name tells.

Answered by the pool's own reader, so that it shows what routing sees; what the reader cannot read
is passed to a worker of the pool.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from gateway.errors import GatewayError, InvalidRequest, ModelNotFound, UpstreamError
from gateway.fleet.worker_tokens import PATHS
from gateway.proxy.body import parse_body, read_body
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import error_response, json_response
from gateway.tenancy import NOBODY

if TYPE_CHECKING:
    from gateway.proxy.body import Surface
    from gateway.proxy.limits import Limits
    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.pool import Pool
    from gateway.tenancy import Tenancy
    from prefix_index.prompts import PromptReader

# A worker answers this from its HTTP thread.
DEADLINE_S = 10.0
# Below this much unknown text a thread costs more than it saves.
MAX_INLINE_CHARS = 2000
HEADERS = [(b"content-type", b"application/json")]
# Statuses by which a worker says that it has no such endpoint.
_NO_ENDPOINT = frozenset({404, 405, 501})


class NotTokenized(GatewayError):
    """Neither the gateway nor a worker of the pool can tokenize."""

    status = 501
    default_code = "not_supported"


class Tokenize:
    """The handler; one per process.

    Args:
        dispatcher: Knows the pools.
        limits: Bounds on bodies.
        tenancy: Who may ask; None = everybody.
    """

    def __init__(
        self, dispatcher: Dispatcher, limits: Limits, tenancy: Tenancy | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._tenancy = tenancy
        self._limits = limits
        # Pool -> context length its workers named; asked once.
        self._max_model_len: dict[str, int] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of this endpoint."""
        return [web.post("/tokenize", self.tokenize)]

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: ``{count, max_model_len, tokens}``."""
        request_id = request_id_from(request.headers.get("x-request-id"))
        try:
            tenant = NOBODY
            if self._tenancy is not None:
                tenant = self._tenancy.identify_head(
                    request.headers, request.raw_headers, request.transport
                )
            body = _checked(await read_body(request, self._limits))
            tenant.check_model(body["model"])
            pool = self._dispatcher.pool_for(body["model"])
            if pool is None:
                raise ModelNotFound(f"The model {body['model']!r} does not exist.", param="model")
            status, answer = await self._answer(pool, body)
        except GatewayError as error:
            return error_response(error, request_id)
        return json_response(answer, [("x-request-id", request_id)], status=status)

    async def _answer(self, pool: Pool, body: dict[str, Any]) -> tuple[int, bytes]:
        tokens = None
        if pool.reader is not None and _is_ours(body):
            tokens = await _read(pool.reader, body)
        if tokens is not None:
            length = await self._context_length(pool)
            answer = {"count": len(tokens), "max_model_len": length, "tokens": tokens}
            return 200, orjson.dumps(answer)
        return await _pass_on(pool, body)

    async def _context_length(self, pool: Pool) -> int | None:
        """Return the context length that a worker of the pool names, None if none does."""
        known = self._max_model_len.get(pool.name)
        if known is not None:
            return known
        for worker in pool.workers.values():
            if worker.upstream is None or not worker.health.ready:
                continue
            try:
                response = await worker.upstream.request(
                    "GET", "/v1/models", [], first_byte_s=DEADLINE_S, total_s=DEADLINE_S
                )
                try:
                    answer = await response.read()
                finally:
                    response.close()
            except UpstreamError:
                continue
            length = _named_length(answer, pool)
            if length is not None:
                self._max_model_len[pool.name] = length
            return length
        return None


def _checked(data: bytes) -> dict[str, Any]:
    has_messages = b'"messages"' in data
    surface: Surface = "chat" if has_messages else "completions"
    body = parse_body(data, surface)
    if not has_messages and not isinstance(body["prompt"], str):
        raise InvalidRequest("'prompt' must be text.", param="prompt")
    return body


def _is_ours(body: dict[str, Any]) -> bool:
    """Whether the reader answers this as an engine would: the usual special tokens, only ids."""
    if body.get("return_token_strs"):
        return False
    adds_special_tokens = body.get("add_special_tokens")
    usual = "messages" not in body
    return adds_special_tokens is None or adds_special_tokens is usual


async def _read(reader: PromptReader, body: dict[str, Any]) -> list[int] | None:
    """Return the tokens; None for a body that only the engine can read, or knows to be wrong."""
    try:
        draft = reader.chat(body) if "messages" in body else reader.completion(body["prompt"])
        if draft.unknown_chars <= MAX_INLINE_CHARS:
            return list(draft.complete().token_ids)
        return list((await asyncio.to_thread(draft.complete)).token_ids)
    except Exception:  # templates and tokenizers raise what they like
        return None


async def _pass_on(pool: Pool, body: dict[str, Any]) -> tuple[int, bytes]:
    """Return a worker's answer: of the first that has the endpoint and can be reached."""
    model = pool.aliases.get(body["model"], body["model"])
    data = orjson.dumps({**body, "model": model})
    path = PATHS.get(pool.engine, "/tokenize")
    for worker in pool.workers.values():
        if worker.upstream is None or not worker.health.ready:
            continue
        try:
            response = await worker.upstream.request(
                "POST", path, HEADERS, data, first_byte_s=DEADLINE_S, total_s=DEADLINE_S
            )
            try:
                answer = await response.read()
            finally:
                response.close()
        except UpstreamError:
            continue
        if response.status in _NO_ENDPOINT:
            break
        return response.status, answer
    raise NotTokenized(
        f"The tokens of this request cannot be told: the pool {pool.name!r} has no tokenizer that "
        "reads it and none of its workers answers /tokenize; configure pools[].tokenizer."
    )


def _named_length(answer: bytes, pool: Pool) -> int | None:
    """Return ``max_model_len`` of the pool's model from a worker's list of models."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    models = document.get("data") if isinstance(document, dict) else None
    for model in models if isinstance(models, list) else []:
        if isinstance(model, dict) and model.get("id") in pool.models:
            length = model.get("max_model_len")
            return length if type(length) is int else None
    return None

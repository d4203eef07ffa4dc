"""``POST /v1/messages/count_tokens``: by the pool's own reader, else by a worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import InvalidRequest, UpstreamError
from gateway.fleet.worker_tokens import PATHS
from gateway.protocols.anthropic import to_chat
from gateway.protocols.errors import NotSupported
from gateway.protocols.events import parsed
from gateway.proxy.ways import MESSAGES_PATH

if TYPE_CHECKING:
    from gateway.proxy.speech import Speech
    from gateway.routing.pool import Pool, Worker
    from prefix_index.prompts import PromptReader

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
# A worker answers this from its HTTP thread.
DEADLINE_S = 10.0
# Below this much unknown text a thread costs more than it saves.
MAX_INLINE_CHARS = 2000
_JSON_LINE = b"content-type: application/json\r\n"


async def count_tokens(pool: Pool, document: dict[str, Any], speech: Speech) -> bytes:
    """Return the answer that says how many tokens a message's prompt has.

    Args:
        pool: Of the model.
        document: The parsed request; not changed.
        speech: Knows who speaks the messages API.

    Raises:
        InvalidRequest: If it is not valid, or nobody can tell.
    """
    refusal: InvalidRequest | None = None
    chat: dict[str, Any] | None = None
    try:
        chat = to_chat(document)
    except InvalidRequest as error:
        refusal = error
    count = None
    if chat is not None and pool.reader is not None:
        count = await _read(pool.reader, chat)
    count = count or await _ask(pool, document, chat, speech)
    if count is not None:
        return orjson.dumps({"input_tokens": count})
    raise refusal or NotSupported(
        f"The tokens of this request cannot be told: the pool {pool.name!r} has no tokenizer that "
        "reads it and none of its workers counts tokens; configure pools[].tokenizer."
    )


async def _read(reader: PromptReader, chat: dict[str, Any]) -> int | None:
    try:
        draft = reader.chat(chat)
        if draft.unknown_chars <= MAX_INLINE_CHARS:
            return draft.complete().num_tokens
        return (await asyncio.to_thread(draft.complete)).num_tokens
    except Exception:  # templates and tokenizers raise what they like
        return None


async def _ask(
    pool: Pool, document: dict[str, Any], chat: dict[str, Any] | None, speech: Speech
) -> int | None:
    """Ask a worker that is ready: in the API's own words, else for the tokens of the chat."""
    model = pool.aliases.get(document["model"], document["model"])
    for worker in pool.workers.values():
        if worker.upstream is None or not worker.health.ready:
            continue
        if await speech.speaks(worker, pool.engine, COUNT_PATH, _JSON_LINE):
            answer = await _post(worker, COUNT_PATH, {**document, "model": model})
            return _count(answer, "input_tokens")
        if chat is not None:
            path = PATHS.get(pool.engine, "/tokenize")
            count = _count(await _post(worker, path, {**chat, "model": model}), "count")
            if count is not None:
                return count
    return None


async def _post(worker: Worker, path: str, document: dict[str, Any]) -> bytes:
    """Return a worker's answer; empty if there is none."""
    assert worker.upstream is not None  # asked of those that have one
    try:
        answer = await worker.upstream.request(
            *("POST", path, _JSON_LINE, orjson.dumps(document)),
            first_byte_s=DEADLINE_S,
            total_s=DEADLINE_S,
        )
        try:
            return await answer.read() if answer.status == 200 else b""
        finally:
            answer.close()
    except UpstreamError:
        return b""


def _count(answer: bytes, name: str) -> int | None:
    document = parsed(answer) if answer else None
    count = document.get(name) if isinstance(document, dict) else None
    return count if type(count) is int else None

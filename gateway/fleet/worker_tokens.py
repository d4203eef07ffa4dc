"""Ask a worker for the tokens of a body.

``/tokenize`` is vLLM's and the bundled runner's, ``/v1/tokenize`` SGLang's. Checked against
vLLM 0.32 and SGLang 0.5.23 (its chat bodies since #23981).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.upstream.client import Upstream

# Tokenizing takes milliseconds; a worker that needs longer is busy and is asked another time.
DEADLINE_S = 5.0
PATHS = {"runner": "/tokenize", "vllm": "/tokenize", "sglang": "/v1/tokenize"}
HEADERS = [(b"content-type", b"application/json")]
# Fields of a chat body that decide its prompt and that the endpoints take.
_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
# Fields that decide a prompt and that the endpoints ignore: such a body cannot be compared.
_OTHER_FIELDS = ("documents", "reasoning_effort", "chat_template", "tool_choice", "response_format")


def can_ask(engine: str, body: Mapping[str, Any]) -> bool:
    """Whether workers of this kind can be asked for the tokens of this body."""
    return engine in PATHS and not any(body.get(name) for name in _OTHER_FIELDS)


async def ask_tokens(
    upstream: Upstream, engine: str, model: str, body: Mapping[str, Any]
) -> list[int] | None:
    """Return a worker's token ids of a chat body or a text prompt; None if it does not tell.

    An error, an answer that is no list of ids, and one that takes too long all say nothing.

    Args:
        upstream: Its connections.
        engine: Kind of engine; one for which ``can_ask`` holds.
        model: The model's name on the worker.
        body: ``messages`` with what belongs to them, or a ``prompt``.
    """
    question: dict[str, Any] = {"model": model}
    if "messages" in body:
        question |= {name: body[name] for name in _FIELDS if body.get(name) is not None}
        # The template prints BOS itself; SGLang would add another one.
        question["add_special_tokens"] = False
    else:
        question |= {"prompt": body["prompt"], "add_special_tokens": True}
    try:
        response = await upstream.request(
            "POST",
            PATHS[engine],
            HEADERS,
            orjson.dumps(question),
            first_byte_s=DEADLINE_S,
            total_s=DEADLINE_S,
        )
        try:
            answer = await response.read()
        finally:
            response.close()
    except UpstreamError:
        return None
    return _ids(answer) if response.status == 200 else None


def _ids(answer: bytes) -> list[int] | None:
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    tokens = document.get("tokens") if isinstance(document, dict) else None
    # SGLang answers a list of prompts in kind.
    if isinstance(tokens, list) and len(tokens) == 1 and isinstance(tokens[0], list):
        tokens = tokens[0]
    if not isinstance(tokens, list) or not tokens:
        return None
    if not all(type(token) is int and token >= 0 for token in tokens):
        return None
    return tokens

"""Readers of public models and the prompts they make, for the reported cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from prefix_index import Prompt, PromptReader
from prefix_index.engines import EngineKind
from tests import zoo

KINDS: tuple[EngineKind, ...] = ("vllm", "sglang", "runner", "openai")
TEMPLATES = {
    "qwen3": "qwen3",
    "qwen2_5": "qwen3",
    "llama3_1": "llama3_1",
    "llama3_2": "llama3_1",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "deepseekv3": "deepseek_v3",
}
HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 120


def reader(
    template: str, engine: EngineKind = "vllm", *, block_size: int = 16, **options: Any
) -> PromptReader:
    tokens = TEMPLATES[template]
    return PromptReader(
        zoo.tokenizer(tokens),
        zoo.template(template, tokens, **options),
        model="m",
        block_size=block_size,
        engine=engine,
    )


def read(source: PromptReader, body: dict[str, Any] | str) -> Prompt:
    parsed = json.loads(body) if isinstance(body, str) else body
    return source.chat(parsed).complete()


def digest(ids: Sequence[int]) -> str:
    return sha256(",".join(map(str, ids)).encode()).hexdigest()


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def ask(content: Any, **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **others}


SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_docs",
        "description": "Find passages",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


def reordered(value: Any) -> Any:
    """Return a JSON value with the keys of all its objects in reverse order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}
FIRST_TURN = [
    {"role": "system", "content": "You answer from the handbook."},
    {"role": "user", "content": "What is the refund window?"},
]
SECOND_TURN = [
    *FIRST_TURN,
    {"role": "assistant", "content": "Thirty days."},
    {"role": "user", "content": "And for shoes?"},
]

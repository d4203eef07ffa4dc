"""Chat bodies as clients send them, to compare prompts with a real vLLM's.

Conversations grow turn by turn, so prefixes are shared; every other body is odd in some way: part
lists, tools in any key order, echoed calls, Unicode, variables, a developer, a continued answer.
"""

from __future__ import annotations

import json
import random
from typing import Any

_WORDS = [
    "refund",
    "window",
    "shoes",
    "handbook",
    "delivery",
    "rule",
    "seven",
    "thirty",
    "days",
    "naïve",
    "été",
    "日本語",
    "🙂",
    "<b>bold</b>",
    "a&b",
    "{json}",
    "<|im_end|>",
    "\u200d",
    "x²",
    "½",
    "don't",
    "http://a.b/c?d=e",
]
_SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to <find> & where"},
            "limit": {"type": "integer", "minimum": 1.0, "maximum": 1e3},
        },
        "required": ["query"],
    },
    {"properties": {"z": {"enum": ["b", "a"]}, "a": {"type": "number"}}, "type": "object"},
    {},
    None,
]
_ARGUMENTS = ['{"query": "é", "limit": 2}', '{"query":"é","limit":2}', "{}", "", "[1]", "no json"]


class Bodies:
    """Makes bodies from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def make(self, num_bodies: int) -> list[dict[str, Any]]:
        """Return that many bodies, about five of each conversation in a row."""
        bodies: list[dict[str, Any]] = []
        while len(bodies) < num_bodies:
            bodies += self._conversation()
        return bodies[:num_bodies]

    def _conversation(self) -> list[dict[str, Any]]:
        rng = self._rng
        fixed = self._fixed()
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.8:
            role = "developer" if rng.random() < 0.15 else "system"
            messages.append({"role": role, "content": self._content(rng.choice([20, 80, 200]))})
        bodies = []
        for _ in range(rng.randint(3, 7)):
            messages.append({"role": "user", "content": self._content(rng.randint(3, 60))})
            bodies.append({"messages": list(messages), **fixed, **self._odd(messages)})
            messages += self._answer("tools" in fixed)
        return bodies

    def _fixed(self) -> dict[str, Any]:
        """Return what all requests of a conversation send."""
        rng = self._rng
        fixed: dict[str, Any] = {}
        if rng.random() < 0.5:
            fixed["tools"] = [self._tool(n) for n in range(rng.randint(1, 4))]
            if rng.random() < 0.3:
                fixed["tool_choice"] = rng.choice(["none", "auto"])
        if rng.random() < 0.3:
            fixed["chat_template_kwargs"] = rng.choice(
                [{"enable_thinking": False}, {"enable_thinking": None}, {"unknown": [1]}, {}]
            )
        if rng.random() < 0.2:
            fixed["reasoning_effort"] = rng.choice(["none", "low", "high"])
        if rng.random() < 0.1:
            fixed["documents"] = [{"title": "t", "text": self._text(5)}]
        return fixed

    def _odd(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what one request of a conversation sends."""
        chance = self._rng.random()
        if chance < 0.06:
            return {"add_generation_prompt": False}
        if chance < 0.12:
            begun = [*messages, {"role": "assistant", "content": f"So far {self._text(3)} "}]
            return {
                "messages": begun,
                "add_generation_prompt": False,
                "continue_final_message": True,
            }
        return {}

    def _answer(self, may_call: bool) -> list[dict[str, Any]]:
        rng = self._rng
        answer: dict[str, Any] = {"role": "assistant", "content": self._content(rng.randint(2, 40))}
        if rng.random() < 0.2:
            key = rng.choice(["reasoning", "reasoning_content"])
            answer[key] = self._text(6)
        if not may_call or rng.random() < 0.5:
            return [self._shuffled(answer)]
        answer["content"] = rng.choice([None, "", answer["content"]])
        answer["tool_calls"] = [self._call(n) for n in range(rng.randint(1, 2))]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": self._content(8)}
            for call in answer["tool_calls"]
        ]
        return [self._shuffled(answer), *results]

    def _tool(self, number: int) -> dict[str, Any]:
        rng = self._rng
        function: dict[str, Any] = {"name": f"tool_{number}"}
        if rng.random() < 0.8:
            function["description"] = rng.choice([self._text(6), "", None])
        if rng.random() < 0.8:
            function["parameters"] = rng.choice(_SCHEMAS)
        if rng.random() < 0.3:
            function["strict"] = rng.choice([True, False, None])
        if rng.random() < 0.1:
            function["defer_loading"] = False
        return self._shuffled({"type": "function", "function": self._shuffled(function)})

    def _call(self, number: int) -> dict[str, Any]:
        function = {"name": f"tool_{number}", "arguments": self._rng.choice(_ARGUMENTS)}
        call = {"id": f"call{number}", "type": "function", "function": self._shuffled(function)}
        return self._shuffled(call)

    def _content(self, num_words: int) -> str | list[dict[str, str]]:
        if self._rng.random() < 0.75:
            return self._text(num_words)
        return [
            self._shuffled({"type": "text", "text": self._text(num_words // 2)})
            for _ in range(self._rng.randint(1, 3))
        ]

    def _text(self, num_words: int) -> str:
        rng = self._rng
        blanks = rng.choice(["", "", " ", "\n", "\r\n\n"])
        return rng.choice([" ", " ", "  ", "\n"]).join(rng.choices(_WORDS, k=num_words)) + blanks

    def _shuffled(self, members: dict[str, Any]) -> dict[str, Any]:
        items = list(members.items())
        self._rng.shuffle(items)
        return dict(items)


def comparable_by_tokenize(body: dict[str, Any]) -> bool:
    """Say whether vLLM's ``/tokenize``, which knows fewer fields, makes the same prompt of it."""
    return not body.keys() & {"reasoning_effort", "documents", "tool_choice"}


def as_json(body: dict[str, Any]) -> bytes:
    """Return a body's bytes, with its escapes spelled as most clients do."""
    return json.dumps(body, ensure_ascii=False).encode()

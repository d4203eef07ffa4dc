"""Bodies as no client should write them, and what the rules may change of them."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
from hypothesis import strategies as st

from prefix_index.canonical import (
    RULES,
    Canonical,
    FirstSeenMemory,
    Peek,
    canonicalise,
)
from prefix_index.canonical.spans import Edit, locate, replace

BILLING = "x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch=1a2b3;"
UUID = "7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10"
LINES = st.sampled_from(
    [
        *("Answer from the handbook.", "- one", "", "  ", "```", "é \U0001f600 \\", 'say "no"'),
        *("Current time: 2026-11-30 10:14:07", f"Request id: {UUID}", "2026-11-30T10:14:07Z"),
        *(BILLING, f"Never print {BILLING}", f"Contract of 2026-01-01, id {UUID}.", "tab\there\r"),
    ]
)
TEXTS = st.lists(LINES, max_size=7).map("\n".join)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": None,
            "parameters": {
                "type": "object",
                "properties": {"z": {"type": "number", "minimum": 1.0}, "a": {"enum": ["b", "a"]}},
                "required": ["z", "a"],
            },
        },
    }
    for name in ("search", "read", "zip")
]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def memory(**options: Any) -> FirstSeenMemory:
    return FirstSeenMemory(options.pop("clock", Clock()), **options)


def apply(
    raw: bytes, *rules: str, seen: FirstSeenMemory | Peek | None = None, tenant: str = ""
) -> Canonical:
    return canonicalise(
        orjson.loads(raw),
        raw,
        rules=rules or RULES,
        tenant=tenant,
        memory=memory() if seen is None else seen,
        keeps_system_first=lambda: True,
    )


def written(value: Any, rng: random.Random) -> str:
    """JSON in some client's handwriting: white space and escapes."""
    space = rng.choice(["", " ", "\n "])
    if isinstance(value, dict):
        pairs = [f"{json.dumps(k)}:{space}{written(v, rng)}" for k, v in value.items()]
        return f"{{{space}" + f",{space}".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + f"{space},".join(written(v, rng) for v in value) + f"{space}]"
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def with_keys_shuffled(tool: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    function = tool["function"]
    parameters = _shuffled(function["parameters"], rng)
    return _shuffled(
        {**tool, "function": _shuffled({**function, "parameters": parameters}, rng)}, rng
    )


def _shuffled(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    pairs = list(value.items())
    rng.shuffle(pairs)
    return dict(pairs)


@st.composite
def contents(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["text", "text", "parts", "null"]))
    if kind == "text":
        return draw(TEXTS)
    part = st.one_of(
        st.builds(lambda t: {"type": "text", "text": t}, TEXTS),
        st.builds(lambda t: {"cache_control": {"type": "e"}, "text": t, "type": "text"}, TEXTS),
        TEXTS,
        st.just({"type": "image_url", "image_url": {"url": "x"}}),
        st.just(7),
    )
    return draw(st.lists(part, max_size=3)) if kind == "parts" else None


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Chat bodies as no client should write them."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    roles = st.sampled_from(["system", "system", "developer", "user", "assistant", 3])
    messages = []
    for _ in range(draw(st.integers(0, 4))):
        members = [f'"role":{json.dumps(draw(roles))}']
        members += [
            f'"content" : {written(draw(contents()), rng)}'
            for _ in range(draw(st.sampled_from([1, 1, 1, 2])))
        ]
        rng.shuffle(members)
        messages.append("{" + ", ".join(members) + "}")
    odd = draw(st.sampled_from([[], ["7"], ["null"]]))
    parts = [
        '"seed":18446744073709551615',
        '"t": 1.0',
        '"x":{"tools":[1],"tools":[2]}',
        '"messages": [' + " ,".join([*messages, *odd]) + "]",
    ]
    if draw(st.booleans()):
        tools = [with_keys_shuffled(t, rng) for t in TOOLS[: draw(st.integers(0, 3))]]
        rng.shuffle(tools)
        parts.append(f'"tools" :{written(tools, rng)}')
    rng.shuffle(parts)
    return ("{ " + "\n, ".join(parts) + "}\n").encode()


def masked(raw: bytes) -> bytes:
    """The body with everything that rules may change cut out."""
    body = orjson.loads(raw)
    paths: list[tuple[str | int, ...]] = [("tools",)] if body.get("tools") else []
    for m, message in enumerate(body["messages"]):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        if "content" in message:
            paths.append(("messages", m, "content"))
    return replace(raw, sorted(Edit(*locate(raw, path), b"") for path in paths))

"""The bodies whose tokens are compared with a worker's: few, short, and of every kind that breaks.

They hold what renderers and tokenizers differ in: BOS, tools, tool calls, lists of parts, blanks,
line ends, scripts. Their text is ours, so it may be logged.
"""

from __future__ import annotations

from typing import Any

_TEXT = "It  is 3.50 €;\r\n\tnaïve 你好 🙂 don't  "
# In no engine's own order of keys: one that prints it as it comes shows as that.
_TOOL = {
    "function": {
        "parameters": {
            "type": "object",
            "required": ["topic"],
            "properties": {"topic": {"type": "string"}, "limit": {"type": "integer"}},
        },
        "description": "Find a rule & its <text>",
        "name": "find_rule",
    },
    "type": "function",
}
_SYSTEM = {"role": "system", "content": "Answer from the handbook."}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find_rule", "arguments": '{"topic":"refunds", "limit": 2}'},
}

PROBES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [_SYSTEM, {"role": "user", "content": "When are refunds due?"}]},
    "chat of several turns": {
        "messages": [
            {"role": "user", "content": _TEXT},
            {"role": "assistant", "content": "\nIn 30 days. "},
            {"role": "user", "content": "And  abroad?\n"},
        ]
    },
    "chat with parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("One.", " Two.")]}
        ]
    },
    "chat with tools": {
        "messages": [_SYSTEM, {"role": "user", "content": "Find it."}],
        "tools": [_TOOL],
    },
    "chat with a tool call": {
        "messages": [
            {"role": "user", "content": "Find it."},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "Rule 7: 30 days."},
            {"role": "user", "content": "Thanks."},
        ],
        "tools": [_TOOL],
    },
    "prompt": {"prompt": f"Refunds: {_TEXT}def f(x):\n    return x"},
}

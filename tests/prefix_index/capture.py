"""The captured vLLM event files as Python values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vllm-kv-events"
FILES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
CAPTURED = [name for name in FILES if not name.startswith("synth")]
# Nothing was evicted and every parent is in the file (README there).
COMPLETE = [
    "vllm0.32-b128-xxhashcbor-basic",
    "vllm0.32-b32-concurrent",
    "vllm0.32-b32-duplicate",
    "vllm0.32-b32-full-report",
    "vllm0.32-b32-gemma3-hybrid",
    "vllm0.32-b32-multi-turn",
    "vllm0.32-b32-shared-prefix",
]
# Captures of one server, in the order of its sequence.
SERVERS = {
    "b32": [
        f"vllm0.32-b32-{name}"
        for name in (
            "shared-prefix",
            "multi-turn",
            "reset",
            "salt",
            "duplicate",
            "concurrent",
            "full-report",
            "abort",
        )
    ],
    "tiny40": ["vllm0.32-b32-tiny40-evict", "vllm0.32-b32-tiny40-preempt"],
    "b64": ["vllm0.32-b64-cbor-bytes-lora", "vllm0.32-b64-cbor-bytes-reset"],
}


@dataclass
class Exchange:
    """One request and its answer."""

    label: str
    path: str
    body: dict[str, Any]
    prompt_ids: list[int]
    generated_ids: list[int]


@dataclass
class Capture:
    """One file."""

    block_size: int
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


def load(name: str) -> Capture:
    """Read one file by its stem."""
    lines = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]
    capture = Capture(block_size=int(str(lines[0]["block_size"]).split("(")[0]))
    requests = {line["label"]: line for line in lines if line["kind"] == "request"}
    for line in lines:
        if line["kind"] == "frames":
            _, sequence, payload = (bytes.fromhex(part) for part in line["parts"])
            capture.frames.append((int.from_bytes(sequence, "big"), payload))
        elif line["kind"] == "response":
            request = requests[line["label"]]
            capture.exchanges.append(
                Exchange(
                    line["label"],
                    request["path"],
                    request["body"],
                    line["prompt_token_ids"],
                    line["token_ids"],
                )
            )
    return capture

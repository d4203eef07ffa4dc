"""Small traces and fleets for the tests of replay."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.replay.fleet import Fleet
from gateway.replay.presets import LLAMA_8B
from gateway.replay.runs import Setup
from gateway.replay.simulate import Load
from gateway.replay.traces import Request, Trace, read_trace

DATA = Path(__file__).parents[1] / "data" / "traces"
CONVERSATION = str(DATA / "conversation-400.jsonl.gz")
AGENTIC = str(DATA / "agentic-sessions.jsonl.gz")


def conversation() -> Trace:
    return read_trace(CONVERSATION)


def agentic() -> Trace:
    return read_trace(AGENTIC)


def chain(*ids: int) -> list[bytes]:
    return [i.to_bytes(16, "big") for i in ids]


def request(row: int, arrival_s: float, ids: list[int], **changes: object) -> Request:
    values: dict[str, object] = {
        "prompt_tokens": 512 * len(ids) + 10,
        "output_tokens": 20,
        "session": row,
        "blocks": chain(*ids),
    }
    return Request(row=row, line=row + 1, arrival_s=arrival_s, **values | changes)  # type: ignore[arg-type]


def trace(*requests: Request) -> Trace:
    return Trace("test", "compact", list(requests), 512, [])


def setup(num_workers: int = 4, *, load: Load | None = None, **model: object) -> Setup:
    engine = msgspec.structs.replace(LLAMA_8B, **model)
    return Setup(engine, num_workers=num_workers, load=load or Load())


def fleet(num_workers: int = 4) -> Fleet:
    return Fleet(LLAMA_8B, num_workers)

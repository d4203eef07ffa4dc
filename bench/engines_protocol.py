"""How a driver of one engine answers bench/engines.py: one JSON object a line, both ways.

Only the standard library: drivers run in the engines' own environments.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

# The prompt of the comparison: 1,500 tokens of which 28 are new when warm.
PROMPT_TOKENS, NEW_TOKENS = 1_500, 28
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 200, 64
BATCH = 8

# Before anything else is imported: whatever libraries print must not be taken for an answer.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

Generate = Callable[[list[list[int]], int], None]
"""Runs prompts together, greedily, to so many tokens each."""


class Prompts:
    """Fresh random prompts: no two share a block."""

    def __init__(self) -> None:
        self._rng = random.Random(os.getpid())

    def new(self, length: int) -> list[int]:
        return [self._rng.randrange(100, 49_000) for _ in range(length)]


def measure(generate: Generate) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return what can be asked for: each gives wall and CPU seconds of the process."""
    prompts = Prompts()

    def timed(batch: list[list[int]], tokens: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        generate(batch, tokens)
        return time.perf_counter() - wall, time.process_time() - cpu

    def cold() -> tuple[float, float]:
        return timed([prompts.new(PROMPT_TOKENS)], 1)

    def warm() -> tuple[float, float]:
        prefix = prompts.new(PROMPT_TOKENS - NEW_TOKENS)
        generate([[*prefix, 100]], 1)
        return timed([prefix + prompts.new(NEW_TOKENS)], 1)

    def decode(samples: int) -> tuple[float, float]:
        """Of one step: what more tokens take more, the prompts being cached."""
        batch = [prompts.new(DECODE_PROMPT_TOKENS) for _ in range(samples)]
        generate(batch, 1)
        one = timed(batch, 1)
        many = timed(batch, 1 + DECODE_TOKENS)
        wall, cpu = ((more - less) / DECODE_TOKENS for more, less in zip(many, one, strict=True))
        return wall, cpu

    return {
        "cold": cold,
        "warm": warm,
        "decode1": lambda: decode(1),
        f"decode{BATCH}": lambda: decode(BATCH),
    }


def serve(generate: Generate, without: tuple[str, ...] = ()) -> None:
    """Answer requests from stdin until it closes."""
    known = {name: run for name, run in measure(generate).items() if name not in without}
    generate([Prompts().new(40)], 4)
    print(json.dumps({"ready": sorted(known)}), file=_ANSWERS, flush=True)
    for line in sys.stdin:
        wall, cpu = known[json.loads(line)["run"]]()
        print(json.dumps({"wall_s": wall, "cpu_s": cpu}), file=_ANSWERS, flush=True)

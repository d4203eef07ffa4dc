"""Measure the bundled runner's engine: cold and warm TTFT, decode with 1 and 8 samples.

Through the real engine thread, scheduling and sampling included, HTTP and tokenizer not. Every
figure is the best of some repeats, since other load on the box only ever makes it worse; the
spread stands beside it. The table goes to stderr, one JSON object to stdout.

    python -m bench.runner_speed models/smollm2 --dtype bfloat16 --dtype float32
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runner.engine import Engine
from runner.types import EngineConfig, EngineRequest, SamplingParams, TokenOutput
from runner.weights import DTYPES, load_model

if TYPE_CHECKING:
    from collections.abc import Callable

# The prompt of the comparison with other engines: 1,500 tokens of which 28 are new when warm.
PROMPT_TOKENS = 1_500
NEW_TOKENS = 28
DECODE_PROMPT_TOKENS = 200
DECODE_TOKENS = 100
SAMPLES = 8


@dataclass
class Timeline:
    """When each token of each request came, seconds."""

    times_s: dict[str, list[float]] = field(default_factory=dict)
    num_open: int = 0

    def sink(self, output: TokenOutput) -> None:
        if output.error:
            raise RuntimeError(output.error)
        self.times_s.setdefault(output.request_id, []).append(time.perf_counter())
        self.num_open -= output.finish_reason is not None


class Bench:
    """One engine and the four measurements."""

    def __init__(self, model_path: Path, dtype: str, threads: int, *, native: bool) -> None:
        self.model = load_model(model_path, dtype, threads, native=native)
        self.engine = Engine(self.model, EngineConfig(pool_tokens=16_384))
        self.engine.start()
        self._rng = random.Random(1)
        self._num_requests = 0

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(100, self.model.config.vocab_size) for _ in range(length)]

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[float]]]:
        """Run prompts together; returns the start and every request's token times, seconds."""
        timeline = Timeline(num_open=len(prompts))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            request_id = str(self._num_requests)
            self.engine.submit(EngineRequest(request_id, prompt, params, timeline.sink))
        while timeline.num_open:
            time.sleep(0.002)
        return start, list(timeline.times_s.values())

    def cold_ttft_s(self) -> float:
        start, times = self.run([self.prompt(PROMPT_TOKENS)], 1)
        return times[0][0] - start

    def warm_ttft_s(self) -> float:
        # Blocks of 16: 1,472 of the 1,500 tokens are 92 whole blocks.
        prefix = self.prompt(PROMPT_TOKENS - NEW_TOKENS)
        self.run([[*prefix, 100]], 1)
        start, times = self.run([prefix + self.prompt(NEW_TOKENS)], 1)
        return times[0][0] - start

    def decode_tokens_per_s(self, samples: int) -> float:
        prompts = [self.prompt(DECODE_PROMPT_TOKENS) for _ in range(samples)]
        _, times = self.run(prompts, DECODE_TOKENS)
        # Only while all samples decode together.
        begin = max(request[0] for request in times)
        end = min(request[-1] for request in times)
        count = sum(begin < at <= end for request in times for at in request)
        return count / (end - begin)


def measure(call: Callable[[], float], repeats: int, *, is_rate: bool) -> dict[str, float]:
    values = [call() for _ in range(repeats)]
    best = max(values) if is_rate else min(values)
    return {"best": best, "median": statistics.median(values), "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="without the compiled kernels")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for dtype in options.dtype or list(DTYPES):
        bench = Bench(options.model, dtype, options.threads, native=not options.torch)
        bench.run([bench.prompt(64)], 8)
        rows = {
            "cold TTFT 1500 tokens, s": measure(bench.cold_ttft_s, options.repeats, is_rate=False),
            "warm TTFT 28 of 1500 new, s": measure(
                bench.warm_ttft_s, options.repeats, is_rate=False
            ),
            "decode 1 sample, tokens/s": measure(
                lambda bench=bench: bench.decode_tokens_per_s(1), options.repeats, is_rate=True
            ),
            f"decode {SAMPLES} samples, tokens/s": measure(
                lambda bench=bench: bench.decode_tokens_per_s(SAMPLES),
                options.repeats,
                is_rate=True,
            ),
        }
        bench.engine.stop(10)
        results[dtype] = rows
        for name, row in rows.items():
            line = f"{dtype:>9}  {name:<28} best {row['best']:8.3f}  median {row['median']:8.3f}"
            sys.stderr.write(line + "\n")
    load = os.getloadavg()[0]
    print(json.dumps({"threads": options.threads, "load_1min": load, "results": results}))


if __name__ == "__main__":
    main()

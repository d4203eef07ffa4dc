"""Measure what it takes to get a prefix from another runner, against computing it again.

Real processes over loopback: a source that computes and shares a prompt, a runner that pulls from
it, a runner that restores from a Valkey, and both also compute prompts that nobody has. Rounds are
interleaved, figures are medians. The restore is timed by the runner itself (``/cache/decisions``),
recomputing is what the prefix costs in TTFT: cold less warm. One JSON object goes to stdout.

    python -m bench.peers models/smollm2 --dtype bfloat16 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.e2e.fleet import Runner, make_runner
from tests.valkey import Valkey

PREFIX_TOKENS = 1024
# The request's own tokens behind the prefix: one block, so that a hit leaves little to compute.
OWN_TOKENS = 16
DEADLINE_S = 300.0
# Until what was offered is written.
SETTLE_S = 1.0
TOUCHES = 3
BLOCK_TOKENS = 16


def start_runner(stack: ExitStack, folder: Path, name: str, model: Path, *args: str) -> Runner:
    runner = make_runner(folder, name, model)
    runner.args += args
    runner.start()
    stack.callback(runner.stop)
    return runner


def ttft_s(runner: Runner, prompt: list[int], **more: Any) -> tuple[float, int]:
    """Return the seconds of a request for one token, and its cached tokens."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    start = time.perf_counter()
    answer = httpx.post(f"{runner.url}/v1/completions", json=body, timeout=DEADLINE_S)
    elapsed_s = time.perf_counter() - start
    answer.raise_for_status()
    return elapsed_s, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def get(runner: Runner, path: str) -> Any:
    return httpx.get(runner.url + path, timeout=DEADLINE_S).json()


def restore_s(runner: Runner) -> float:
    """Return how long the last load took, as the runner timed it."""
    actual = get(runner, "/cache/decisions")["decisions"][-1]["actual"]
    if actual is None or actual["outcome"] != "done":
        raise RuntimeError(f"the last load did not come to its end: {actual}")
    return float(actual["restore_s"])


def share(source: Runner, prompt: list[int]) -> None:
    """Have the source compute a prompt and store it: what is asked for again is worth its write."""
    for _ in range(TOUCHES):
        ttft_s(source, prompt)
        time.sleep(SETTLE_S)


class Rounds:
    """The measurements, in seconds, by name."""

    def __init__(self, source: Runner, puller: Runner, restorer: Runner) -> None:
        self.times_s: dict[str, list[float]] = {}
        self._source = source
        self._puller = puller
        self._restorer = restorer
        self._rng = Random(11)

    def run(self) -> None:
        """Measure each once, on a prefix of its own."""
        prefix = self._prompt(PREFIX_TOKENS)
        share(self._source, prefix + self._prompt(OWN_TOKENS))
        source = {"url": self._source.url, "tokens": PREFIX_TOKENS}
        params = {"kv_transfer_params": {"source": source}}
        for name, runner, more in (
            ("peer", self._puller, params),
            ("remote", self._restorer, {}),
        ):
            cold_s, cached = ttft_s(runner, self._prompt(PREFIX_TOKENS + OWN_TOKENS))
            self._expect(name, cached, 0)
            restored_s, cached = ttft_s(runner, prefix + self._prompt(OWN_TOKENS), **more)
            self._expect(name, cached, PREFIX_TOKENS)
            load_s = restore_s(runner)
            warm_s, cached = ttft_s(runner, prefix + self._prompt(OWN_TOKENS))
            self._expect(name, cached, PREFIX_TOKENS)
            for what, seconds in (
                ("recompute", cold_s - warm_s),
                ("restore", load_s),
                ("ttft_cold", cold_s),
                ("ttft_restored", restored_s),
                ("ttft_warm", warm_s),
            ):
                self.times_s.setdefault(f"{name}_{what}_s", []).append(seconds)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(100, 20_000) for _ in range(num_tokens)]

    @staticmethod
    def _expect(name: str, cached: int, wanted: int) -> None:
        if cached != wanted:
            raise RuntimeError(f"{name}: {cached} cached tokens where {wanted} were expected")


def report(rounds: Rounds, block_bytes: int, dtype: str) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in rounds.times_s.items()}
    num_bytes = block_bytes * (PREFIX_TOKENS // BLOCK_TOKENS)
    document: dict[str, Any] = {
        "dtype": dtype,
        "prefix_tokens": PREFIX_TOKENS,
        "prefix_bytes": num_bytes,
        "rounds": len(rounds.times_s["peer_restore_s"]),
    }
    for name in ("peer", "remote"):
        load_s = medians[f"{name}_restore_s"]
        document[f"{name}_mb_per_s"] = round(num_bytes / load_s / 1e6, 1)
        document[f"{name}_times_faster"] = round(medians[f"{name}_recompute_s"] / load_s, 1)
    spread = {name: [round(t, 4) for t in sorted(times)] for name, times in rounds.times_s.items()}
    medians = {name: round(value, 4) for name, value in medians.items()}
    return document | {"medians": medians, "sorted": spread}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Valkey(folder)
        server.start()
        stack.callback(server.stop)
        dtype = ("--dtype", options.dtype)
        shared = (*dtype, "--remote", server.url)
        source = start_runner(stack, folder, "source", options.model, *shared, "--serve-peers")
        puller = start_runner(stack, folder, "puller", options.model, *dtype, "--peer", source.url)
        restorer = start_runner(stack, folder, "restorer", options.model, *shared)
        for runner in (source, puller, restorer):
            runner.wait_ready()
        rounds = Rounds(source, puller, restorer)
        for number in range(options.rounds):
            rounds.run()
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        print(json.dumps(report(rounds, get(source, "/cache")["block_bytes"], options.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

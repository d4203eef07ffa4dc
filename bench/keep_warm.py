"""What users' requests have to compute on a worker in the minute after it restarted.

    python -m bench.keep_warm [--documents N] [--pairs N] [--seconds S] [--model DIR]

Two bundled runners and a gateway, all processes of their own. Clients ask about a few documents
at a fixed rate, whether or not others were answered. There are more documents than one runner's
cache has room for, so that what the lost one held is wanted there again; it is killed and started
anew. Counted are the prompt tokens that users' requests had to compute on it from the moment it
takes requests, with and without ``keep_warm``, interleaved. Both variants get the same questions in
the same order at the same times. Target: at most half of without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import fleet
from tests.e2e.fleet import Process, Runner, document, make_runner, wait_for, workers_of
from tests.support import free_port

TARGET = 0.5
# About 700 tokens: eight are more than one runner has room for, and fit into two.
RULES = 27
POOL_TOKENS = 3072


def start_gateway(folder: Path, name: str, runners: list[Runner], *, keeps: bool) -> Process:
    """Start a gateway that reads prompts and follows events."""
    workers = [
        {"id": f"w{k}", "url": r.url, "kv_events": r.events, "kv_replay": r.replay}
        for k, r in enumerate(runners)
    ]
    pool = {
        "name": "chat",
        "models": ["smollm2"],
        "engine": "runner",
        "workers": workers,
        "keep_warm": {"enabled": keeps, "store": keeps},
    }
    port = free_port()
    config = folder / f"{name}.json"
    config.write_text(json.dumps({"server": {"host": "127.0.0.1", "port": port}, "pools": [pool]}))
    gateway = Process(
        ["gateway", "serve", "--config", str(config)],
        port,
        folder / f"{name}.log",
        "/health/ready",
    )
    gateway.start()
    gateway.wait_ready()
    wait_for(lambda: all(w["mode"] == "exact" for w in workers_of(gateway)), "events are followed")
    return gateway


def reset(runners: list[Runner]) -> None:
    """Empty the caches."""
    for runner in runners:
        httpx.post(runner.url + "/reset_prefix_cache", timeout=60)


def kept(gateway: Process) -> list[dict[str, Any]]:
    """Return what the gateway says of the workers that it filled."""
    state: dict[str, Any] = httpx.get(gateway.url + "/admin/v1/warm", timeout=10).json()
    rows: list[dict[str, Any]] = state["keep_warm"]
    return rows


class Load:
    """Questions about documents at a fixed rate until they are stopped."""

    def __init__(self, url: str, names: list[str], seed: int, rate_per_s: float) -> None:
        self.answers: list[tuple[float, str, int, int, float]] = []
        self.num_failed = 0
        self._url = url
        self._rate_per_s = rate_per_s
        self._documents = {name: document(name, RULES) for name in names}
        self._random = random.Random(seed)
        self._client = httpx.AsyncClient(timeout=120)

    async def ask(self, name: str) -> None:
        """Ask one question; note who computed how much of it."""
        body: dict[str, Any] = {
            "model": "smollm2",
            "messages": [
                {"role": "system", "content": self._documents[name]},
                {"role": "user", "content": f"Which gate? {self._random.randrange(10**6)}"},
            ],
            "max_tokens": 2,
            "temperature": 0,
        }
        headers = {"x-warmlane-explain": "1", "x-document-id": name}
        began_s = time.monotonic()
        try:
            answer = await self._client.post(
                self._url + "/v1/chat/completions", json=body, headers=headers
            )
            usage = answer.json()["usage"]
        except (httpx.HTTPError, KeyError, ValueError):
            self.num_failed += 1
            return
        now_s = time.monotonic()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        worker = answer.headers["x-warmlane-worker"]
        row = (now_s, worker, usage["prompt_tokens"], cached, now_s - began_s)
        self.answers.append(row)

    async def run(self) -> None:
        """Ask until cancelled; nobody waits for an answer before the next question."""
        names, next_s = list(self._documents), time.monotonic()
        async with asyncio.TaskGroup() as asking:
            while True:
                asking.create_task(self.ask(self._random.choice(names)))
                next_s += 1 / self._rate_per_s
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()


async def one(folder: Path, name: str, runners: list[Runner], options: Any, *, keeps: bool) -> int:
    """Measure one variant; return the tokens computed by users on the restarted worker."""
    reset(runners)
    gateway = start_gateway(folder, name, runners, keeps=keeps)
    # The same for both variants of a pair, so that they are at home on the same workers.
    names = [f"{name[-1]}-{k}" for k in range(options.documents)]
    load = Load(gateway.url, names, seed=7, rate_per_s=options.rate)
    try:
        for _ in range(3):
            for each in names:
                await load.ask(each)
        served = dict.fromkeys(("w0", "w1"), 0)
        for row in load.answers:
            served[row[1]] += 1
        # The one that has more to lose.
        worker = max(served, key=lambda key: served[key])
        runner = runners[int(worker[1])]
        asking = asyncio.ensure_future(load.run())
        await asyncio.sleep(3)
        runner.kill()
        await asyncio.sleep(2)
        runner.start()
        await asyncio.to_thread(runner.wait_ready)
        began_s = time.monotonic()
        await asyncio.sleep(options.seconds)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        state = kept(gateway)
    finally:
        await load.close()
        gateway.stop()
    after = [row for row in load.answers if row[0] >= began_s]
    here = [row for row in after if row[1] == worker]
    computed = sum(row[2] - row[3] for row in here)
    everywhere = sum(row[2] - row[3] for row in after)
    slow = sorted(row[4] for row in here)
    filled = state[0] if state else {}
    print(
        f"{name}: {worker}, {served[worker]} of {sum(served.values())} answers before; after it "
        f"{len(here)} of {len(after)} requests there, {computed} tokens computed by users there, "
        f"{everywhere} everywhere; p95 there "
        f"{slow[int(0.95 * (len(slow) - 1))] if slow else 0:.2f} s; "
        f"warmed {filled.get('computed_tokens', 0)} tokens in {filled.get('elapsed_s', 0):.1f} s; "
        f"{load.num_failed} failed while it was away",
        flush=True,
    )
    return computed


async def measure(options: Any) -> None:
    """Run the pairs and print the ratio."""
    # A runner that loads its weights beside others' work.
    fleet.START_DEADLINE_S = 600.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runners = [make_runner(folder, f"runner{k}", Path(options.model)) for k in range(2)]
        try:
            for runner in runners:
                runner.args[runner.args.index("--pool-tokens") + 1] = str(POOL_TOKENS)
                runner.start()
            for runner in runners:
                runner.wait_ready()
            without, with_it = [], []
            for pair in range(options.pairs):
                without.append(await one(folder, f"cold{pair}", runners, options, keeps=False))
                with_it.append(await one(folder, f"kept{pair}", runners, options, keeps=True))
        finally:
            for runner in runners:
                runner.stop()
    ratio = sum(with_it) / max(1, sum(without))
    print(f"without keep-warm  median {statistics.median(without):.0f} tokens")
    print(f"with keep-warm     median {statistics.median(with_it):.0f} tokens")
    print(f"ratio {ratio:.2f}, target {TARGET}: {'met' if ratio <= TARGET else 'MISSED'}")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    # Two runners on a busy box keep up with it, cold documents included.
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="models/smollm2")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

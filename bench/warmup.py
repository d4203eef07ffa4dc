"""Warm-up measured: cold against warmed fleet, users beside a warm-up, a warm-up against prefill.

    python -m bench.warmup --tokenizer models/smollm2
    python -m bench.warmup --tokenizer models/smollm2 --parts floor --documents 100
    python -m bench.warmup --tokenizer models/smollm2 --parts traffic --mocks
    python -m bench.warmup --tokenizer models/smollm2 --parts traffic --mocks --slowdown 1 \\
        --beside 80

Two bundled runners and the gateway as processes, and the command as an operator types it. Each
part compares within one run, in turn, so that a shared box weighs on both sides alike.

- ``touches``: the first question about each document, on a cold and on a warmed fleet: prefill
  tokens computed and TTFT.
- ``traffic``: users' TTFT without and beside a warm-up of new documents. With ``--mocks`` the
  engines only take their time and no CPU, so that a small or busy box does not slow them down
  beside each other: what is left is what the warm-up's manners cost. Five pairs take some five
  minutes; a quick engine needs more documents, or the warm-up is over before users asked much.
- ``floor``: a warm-up of all documents against sending half of them to each runner, with nothing in
  between.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from bench.fleet import (
    RUNNER_SHAPE,
    Engine,
    ask_one,
    engine_command,
    free_port,
    prefill_tokens,
    process,
    ready,
    router_command,
)
from bench.fleet_workload import Ask, Workload, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.fleet_workload import Conversation

PARTS = ("touches", "traffic", "floor")
SYSTEM = "Answer from the document.\n\n"
# A question's worth of words; what is asked does not matter.
QUESTION_WORDS = 12
# Users of `traffic`: part of those of `bench.fleet`, who ask about documents and converse.
USERS = ("document", "document", "chat")
# KV of each engine unless asked for: for two thirds of a part's documents, since hashing does not
# place half on each, and for the users.
PLACED_SHARE = 0.65
USERS_TOKENS = 16_384
# The first questions of `traffic` meet empty caches, whoever is beside them.
LEAD_S = 5.0
SETTLE_DEADLINE_S = 60.0


class Bench:
    """The fleet, and the documents of one part; use it as an async context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.engines: list[Engine] = []
        self.rng = Random(options.seed)
        self._stack = AsyncExitStack()
        self._sets = itertools.count()

    async def __aenter__(self) -> Bench:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for i in range(2):
            engine = Engine(
                f"http://127.0.0.1:{free_port()}",
                f"ipc://{self.folder}/e{i}",
                f"ipc://{self.folder}/r{i}",
            )
            self.engines.append(engine)
            command = engine_command(self.options, engine)
            await self._stack.enter_async_context(process(command, self.folder / "engines.log"))
        for engine in self.engines:
            await ready(f"{engine.url}/health")
        port = free_port()
        command = router_command("warmlane", self.options, self.engines, port, self.folder)
        await self._stack.enter_async_context(process(command, self.folder / "gateway.log"))
        self.url = f"http://127.0.0.1:{port}"
        await ready(f"{self.url}/health/ready")
        timeout = aiohttp.ClientTimeout(total=600)
        self.session = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        await self._are_read()
        await self._learn()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _are_read(self) -> None:
        """Wait until the gateway reads prompts as its workers do."""
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while True:
                async with self.session.get(f"{self.url}/admin/v1/workers") as answer:
                    rows = (await answer.json())["workers"]
                if all(row["ready"] and row["mode"] != "text" for row in rows):
                    return
                await asyncio.sleep(0.1)

    async def _learn(self) -> None:
        """Let the gateway learn how quick its workers are, as any fleet with users has."""
        for _ in range(4):
            await self.ask(text(self.rng, 300))

    async def reset(self) -> None:
        """Empty the caches of all workers, here and there."""
        for i in range(len(self.engines)):
            async with self.session.post(f"{self.url}/admin/v1/workers/w{i}/reset") as answer:
                assert answer.status == 200, await answer.text()

    def documents(self, count: int) -> tuple[list[str], Path]:
        """Make new documents and a manifest of them."""
        folder = self.folder / f"set-{next(self._sets)}"
        folder.mkdir()
        texts = [text(self.rng, self.options.words) for _ in range(count)]
        for number, content in enumerate(texts):
            (folder / f"d{number:04d}.txt").write_text(content)
        manifest = {
            "model": "m",
            "frame": {
                "system": SYSTEM + "{document}",
                "messages": [{"role": "user", "content": "{question}"}],
            },
            # Users of this workload say nothing of documents: the prefix decides.
            "defaults": {"headers": {}},
            "documents": [{"glob": "*.txt"}],
        }
        (folder / "warm.yaml").write_text(yaml.safe_dump(manifest))
        return texts, folder / "warm.yaml"

    async def ask(self, document: str, url: str | None = None) -> float:
        """Ask one question about a document; return its TTFT in seconds."""
        messages = [
            {"role": "system", "content": SYSTEM + document},
            {"role": "user", "content": text(self.rng, QUESTION_WORDS)},
        ]
        ttft_s, _ = await ask_one(self.session, url or self.url, Ask("document", messages, 1))
        assert ttft_s is not None, "a request failed"
        return ttft_s

    async def warm(self, manifest: Path) -> tuple[float, dict[str, Any]]:
        """Run the command; return its seconds and its result."""
        started_s = time.monotonic()
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmup", "run", str(manifest), "--gateway", self.url),
            "--json",
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        out, _ = await child.communicate()
        took_s = time.monotonic() - started_s
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return took_s, result


async def touches(bench: Bench) -> None:
    """First questions on a cold and on a warmed fleet."""
    rows: dict[str, list[dict[str, float]]] = {"cold": [], "warmed": []}
    for _, side in itertools.product(range(bench.options.rounds), rows):
        await bench.reset()
        texts, manifest = bench.documents(bench.options.touches)
        if side == "warmed":
            _, result = await bench.warm(manifest)
            assert result["exit_code"] == 0, result
        before = await prefill_tokens(bench.engines)
        ttfts_s = await _first_touches(bench, texts)
        computed = await prefill_tokens(bench.engines) - before
        rows[side].append({"computed_tokens": computed, "p95_ttft_s": _p95(ttfts_s)})
        _print({"part": "touches", "side": side, **rows[side][-1]})
    for figure in ("computed_tokens", "p95_ttft_s"):
        pairs = zip(rows["warmed"], rows["cold"], strict=True)
        ratios = [warmed[figure] / cold[figure] for warmed, cold in pairs]
        _print({"part": "touches", "warmed_over_cold": figure, **_spread(ratios)})


async def _first_touches(bench: Bench, texts: Sequence[str]) -> list[float]:
    """Ask about every document once, two users at a time."""
    queue = iter(texts)

    async def user() -> AsyncIterator[float]:
        for document in queue:
            yield await bench.ask(document)

    async def collect() -> list[float]:
        return [ttft_s async for ttft_s in user()]

    return [*itertools.chain(*await asyncio.gather(collect(), collect()))]


async def traffic(bench: Bench) -> None:
    """Users' TTFT without and beside a warm-up, in interleaved pairs.

    Both sides of a pair have the same users with the same questions, from empty caches; as long as
    the warm-up ran is what counts of either.
    """
    ratios, everybody = [], {"alone": list[float](), "beside": list[float]()}
    for number in range(bench.options.pairs):
        _, manifest = bench.documents(bench.options.beside)
        seed = bench.rng.randrange(1 << 30)
        seen: dict[str, list[tuple[float, float]]] = {}
        took_s = bench.options.window_s
        for side in ("alone", "beside") if number % 2 == 0 else ("beside", "alone"):
            await bench.reset()
            users = asyncio.create_task(_users(bench, seed))
            await asyncio.sleep(LEAD_S)
            if side == "beside":
                took_s, result = await bench.warm(manifest)
                assert result["exit_code"] == 0, result
            seen[side] = await users
        end_s = LEAD_S + min(took_s, bench.options.window_s)
        sides: dict[str, Any] = {"warm_up_s": took_s}
        for side, ttfts_s in seen.items():
            counted = [ttft_s for asked_s, ttft_s in ttfts_s if LEAD_S <= asked_s <= end_s]
            everybody[side] += counted
            sides |= {side: _p95(counted), f"{side}_asks": len(counted)}
        ratios.append(sides["beside"] / sides["alone"])
        _print({"part": "traffic", "pair": number, **sides, "ratio": ratios[-1]})
    pooled = _p95(everybody["beside"]) / _p95(everybody["alone"])
    of_all = {"of_all_asks": round(pooled, 3)}
    _print({"part": "traffic", "beside_over_alone": "p95_ttft_s", **_spread(ratios), **of_all})


async def _users(bench: Bench, seed: int) -> list[tuple[float, float]]:
    """Let users ask for a while; return when each asked, and its TTFT."""
    seen: list[tuple[float, float]] = []
    workload = Workload(seed, RUNNER_SHAPE)
    started_s = time.monotonic()

    async def user(client: Conversation) -> None:
        while (asked_s := time.monotonic() - started_s) < LEAD_S + bench.options.window_s:
            ask = client.next()
            assert ask is not None, "these users never end"
            ttft_s, answer = await ask_one(bench.session, bench.url, ask)
            client.answered(answer)
            if ttft_s is not None:
                seen.append((asked_s, ttft_s))
            await asyncio.sleep(client.rng.expovariate(1 / bench.options.think_s))

    clients = (workload.client(kind, number) for number, kind in enumerate(USERS))
    await asyncio.gather(*map(user, clients))
    return seen


async def floor(bench: Bench) -> None:
    """A warm-up of all documents against the prefill of as many tokens, alone."""
    ratios: dict[str, list[float]] = {"s": [], "engine_cpu_s": []}
    for number in range(bench.options.rounds):
        sides: dict[str, float] = {}
        for side in ("prefill", "warmup") if number % 2 == 0 else ("warmup", "prefill"):
            await bench.reset()
            texts, manifest = bench.documents(bench.options.documents)
            before_s = _engines_cpu_s()
            if side == "warmup":
                sides["warmup_s"], result = await bench.warm(manifest)
                assert result["exit_code"] == 0, result
                sides["computed_tokens"] = result["computed_tokens"]
            else:
                sides["prefill_s"] = await _prefill(bench, texts)
            sides[f"{side}_engine_cpu_s"] = _engines_cpu_s() - before_s
        for figure, found in ratios.items():
            found.append(sides[f"warmup_{figure}"] / sides[f"prefill_{figure}"])
        _print({"part": "floor", "round": number, **sides})
    for figure, found in ratios.items():
        _print({"part": "floor", "warmup_over_prefill": figure, **_spread(found)})


def _engines_cpu_s() -> float:
    """Return the CPU seconds of the runners, which a busy box stretches less than the clock."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            is_ours = int(fields[1]) == os.getpid()
            if is_ours and b"\0runner\0" in (path / "cmdline").read_bytes():
                total += int(fields[11]) + int(fields[12])
        except FileNotFoundError:  # it has just ended
            continue
    return total / os.sysconf("SC_CLK_TCK")


async def _prefill(bench: Bench, texts: Sequence[str]) -> float:
    """Send half of the documents to each runner, two at a time; return the seconds."""

    async def sender(queue: Any, url: str) -> None:
        for document in queue:
            await bench.ask(document, url)

    started_s = time.monotonic()
    halves = [iter(texts[i::2]) for i in range(2)]
    await asyncio.gather(
        *(
            sender(half, engine.url)
            for half, engine in zip(halves, bench.engines, strict=True)
            for _ in range(2)
        )
    )
    return time.monotonic() - started_s


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[-1]


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    found = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(value, 3) for name, value in found.items()}


def _print(row: dict[str, Any]) -> None:
    print(
        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}),
        flush=True,
    )


async def run(options: argparse.Namespace) -> None:
    """Start the fleet and measure the parts asked for."""
    async with Bench(options) as bench:
        for part in options.parts:
            await {"touches": touches, "traffic": traffic, "floor": floor}[part](bench)


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", required=True, help="model folder; the runners' weights")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--words", type=int, default=2000, help="of a document, about tokens")
    parser.add_argument("--documents", type=int, default=100, help="of `floor`")
    parser.add_argument("--touches", type=int, default=40, help="documents of `touches`")
    parser.add_argument("--beside", type=int, default=4, help="documents of `traffic`, each pair")
    parser.add_argument("--window-s", type=float, default=20.0, help="of each side of `traffic`")
    parser.add_argument("--think-s", type=float, default=1.0, help="mean pause of a user")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-tokens", type=int, help="KV tokens of each engine; 23 KB each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mocks", action="store_true", help="timed mock engines, not runners")
    parser.add_argument("--slowdown", type=float, default=20.0, help="stretches the mocks' times")
    options = parser.parse_args()
    options.runners = 0 if options.mocks else 2
    if options.pool_tokens is None:
        counts = {"touches": options.touches, "traffic": options.beside, "floor": options.documents}
        most = max(counts[part] for part in options.parts) * options.words
        options.pool_tokens = int(PLACED_SHARE * most) + USERS_TOKENS
    asyncio.run(run(options))


if __name__ == "__main__":
    main()

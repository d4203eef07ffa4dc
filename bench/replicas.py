"""Several gateways as one: hit tokens, gateways that die and join, a Redis that stalls and dies.

    python -m bench.replicas --tokenizer models/smollm2
    python -m bench.replicas --tokenizer models/smollm2 --parts stall --pairs 5

Gateways, engines (timed mocks with a paged cache and KV events) and a Valkey are processes of their
own; the gateways' wall clocks are up to 2 s apart. Every request goes to another gateway. Parts:

hits    the same workload through one gateway and through four, from cold engines; also with the
        gateways not sharing anything, for comparison
burst   twenty clients ask about one document that nobody holds, through four gateways at once: how
        often it is computed
faults  four gateways under load: one is killed -9, a fifth joins and must choose as the others do
        from its first request, Redis is killed and comes back; no request may fail, except those
        that the killed gateway had in its hands
stall   pairs of undisturbed time and time with Redis standing still: ratios of p50 and p99
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from random import Random
from statistics import fmean, median, quantiles
from typing import Any

import aiohttp

from bench.fleet import ask_one, prefill_tokens
from bench.fleet_workload import Ask, Workload
from bench.stand import SHAPE, Outcome, Stand

# Template and words of one question, and half a block of the document's end.
QUESTION_TOKENS = 24


async def hits(options: argparse.Namespace) -> None:
    """Compare the hit tokens of one gateway, of several, and of several that share nothing."""
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, count, is_shared in (("one", 1, True), ("four", 4, True), ("apart", 4, False)):
            async with Stand(options, is_shared=is_shared) as stand:
                await stand.add_gateways(count)
                outcome = await stand.load(options.asks)
                hit = await stand.hit_tokens()
                found.setdefault(name, []).append(hit)
                say(
                    part="hits", gateways=name, hit_tokens=round(hit), **figures(outcome),
                    prefill_tokens=round(await prefill_tokens(stand.engines)),
                )  # fmt: skip
    whole = median(found["one"])
    say(
        part="hits", four_over_one=round(median(found["four"]) / whole, 4),
        apart_over_one=round(median(found["apart"]) / whole, 4), target=">= 0.95",
    )  # fmt: skip


async def burst(options: argparse.Namespace) -> None:
    """Ask about a document that nobody holds, twenty at once through all gateways."""
    async with Stand(options) as stand:
        await stand.add_gateways(options.gateways)
        await stand.load(4)  # speeds are known, caches are not empty
        workload = Workload(options.seed + 1, SHAPE)
        timeout = aiohttp.ClientTimeout(total=120)
        prefills = []
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for number in range(10):
                text = next(workload.one_shot(Random(f"burst/{number}"))).messages[1]["content"]
                asks = []
                for client in range(20):
                    question = {"role": "user", "content": f"Question {client}?"}
                    document = {"role": "system", "content": text}
                    asks.append(Ask("burst", [document, question], SHAPE.output_tokens))
                before = await prefill_tokens(stand.engines)
                await asyncio.gather(*(ask_one(session, stand.next_gateway(), a) for a in asks))
                computed = await prefill_tokens(stand.engines) - before
                body = {"model": "m", "messages": asks[0].messages}
                url = f"{stand.gateways[0]}/admin/v1/explain"
                async with session.post(url, json=body) as answer:
                    size = (await answer.json())["prompt_tokens"]
                # Every question has its own tokens, and those of the block that they begin in.
                prefills.append((computed - len(asks) * QUESTION_TOKENS) / size)
    say(
        part="burst", gateways=options.gateways, target="<= 2",
        prefills_of_each_document=[round(p, 2) for p in prefills],
    )  # fmt: skip


async def faults(options: argparse.Namespace) -> None:
    """Kill a gateway, add one, kill Redis and bring it back, all under one load."""
    async with Stand(options) as stand:
        await stand.add_gateways(4)
        stop = asyncio.Event()
        load = asyncio.create_task(stand.load(None, stop))
        await asyncio.sleep(options.phase_s)
        await stand.kill_gateway(stand.gateways[3])
        await asyncio.sleep(options.phase_s)
        started_s = time.monotonic()
        fifth = await stand.start_gateway()
        say(part="faults", fifth_ready_s=round(time.monotonic() - started_s, 2),
            **await agreement(stand, fifth))  # fmt: skip
        stand.gateways.append(fifth)
        await asyncio.sleep(options.phase_s)
        before = stand.outcome.failed
        await stand.kill_redis()
        await asyncio.sleep(options.phase_s)
        await stand.start_redis()
        await asyncio.sleep(options.phase_s)
        say(part="faults", failed_while_redis_died_and_returned=stand.outcome.failed - before)
        stop.set()
        outcome = await load
        say(part="faults", **figures(outcome), on_the_killed_gateway=outcome.on_the_killed)


async def agreement(stand: Stand, fifth: str) -> dict[str, Any]:
    """Ask a new gateway and an old one where the same prompts would go, before it got any."""
    workload = Workload(stand.options.seed, SHAPE)
    rng = Random(7)
    same = same_hits = total = 0
    async with aiohttp.ClientSession() as session:
        for number in range(30):
            ask = next(workload.document_question(Random(f"fifth/{number}/{rng.random()}")))
            body = {"model": "m", "messages": ask.messages, "stream": True}
            answers = []
            for base in (stand.gateways[0], fifth):
                async with session.post(f"{base}/admin/v1/explain", json=body) as answer:
                    answers.append(await answer.json())
            old, new = (
                {c["worker"]: c["hit_tokens"]["gpu"] for c in a["candidates"]} for a in answers
            )
            same += answers[0]["decision"]["worker"] == answers[1]["decision"]["worker"]
            same_hits += old == new
            total += 1
    return {
        "same_worker": f"{same}/{total}",
        "same_hit_tokens_on_all_workers": f"{same_hits}/{total}",
    }


async def stall(options: argparse.Namespace) -> None:
    """Compare latencies with Redis standing still to those before and after, in pairs."""
    ratios: list[tuple[float, float]] = []
    async with Stand(options) as stand:
        await stand.add_gateways(options.gateways)
        await stand.load(4)  # warm caches
        for number in range(options.pairs):
            pair = []
            # Which comes first alternates, so that drift counts for neither.
            for stalled in (False, True) if number % 2 else (True, False):
                if stalled:
                    stand.stall_redis(stalled=True)
                stop = asyncio.Event()
                load = asyncio.create_task(stand.load(None, stop))
                await asyncio.sleep(options.stall_s)
                stop.set()
                outcome = await load
                if stalled:
                    stand.stall_redis(stalled=False)
                    await asyncio.sleep(3.0)
                p50, p99 = median(outcome.ttfts_s), quantiles(outcome.ttfts_s, n=100)[-1]
                pair.append((stalled, p50, p99))
                say(part="stall", pair=number, stalled=stalled, **figures(outcome))
            by = {stalled: (p50, p99) for stalled, p50, p99 in pair}
            ratios.append((by[True][0] / by[False][0], by[True][1] / by[False][1]))
    say(
        part="stall", p50_ratio=round(median(r[0] for r in ratios), 3),
        p99_ratio=round(median(r[1] for r in ratios), 3), target="p50 <= 1.05, p99 <= 1.25",
    )  # fmt: skip


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return a run's figures as plain values."""
    ttfts_s = outcome.ttfts_s
    return {
        "requests": len(ttfts_s),
        "failed": outcome.failed,
        "mean_ttft_s": round(fmean(ttfts_s), 4),
        "p50_ttft_s": round(median(ttfts_s), 4),
        "p99_ttft_s": round(quantiles(ttfts_s, n=100)[-1], 4),
    }


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


PARTS = {"hits": hits, "burst": burst, "faults": faults, "stall": stall}


async def run(options: argparse.Namespace) -> None:
    """Run the parts that were asked for."""
    for part in options.parts:
        await PARTS[part](options)


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a model's tokenizer")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS),
    )  # fmt: skip
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=4, help="of the parts burst and stall")
    parser.add_argument("--pool-tokens", type=int, default=30_000, help="KV tokens of each engine")
    parser.add_argument(
        "--slowdown", type=float, default=6.0,
        help="stretches the engines' time, so that one machine can load them",
    )  # fmt: skip
    parser.add_argument("--asks", type=int, default=30, help="requests of each client, part hits")
    parser.add_argument("--rounds", type=int, default=1, help="of the part hits")
    parser.add_argument("--phase-s", type=float, default=8.0, help="of the part faults")
    parser.add_argument("--pairs", type=int, default=5, help="of the part stall")
    parser.add_argument("--stall-s", type=float, default=10.0, help="of the part stall")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""What reading prompts costs the event loop: python -m bench.prompt_pipeline.

Real parts: the gateway's dispatcher with a tokenizer folder (``--tokenizer``), four workers without
events. Three things: a conversation that grows over 24 turns (17 KB in the mean), as a
client with history sends it; one unseen prompt of 128 KB, and how long it keeps others from the
loop; and the memory of known text when more is read than it may hold. The last line is JSON.

Loop time is the CPU time of the loop's thread; tokens that come behind a request are counted apart.
Blockage is the longest a 0.2 ms timer was late, less what the same machine does to it when idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from gateway.routing.dispatch import Dispatcher, Inbound, Plan
from gateway.routing.pool import Pool, Worker
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.memo import MAX_MEMO_BYTES
from prefix_index.prompts import PromptReader
from prefix_index.tokens import PromptTokenizer

WORDS = (
    *("the", "of", "and", "to", "in", "a", "is", "that", "it", "was", "prefix", "cache", "token"),
    *("how", "many", "people", "would", "find", "their", "answers", "after", "words", "called"),
    *("router", "because", "different", "between", "together", "Monday", "report", "thirty"),
)
TURNS = 24
CONCURRENT = 8
# 24 turns of these sizes are 3 to 30 KB, 17 KB in the mean: the conversations of the data plane's
# bench.
SYSTEM_CHARS, FIRST_CHARS, ANSWER_CHARS, QUESTION_CHARS = 2500, 600, 700, 450
UNSEEN_BYTES = 128 * 1024
PROBE_S = 0.0002
TARGET_LOOP_US = 120.0
TARGET_BLOCK_MS = 5.0


def prose(rng: random.Random, num_chars: int) -> str:
    words: list[str] = []
    size = 0
    while size < num_chars:
        word = rng.choice(WORDS) if rng.random() < 0.97 else str(rng.randrange(10**6))
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:num_chars]


def inbound(messages: list[dict[str, str]]) -> Inbound:
    body: dict[str, Any] = {"model": "m", "stream": True, "messages": list(messages)}
    return Inbound("chat", body, {}, "m")


def conversations(rng: random.Random, count: int) -> list[list[Inbound]]:
    """Return the requests of each conversation, turn by turn."""
    result = []
    for _ in range(count):
        messages = [
            {"role": "system", "content": prose(rng, SYSTEM_CHARS)},
            {"role": "user", "content": prose(rng, FIRST_CHARS)},
        ]
        turns = []
        for _ in range(TURNS):
            turns.append(inbound(messages))
            messages.append({"role": "assistant", "content": prose(rng, ANSWER_CHARS)})
            messages.append({"role": "user", "content": prose(rng, QUESTION_CHARS)})
        result.append(turns)
    return result


def make(
    tokenizer: PromptTokenizer, max_memo_bytes: int = MAX_MEMO_BYTES
) -> tuple[Pool, Dispatcher]:
    assert tokenizer.template_source is not None
    template = ChatTemplate(tokenizer.template_source, special_tokens=tokenizer.special_tokens)
    reader = PromptReader(
        tokenizer, template, model="m", block_size=16, max_memo_bytes=max_memo_bytes
    )
    workers = [Worker(f"w{k}", "", mode="approximate") for k in range(4)]
    pool = Pool("chat", models=["m"], reader=reader, index=Index(16), workers=workers)
    return pool, Dispatcher([pool], seed=0)


async def settled(plan: Plan) -> None:
    """Return once the plan's tokens are there."""
    if plan.is_behind:
        arrived = asyncio.Event()
        plan.when_settled(arrived.set)
        await arrived.wait()


async def growing(tokenizer: PromptTokenizer, rounds: int) -> dict[str, float]:
    """Read conversations turn by turn, eight at a time; all text is new when it first comes."""
    rng = random.Random(7)
    batches = []
    sizes: list[int] = []
    for _ in range(rounds):
        pool, routes = make(tokenizer)
        read_s = behind_s = 0.0
        requests = conversations(rng, CONCURRENT)
        for wave in zip(*requests, strict=True):
            sizes += [sum(len(m["content"]) for m in r.body["messages"]) for r in wave]
            start_s = time.thread_time()
            plans = [await routes.plan(pool, request) for request in wave]
            read_at_s = time.thread_time()
            for plan in plans:
                await settled(plan)
            read_s += read_at_s - start_s
            behind_s += time.thread_time() - read_at_s
        batches.append((read_s / (CONCURRENT * TURNS), behind_s / (CONCURRENT * TURNS)))
    # On a shared machine the quietest round says most about the code.
    read_s, behind_s = min(batches, key=sum)
    return {
        "mean_prompt_bytes": round(mean(sizes)),
        "loop_us": round((read_s + behind_s) * 1e6, 1),
        "read_us": round(read_s * 1e6, 1),
        "settle_us": round(behind_s * 1e6, 1),
    }


async def latest_s(done: asyncio.Event) -> float:
    """Return the longest that a short timer was late until ``done``."""
    worst = 0.0
    while not done.is_set():
        start = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        worst = max(worst, time.perf_counter() - start - PROBE_S)
    return worst


async def blocked_s(routes: Dispatcher, pool: Pool, request: Inbound | None) -> float:
    """Return the loop's longest pause while a prompt is read, or during as long a rest."""
    done = asyncio.Event()
    probe = asyncio.ensure_future(latest_s(done))
    await asyncio.sleep(0.002)
    if request is None:
        await asyncio.sleep(0.15)
    else:
        await settled(await routes.plan(pool, request))
    done.set()
    return await probe


async def blockage(tokenizer: PromptTokenizer, rounds: int) -> dict[str, float]:
    """Read unseen prompts of 128 KB, one message each, beside a timer."""
    rng = random.Random(11)
    pool, routes = make(tokenizer)
    floors, pauses, reads = [], [], []
    for _ in range(rounds):
        floors.append(await blocked_s(routes, pool, None))
        request = inbound([{"role": "user", "content": prose(rng, UNSEEN_BYTES)}])
        pauses.append(await blocked_s(routes, pool, request))
        request = inbound([{"role": "user", "content": prose(rng, UNSEEN_BYTES)}])
        start_s = time.thread_time()
        plan = await routes.plan(pool, request)
        reads.append(time.thread_time() - start_s)
        await settled(plan)
    return {
        "unseen_bytes": UNSEEN_BYTES,
        "inline_ms": round(median(reads) * 1e3, 2),
        "blocked_p50_ms": round(median(pauses) * 1e3, 2),
        "blocked_max_ms": round(max(pauses) * 1e3, 2),
        "idle_p50_ms": round(median(floors) * 1e3, 2),
        "idle_max_ms": round(max(floors) * 1e3, 2),
    }


async def memory(tokenizer: PromptTokenizer, max_bytes: int) -> dict[str, float]:
    """Read three times as much as the memory may hold."""
    rng = random.Random(13)
    pool, routes = make(tokenizer, max_bytes)
    assert pool.reader is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_bytes, worst = 0, 0
    while num_bytes < 2 * max_bytes:
        request = inbound([{"role": "user", "content": prose(rng, 16_000)}])
        await routes.plan(pool, request, in_full=True)
        num_bytes += 16_000
        worst = max(worst, pool.reader.memo_bytes)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "memo_bound_mb": round(max_bytes / 2**20, 1),
        "memo_max_mb": round(worst / 2**20, 1),
        "rss_growth_mb": round(grown / 1024, 1),
    }


async def run(tokenizer: PromptTokenizer, rounds: int, memo_mb: int) -> dict[str, float]:
    return {
        **await growing(tokenizer, rounds),
        **await blockage(tokenizer, 3 * rounds),
        **await memory(tokenizer, memo_mb * 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--memo-mb", type=int, default=8)
    options = parser.parse_args()
    tokenizer = PromptTokenizer.from_dir(options.tokenizer)
    found = asyncio.run(run(tokenizer, options.rounds, options.memo_mb))
    rows = [
        ("growing conversation, mean bytes", f"{found['mean_prompt_bytes']:.0f}", ""),
        ("  loop CPU per request, us", found["loop_us"], f"target {TARGET_LOOP_US:.0f}"),
        ("  of it reading / taking tokens over", f"{found['read_us']} / {found['settle_us']}", ""),
        ("unseen prompt of 128 KB, on the loop, ms", found["inline_ms"], ""),
        ("  loop blocked, median, ms", found["blocked_p50_ms"], f"target {TARGET_BLOCK_MS:.0f}"),
        ("  loop blocked, most, ms", found["blocked_max_ms"], ""),
        ("  the same at rest, median / most, ms",
         f"{found['idle_p50_ms']} / {found['idle_max_ms']}", ""),
        ("memory of text, MB (bound)", found["memo_max_mb"], f"bound {found['memo_bound_mb']}"),
        ("  process grew by, MB", found["rss_growth_mb"], ""),
    ]  # fmt: skip
    for label, value, note in rows:
        print(f"{label:42} {value!s:>14}  {note}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

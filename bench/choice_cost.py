"""CPU time of a choice over many workers, by step: python bench/choice_cost.py.

A fleet with requests in flight and an 8k-token prompt of which some workers hold most. ``choose``
is the pure function on numbers already collected; ``decision`` is all that stands between a read
prompt and its worker: the look-up in the index, the candidates, the choice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from gateway.routing.candidates import route_input
from gateway.routing.choose import choose
from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Inbound
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool, Worker
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from prefix_index.tokens import PromptTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.plan import Plan

PROMPT_TOKENS = 8192
SHARED_TOKENS = 512
HOLDERS = 4
# The quickest of so many: on a shared machine that says most about the code.
ROUNDS = 2000
# What stands in the index: a long prefix on a few workers, on all, the shared system prompt alone,
# or nothing of this prompt.
CASES = ("held by few", "held by all", "shared start", "cold")


def quickest_us(action: Callable[[], object]) -> float:
    """Return the least time of many runs, in microseconds."""
    quickest = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        quickest = min(quickest, time.perf_counter() - start)
    return round(quickest * 1e6, 1)


def make_fleet(num_workers: int, rng: Random, *, pulls: bool) -> Pool:
    """Return workers that differ a little in speed, as measured ones do."""
    workers = []
    for k in range(num_workers):
        speed = CostModel(3.25e-5 * rng.uniform(0.9, 1.1), 1.17e-9, 0.004, 5.2e-8)
        worker = Worker(f"w{k}", "", mode="exact", learner=Learner(speed), can_pull=pulls)
        worker.serves_peers = pulls
        worker.capacity_tokens = 400_000
        workers.append(worker)
    tokenizer = PromptTokenizer.from_dir(Path("models/smollm2"))
    assert tokenizer.template_source is not None
    template = ChatTemplate(tokenizer.template_source, special_tokens=tokenizer.special_tokens)
    reader = PromptReader(tokenizer, template, model="m", block_size=16)
    return Pool(
        "chat", models=["m"], engine="vllm", reader=reader, index=Index(16), workers=workers
    )


async def read(routes: Dispatcher, pool: Pool, token_ids: list[int]) -> Plan:
    """Read a prompt of token ids."""
    body = {"model": "m", "stream": True, "prompt": token_ids}
    return await routes.plan(pool, Inbound("completions", body, {}, "m"), in_full=True)


async def measure(num_workers: int, case: str, *, pulls: bool) -> dict[str, object]:
    """Time one case."""
    rng = Random(1)
    pool = make_fleet(num_workers, rng, pulls=pulls)
    index = pool.index
    assert index is not None
    routes = Dispatcher([pool], seed=0)

    def some_ids(count: int) -> list[int]:
        return [rng.randrange(40_000) for _ in range(count)]

    plan = await read(routes, pool, some_ids(PROMPT_TOKENS))
    assert plan.prompt is not None
    hashes, root = plan.prompt.block_hashes, plan.prompt.root
    for k, worker_id in enumerate(pool.workers):
        if case == "held by all" or (case == "held by few" and k < HOLDERS):
            index.store(worker_id, hashes, root)
        elif case == "shared start":
            index.store(worker_id, hashes[: SHARED_TOKENS // 16], root)
    tickets = []
    for _ in range(2 * num_workers):
        other = await read(routes, pool, some_ids(rng.randrange(500, 4000)))
        tickets.append(routes.admit(other, routes.choose(other)))
    for ticket in tickets[::2]:
        ticket.first_token()
    now_s = time.monotonic()
    request = route_input(plan, now_s)
    return {
        "workers": num_workers,
        "case": case,
        "pulls": pulls,
        "microseconds": {
            "match": quickest_us(lambda: index.match(plan.hashes or ())),
            "candidates with match": quickest_us(lambda: route_input(plan, now_s)),
            "choose": quickest_us(lambda: choose(request, rotation=1)),
            "decision": quickest_us(lambda: choose(route_input(plan, now_s), rotation=1)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 256])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--pulls", action="store_true", help="workers can fetch KV from peers")
    options = parser.parse_args()
    for num_workers in options.workers:
        for case in options.case:
            print(json.dumps(asyncio.run(measure(num_workers, case, pulls=options.pulls))))


if __name__ == "__main__":
    main()

"""How long a warm-up plan takes: 10,000 documents on 64 workers.

    python bench/warm_plan.py [--documents N] [--workers N] [--rounds N]

Times what the gateway does after the items are read: homes on the ring, who holds what in an index
that is full of other prefixes, what is hot where, and the plan itself; the plan alone beside it.
Target: 2 s for 10,000 documents on 64 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from array import array
from random import Random

from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.routing.cost import CostModel
from gateway.routing.learner import Learner
from gateway.warm.items import Item
from gateway.warm.placement import Placer
from gateway.warm.plan import make_plan
from gateway.warm.shareable import Shareable
from gateway.warm.warmed import Warmed
from gateway.worth.account import WorthAccount
from gateway.worth.group import Group, Use
from prefix_index.blocks import root_hash
from prefix_index.index import Index

BLOCK = 16
# Llama 8B on an H100.
MODEL = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8)
TARGET_S = 2.0


def make_fleet(num_workers: int) -> Fleet:
    """Return a fleet of workers of known capacity and speed, which nobody watches."""
    workers = [{"id": f"w{k}", "url": f"http://127.0.0.1:{9000 + k}"} for k in range(num_workers)]
    config = {"name": "chat", "models": ["m"], "engine": "vllm", "workers": workers}
    fleet = Fleet(Settings.model_validate({"pools": [config]}))
    pool = fleet.pools[0]
    pool.index = Index(BLOCK)
    for worker in pool.workers.values():
        worker.capacity_tokens = 400_000
        worker.mode = "exact"
        worker.learner = Learner(MODEL)
    return fleet


def make_items(fleet: Fleet, num_documents: int, rng: Random) -> list[Shareable]:
    """Return documents of 500 to 4,000 tokens, two copies each; a tenth of them held somewhere."""
    pool = fleet.pools[0]
    assert pool.index is not None
    root = root_hash("m")
    workers = list(pool.workers)
    found = []
    for number in range(num_documents):
        num_blocks = rng.randrange(31, 250)
        hashes = [rng.randbytes(16) for _ in range(num_blocks)]
        if rng.random() < 0.1:
            pool.index.store(rng.choice(workers), hashes, root)
        item = Item(f"d{number}", copies=2, priority=rng.randrange(3))
        tokens = num_blocks * BLOCK
        key = f"0:|document|d{number}"
        found.append(Shareable(item, pool, array("I"), tokens, hashes, key, tokens + 40, {}))
    return found


def make_account(fleet: Fleet, rng: Random) -> WorthAccount:
    """Return an account with as many hot documents as it keeps, all of them held somewhere."""
    account = WorthAccount()
    pool = fleet.pools[0]
    assert pool.index is not None
    root = root_hash("m")
    now_s = time.monotonic()
    for number in range(2048):
        hashes = [rng.randbytes(16) for _ in range(64)]
        pool.index.store(f"w{number % len(pool.workers)}", hashes, root)
        group: Group = account._documents.use("chat", f"0:|document|hot{number}", now_s, tenant="")
        for _ in range(rng.randrange(1, 5)):
            group.add(Use(1100, 1024, 0, 0.03, 76, 76.0, 0.0, MODEL.token_s), now_s)
        group.shared_end, group.shared_end_tokens = hashes[-1], 1024
    return account


async def measure(num_documents: int, num_workers: int, rounds: int) -> None:
    """Print the times."""
    rng = Random(5)
    fleet = make_fleet(num_workers)
    found = make_items(fleet, num_documents, rng)
    placer = Placer(fleet, make_account(fleet, rng), Warmed())
    pool = fleet.pools[0]
    for worker in pool.workers.values():
        worker.upstream = None  # nobody to ask for its context
    whole, alone = [], []
    for _ in range(rounds):
        began_s = time.perf_counter()
        placements = await placer.plan(found, None, now_s=time.monotonic())
        whole.append(time.perf_counter() - began_s)
        wanted = [placer._wanted(one) for one in found]
        hosts = placer._hosts(pool, list(pool.workers.values()), time.monotonic())
        began_s = time.perf_counter()
        make_plan(wanted, hosts)
        alone.append(time.perf_counter() - began_s)
    actions: dict[str, int] = {}
    for placement in placements:
        actions[placement.action] = actions.get(placement.action, 0) + 1
    print(f"{num_documents} documents x 2 copies, {num_workers} workers, {rounds} rounds")
    print(f"  whole plan  median {statistics.median(whole):.3f} s  max {max(whole):.3f} s")
    print(f"  plan alone  median {statistics.median(alone):.3f} s  max {max(alone):.3f} s")
    print(f"  placements  {actions}")
    print(f"  target      {TARGET_S} s: {'met' if max(whole) <= TARGET_S else 'MISSED'}")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.documents, options.workers, options.rounds))


if __name__ == "__main__":
    main()

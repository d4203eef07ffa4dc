"""Speed and memory of the view of who holds what: python -m bench.index [--full].

A fleet of 64 workers: chains of 16 to 2,000 blocks, 1.3 holders per block on average, a fifth of
the chains also in lower tiers, some of them only there, some blocks stored twice. Prints one JSON
line per figure. Times are of the thread's CPU clock, since the box is shared; the rounds of a
figure and of its floor are interleaved. ``--full`` holds 5 million blocks instead of one.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import msgspec

from prefix_index.blocks import hash_blocks, root_hash
from prefix_index.events import BlockStored, EventBatch, decode_batch, encode_batch
from prefix_index.index import Index
from prefix_index.ingest import WorkerFeed

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = root_hash("m")
NUM_WORKERS = 64
BLOCK_SIZE = 64
LONG_BLOCKS = 2000
LOT = 8  # look-ups timed together: the clock itself costs as much as one
PAGE_BYTES = 4096
clock = time.thread_time


def show(figure: str, **values: object) -> None:
    print(json.dumps({"figure": figure, **values}), flush=True)


def microseconds(times_s: list[float]) -> dict[str, float]:
    cuts = quantiles(times_s, n=100)
    return {"median_us": round(median(times_s) * 1e6, 2), "p99_us": round(cuts[98] * 1e6, 2)}


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Fleet:
    """Fills an index and keeps a sample of its long chains."""

    def __init__(self, index: Index, rng: random.Random) -> None:
        self.index = index
        self.rng = rng
        self.workers = [f"http://10.0.0.{k}:8000" for k in range(NUM_WORKERS)]
        self.num_blocks = 0
        self.num_entries = 0
        self.sample: list[list[bytes]] = []

    def fill(self, num_blocks: int) -> None:
        while self.num_blocks < num_blocks:
            length = self.rng.choice((16, 31, 100, 300, LONG_BLOCKS))
            chain = [self.rng.randbytes(16) for _ in range(length)]
            self.num_blocks += length
            self._hold(chain)
            if length == LONG_BLOCKS and (len(self.sample) < 64 or self.rng.random() < 0.2):
                # Some of the whole run, so that not only the youngest are looked up.
                self.sample = [*self.sample[-255:], chain]

    def _hold(self, chain: list[bytes]) -> None:
        index, rng = self.index, self.rng
        first, *others = rng.sample(self.workers, rng.choices((1, 2, 4), (60, 28, 12))[0])
        for start in range(0, len(chain), 128):  # as chunks of a prefill are announced
            parent = chain[start - 1] if start else ROOT
            index.store(first, chain[start : start + 128], parent)
        for worker in others:  # those that share a prefix
            index.store(worker, chain[: rng.randrange(1, len(chain) + 1)], ROOT)
        if rng.random() < 0.2:
            index.store(first, chain, ROOT, rng.choice(("cpu", "cpu", "disk", "remote")))
            if rng.random() < 0.5:
                index.remove(first, chain[len(chain) // 2 :])
        if rng.random() < 0.05:
            index.store(first, chain[: len(chain) // 4], ROOT)


def timed(action: Callable[[], object]) -> float:
    start = clock()
    action()
    return clock() - start


def copies(chains: list[list[bytes]]) -> list[list[bytes]]:
    """Equal keys in other objects that nobody hashed yet, as a request's own are."""
    return [[bytes(bytearray(block)) for block in chain] for chain in chains]


def measure_match(fleet: Fleet, rounds: int, when: str) -> None:
    rng, index = fleet.rng, fleet.index
    sample = [chain for chain in fleet.sample if index.match(chain)]
    unseen = [[rng.randbytes(16) for _ in range(LONG_BLOCKS)] for _ in range(64)]
    plain = {block: 1 for chain in sample for block in chain}
    plain |= {rng.randbytes(16): 1 for _ in range(1_000_000)}
    # As many single look-ups in a dict as a bisection of 2,000 blocks makes for one length.
    steps = range(LONG_BLOCKS // 12, LONG_BLOCKS, LONG_BLOCKS // 12)
    held_s, unseen_s, floor_s, longest, lengths = [], [], [], [], []
    for _ in range(rounds):
        chains, others = copies(rng.sample(sample, LOT)), copies(rng.sample(unseen, LOT))
        floor_s.append(
            timed(lambda c=chains: [[plain.get(x[at]) for at in steps] for x in c]) / LOT
        )
        chains = copies(chains)
        held_s.append(timed(lambda c=chains: [index.match(x) for x in c]) / LOT)
        unseen_s.append(timed(lambda c=others: [index.match(x) for x in c]) / LOT)
        hits = index.match(chains[0])
        longest.append(max(hit.total for hit in hits.values()) // BLOCK_SIZE)
        lengths.append(len(set(hits.values())))
    show(
        f"match held, {when}",
        blocks=LONG_BLOCKS,
        hit_blocks=median(longest),
        different_hits=round(sum(lengths) / rounds, 1),
        **microseconds(held_s),
    )
    show(f"match unseen, {when}", blocks=LONG_BLOCKS, **microseconds(unseen_s))
    show("floor: 12 look-ups in a plain dict", entries=len(plain), **microseconds(floor_s))


def payloads(rng: random.Random, num_blocks: int, event_blocks: int) -> list[bytes]:
    batches = []
    for _ in range(num_blocks // event_blocks):
        tokens = [rng.randrange(150_000) for _ in range(event_blocks * BLOCK_SIZE)]
        event = BlockStored(
            block_hashes=[rng.randbytes(32) for _ in range(event_blocks)],
            parent_block_hash=None,
            token_ids=tokens,
            block_size=BLOCK_SIZE,
            medium="GPU",
        )
        batches.append(encode_batch(EventBatch(ts=1.0, events=[event])))
    return batches


def measure_ingest(rng: random.Random, rounds: int, num_blocks: int = 25_600) -> None:
    batches = payloads(rng, num_blocks, 32)
    generic = msgspec.msgpack.Decoder().decode
    all_s, decode_s, hash_s, apply_s, floor_s = [], [], [], [], []
    for _ in range(rounds):
        floor_s.append(timed(lambda: [generic(payload) and None for payload in batches]))
        decode_s.append(timed(lambda: [decode_batch(payload) and None for payload in batches]))
        decoded = [decode_batch(payload) for payload in batches]
        events = [batch.events[0] for batch in decoded]
        hash_s.append(
            timed(lambda events=events: [hash_blocks(e.token_ids, 64, ROOT) and 0 for e in events])
        )
        feed = WorkerFeed(Index(BLOCK_SIZE), "w", "m")
        apply_s.append(timed(lambda f=feed, d=decoded: [f.apply(batch) for batch in d]))
        del decoded, events
        feed = WorkerFeed(Index(BLOCK_SIZE), "w", "m")
        all_s.append(timed(lambda f=feed: [f.apply(decode_batch(payload)) for payload in batches]))
    show(
        "ingest",
        blocks_per_s=round(num_blocks / median(all_s)),
        best_blocks_per_s=round(num_blocks / min(all_s)),
        tokens_per_block=BLOCK_SIZE,
        us_per_block={
            "all": round(median(all_s) / num_blocks * 1e6, 2),
            "decode_batch": round(median(decode_s) / num_blocks * 1e6, 2),
            "apply": round(median(apply_s) / num_blocks * 1e6, 2),
            "of it hash_blocks": round(median(hash_s) / num_blocks * 1e6, 2),
            "floor: untyped msgpack": round(median(floor_s) / num_blocks * 1e6, 2),
        },
    )


def pauses(times_s: list[float]) -> dict[str, float]:
    return {
        "max_ms": round(max(times_s) * 1e3, 3),
        "p99_ms": round(quantiles(times_s, n=100)[98] * 1e3, 3),
        "calls": len(times_s),
        "total_s": round(sum(times_s), 2),
    }


def measure_clear(fleet: Fleet, num_blocks: int = 1_000_000) -> None:
    index, rng = fleet.index, fleet.rng
    index.max_blocks += num_blocks
    for _ in range(num_blocks // 500):
        index.store("large", [rng.randbytes(16) for _ in range(500)], ROOT)
    clear_s = timed(lambda: index.clear("large"))
    times_s, floor_s, more = [], [], True
    while more:
        start = clock()
        more = index.sweep(500)
        times_s.append(clock() - start)
        floor_s.append(timed(lambda: sum(range(40_000))))
    show("clear of 1M blocks", ms=round(clear_s * 1e3, 3))
    show("sweep(500) after it", **pauses(times_s))
    show("floor: the same time spent adding", **pauses(floor_s))


def measure_trim(fleet: Fleet, num_stores: int = 5000, event_blocks: int = 32) -> None:
    index, rng = fleet.index, fleet.rng
    index.max_blocks = index.num_blocks
    times_s = []
    for _ in range(num_stores):
        worker = rng.choice(fleet.workers)
        chain = [rng.randbytes(16) for _ in range(event_blocks)]
        times_s.append(timed(lambda w=worker, c=chain: index.store(w, c, ROOT)))
    show(
        "store of 32 blocks in a full view",
        over_bound=index.num_blocks - index.max_blocks,
        us_per_block=round(median(times_s) / event_blocks * 1e6, 2),
        **pauses(times_s),
    )


def measure_replica(rng: random.Random, num_blocks: int = 200_000) -> None:
    """Copies set one by one in random order, as a snapshot's fields come."""
    chains = [[rng.randbytes(16) for _ in range(500)] for _ in range(num_blocks // 500)]
    entries = [pair for chain in chains for pair in zip(chain, [ROOT, *chain], strict=False)]
    for order in ("parents first", "random"):
        index = Index(BLOCK_SIZE)
        used_s = timed(lambda i=index: [i.set_copies("w", b, p, 1) for b, p in entries])
        show("set_copies", order=order, us_per_block=round(used_s / num_blocks * 1e6, 2))
        rng.shuffle(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="5 million blocks instead of 1")
    parser.add_argument("--rounds", type=int, default=100, help="lots of 8 look-ups")
    args = parser.parse_args()
    rng = random.Random(5)
    num_blocks = 5_000_000 if args.full else 1_000_000
    before = rss_bytes()
    fleet = Fleet(Index(BLOCK_SIZE, 2 * num_blocks), rng)
    fill_s = timed(lambda: fleet.fill(num_blocks))
    sample_bytes = sum(len(chain) for chain in fleet.sample) * 72  # 64 each and its place in a list
    show(
        "memory",
        bytes_per_block=round((rss_bytes() - before - sample_bytes) / fleet.num_blocks, 1),
        blocks=fleet.num_blocks,
        holders_per_block=round(fleet.index.num_blocks / fleet.num_blocks, 2),
        workers=NUM_WORKERS,
        fill_us_per_block=round(fill_s / fleet.num_blocks * 1e6, 2),
    )
    gc.freeze()
    measure_match(fleet, args.rounds, "filled")
    measure_clear(fleet)
    measure_trim(fleet)
    measure_match(fleet, args.rounds, "after clearing and trimming")
    measure_replica(rng)
    measure_ingest(rng, 7)


if __name__ == "__main__":
    main()

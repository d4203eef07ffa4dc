"""Blocks to and from segments beside the raw disk: python -m bench.segments DIRECTORY.

Each round moves blocks through the store (checksums, entries, delivery into a pool) and with bare
O_DIRECT calls of the same sizes from the same number of threads, in random order, so that both see
the same disk; a ratio is that of one round. Raw calls are made twice: from ordinary memory, as one
would write them, and from memory in huge pages, as the store has it. SmolLM2's blocks in bfloat16
and float32. Patterns: ``run`` asks for 64 neighbours at once (a prefix of 1,024 tokens),
``scattered`` for 64 blocks that lie apart, ``single`` for one. Medians over the rounds; the table
goes to stderr, one JSON object a line to stdout.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING

import numpy as np

from runner.tiers.segments.direct_io import aligned_buffer
from runner.tiers.segments.store import SegmentStore
from runner.tiers.types import BlockRecord, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_BYTES = {"bfloat16": 368_640, "float32": 737_280}
BLOCK_SIZE = 16
CALL_BLOCKS = 64
CAPACITY_BYTES = 512 * 2**20
THREADS = (1, 4)
# Bytes each thread moves in a round, so that a round takes some tens of milliseconds.
ROUND_BLOCKS = 2 * CALL_BLOCKS

Calls = list[list[int]]
"""The slots of each call that one thread makes."""


@dataclass(frozen=True)
class Case:
    dtype: str
    pattern: str
    num_threads: int

    def calls(self, rng: random.Random, num_slots: int) -> Calls:
        if self.pattern == "run":
            starts = rng.choices(range(num_slots - CALL_BLOCKS + 1), k=ROUND_BLOCKS // CALL_BLOCKS)
            return [list(range(start, start + CALL_BLOCKS)) for start in starts]
        # Every other slot at most: none of them are neighbours.
        slots = rng.sample(range(0, num_slots, 2), ROUND_BLOCKS)
        size = CALL_BLOCKS if self.pattern == "scattered" else 1
        return [slots[at : at + size] for at in range(0, len(slots), size)]


class RawFile:
    """A file of as many blocks, all written before, and memory of each kind for each thread."""

    def __init__(self, path: Path, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes = block_bytes
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        size = CALL_BLOCKS * block_bytes
        self.memory = {
            "plain": [memoryview(mmap.mmap(-1, size)) for _ in range(max(THREADS))],
            "huge": [aligned_buffer(size) for _ in range(max(THREADS))],
        }
        for buffer in (*self.memory["plain"], *self.memory["huge"]):
            buffer[:] = b"x" * size
        for offset in range(0, num_blocks * block_bytes, size):
            os.pwritev(self.fd, [self.memory["huge"][0]], offset)
        os.fsync(self.fd)

    def move(
        self, call: Callable[[int, list[memoryview], int], int], calls: Calls, memory: memoryview
    ) -> None:
        for slots in calls:
            neighbours = slots[-1] - slots[0] == len(slots) - 1
            parts = [slots] if neighbours else [[slot] for slot in slots]
            at = 0
            for part in parts:
                buffer = memory[at : at + len(part) * self.block_bytes]
                assert call(self.fd, [buffer], part[0] * self.block_bytes) == buffer.nbytes
                at += buffer.nbytes

    def close(self) -> None:
        os.close(self.fd)


class StoreUser:
    """A full store; puts from and gets into memory as a runner has it."""

    def __init__(self, root: Path, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.store, _ = SegmentStore.open(
            root,
            namespace=bytes(32),
            facts={},
            block_bytes=block_bytes,
            block_size=BLOCK_SIZE,
            capacity_bytes=CAPACITY_BYTES,
            clock=time.monotonic,
        )
        source = aligned_buffer(CALL_BLOCKS * block_bytes)
        source[:] = random.Random(1).randbytes(source.nbytes)
        self.payloads = [
            source[at : at + block_bytes] for at in range(0, source.nbytes, block_bytes)
        ]
        self.pool = np.ones((max(THREADS) * CALL_BLOCKS, block_bytes), np.uint8)
        self._fill()

    def _fill(self) -> None:
        """Use every slot, so that all segments there will be have been made."""
        done = 0
        while done < self.store.ready_slots or self.store.is_growing:
            for slot in range(done, self.store.ready_slots):
                self.put([[slot]])
                done = slot + 1
            time.sleep(0.01)
        self.num_slots = done

    def places(self, slots: Sequence[int]) -> list[Place]:
        tokens = bytes(4 * BLOCK_SIZE)
        return [
            Place(BlockRecord(slot.to_bytes(32, "big"), bytes(32), tokens, 0), slot)
            for slot in slots
        ]

    def put(self, calls: Calls) -> None:
        for slots in calls:
            assert all(self.store.write(self.places(slots), self.payloads[: len(slots)]))

    def get(self, calls: Calls, thread: int) -> None:
        def deliver(index: int, payload: memoryview) -> bool:
            np.copyto(self.pool[thread * CALL_BLOCKS + index], np.frombuffer(payload, np.uint8))
            return True

        for slots in calls:
            outcome = self.store.read(self.places(slots), deliver, float("inf"))
            assert outcome == "done", outcome


def gb_per_s(num_bytes: int, parts: Sequence[Callable[[], None]]) -> float:
    """Run the parts in a thread each."""
    with ThreadPoolExecutor(len(parts)) as threads:
        start = time.perf_counter()
        for running in [threads.submit(part) for part in parts]:
            running.result()
        return num_bytes / (time.perf_counter() - start) / 1e9


def one_round(case: Case, user: StoreUser, raw: RawFile, rng: random.Random) -> dict[str, float]:
    chosen = list(enumerate(case.calls(rng, user.num_slots) for _ in range(case.num_threads)))
    ways: dict[str, list[Callable[[], None]]] = {
        "put": [lambda calls=calls: user.put(calls) for _, calls in chosen],  # type: ignore[misc]
        "get": [lambda i=i, calls=calls: user.get(calls, i) for i, calls in chosen],  # type: ignore[misc]
    }
    for kind, memory in raw.memory.items():
        for name, call in (("put", os.pwritev), ("get", os.preadv)):
            ways[f"{name}_{kind}"] = [
                lambda i=i, calls=calls, call=call, memory=memory: raw.move(call, calls, memory[i])  # type: ignore[misc]
                for i, calls in chosen
            ]
    names = list(ways)
    rng.shuffle(names)
    num_bytes = case.num_threads * ROUND_BLOCKS * user.block_bytes
    return {name: gb_per_s(num_bytes, ways[name]) for name in names}


def summary(case: Case, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    row: dict[str, object] = asdict(case)
    for name in ("put", "get"):
        row[f"{name}_gb_s"] = round(median(rates[name] for rates in rounds), 2)
        for kind in ("plain", "huge"):
            ratios = [rates[name] / rates[f"{name}_{kind}"] for rates in rounds]
            low, middle, high = quantiles(ratios, n=4)
            row[f"{name}_raw_{kind}_gb_s"] = round(median(r[f"{name}_{kind}"] for r in rounds), 2)
            row[f"{name}_to_{kind}"] = round(middle, 2)
            row[f"{name}_to_{kind}_quartiles"] = [round(low, 2), round(high, 2)]
    return row


def table_line(row: dict[str, object]) -> str:
    parts = [f"{row['dtype']:>9} {row['pattern']:>9} {row['num_threads']} threads"]
    for name in ("put", "get"):
        parts.append(f"{name} {row[f'{name}_gb_s']:.2f} GB/s")
        parts += [
            f"{row[f'{name}_to_{kind}']:.2f} of {kind} {row[f'{name}_to_{kind}_quartiles']}"
            for kind in ("plain", "huge")
        ]
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the disk to measure; takes 2.2 GB of it")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=BLOCK_BYTES, action="append")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    rng = random.Random(1)
    try:
        for dtype in args.dtype or BLOCK_BYTES:
            user = StoreUser(directory / dtype, BLOCK_BYTES[dtype])
            raw = RawFile(directory / f"{dtype}.raw", user.block_bytes, user.num_slots)
            for pattern in ("run", "scattered", "single"):
                for num_threads in THREADS:
                    case = Case(dtype, pattern, num_threads)
                    rounds = [one_round(case, user, raw, rng) for _ in range(args.rounds)]
                    row = summary(case, rounds)
                    print(table_line(row), file=sys.stderr, flush=True)
                    print(json.dumps(row), flush=True)
            raw.close()
            user.store.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()

"""Starts writers to be killed: python -m tests.runner.segment_writer ROOT, a seed a line on stdin.

Each seed forks a process that opens the store and writes until it is killed; its process id is
printed once the store is open, and "gone" once it is dead. Forking spares each its imports.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import structlog

from tests.runner.segment_parts import fill, open_store, until

NUM_BLOCKS = 400


def write_until_killed(root: Path, rng: random.Random) -> None:
    store, _ = open_store(root)
    # In a new root there is no slot yet: dying while the first segment is made is one of the ways.
    print(os.getpid(), flush=True)
    until(lambda: store.ready_slots > 0)
    while True:
        count = min(rng.randint(1, 8), store.ready_slots)
        first = rng.randrange(store.ready_slots - count + 1)
        fill(store, range(first, first + count), first_number=rng.randrange(NUM_BLOCKS))
        if rng.random() < 0.2:
            store.invalidate(rng.sample(range(store.ready_slots), 2))


def main(root: Path) -> None:
    # Standard output is for whoever kills.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            write_until_killed(root, random.Random(int(line)))
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

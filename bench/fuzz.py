"""Fuzz what reads bytes from outside: event streams, KV events, forms, the client port, the API.

    python -m bench.fuzz front --seconds 600
    python -m bench.fuzz sse events --seconds 600 --engine atheris

With atheris (``pip install atheris``) inputs follow coverage, else they are mutated at random; the
seed makes a run repeatable. The first failure is printed with its input, as Python bytes.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("sse", "events", "forms", "front", "api")
MAX_BYTES = 6000


def targets(engine: str) -> dict[str, Any]:
    """Load the targets; for atheris with what tells it which lines an input reaches."""
    if engine != "atheris":
        return import_module("bench.fuzz_targets").TARGETS
    import atheris

    with atheris.instrument_imports(include=["gateway", "prefix_index"]):
        return import_module("bench.fuzz_targets").TARGETS


def mutate(random: Random, seeds: list[bytes], words: list[bytes]) -> bytes:
    """Return a seed with a few bytes changed: removed, doubled, replaced by words or noise."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        at = random.randrange(len(data) + 1)
        to = at + random.choice((0, 0, 1, 2, 8, 40))
        match random.randrange(5):
            case 0:
                del data[at:to]
            case 1:
                data[at:to] = random.choice(words)
            case 2:
                data[at:to] = random.randbytes(random.choice((1, 1, 2, 4)))
            case 3:
                data[at:at] = data[at : at + random.choice((1, 4, 20, 200))]
            case _:
                other = random.choice(seeds)
                data[at:to] = other[random.randrange(len(other) + 1) :]
    return bytes(data[:MAX_BYTES])


def by_mutation(
    target: Callable[[bytes], None],
    seeds: list[bytes],
    words: list[bytes],
    args: argparse.Namespace,
) -> int:
    """Run until the time is over; return how many inputs there were."""
    random, count = Random(args.seed), 0
    end_s = time.monotonic() + args.seconds
    # Inputs grow out of others, as far as memory and sense go.
    corpus = list(seeds)
    while time.monotonic() < end_s:
        data = mutate(random, corpus, words)
        count += 1
        try:
            target(data)
        except Exception:
            print(f"input {count}: {data!r}", file=sys.stderr)
            raise
        if random.random() < 0.01:
            corpus[len(seeds) :] = [*corpus[len(seeds) :], data][-200:]
    return count


def by_atheris(
    target: Callable[[bytes], None], seeds: list[bytes], args: argparse.Namespace
) -> None:
    """Let atheris run the target; it ends the process itself."""
    import tempfile
    from pathlib import Path

    import atheris

    folder = Path(tempfile.mkdtemp())
    for i, seed in enumerate(seeds):
        (folder / str(i)).write_bytes(seed)
    options = [f"-max_total_time={args.seconds}", f"-max_len={MAX_BYTES}", f"-seed={args.seed}"]
    atheris.Setup([sys.argv[0], *options, str(folder)], target)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("targets", nargs="+", choices=NAMES)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("mutate", "atheris"), default="mutate")
    args = parser.parse_args()
    found = targets(args.engine)
    for name in args.targets:
        make, seeds, words = found[name]
        if args.engine == "atheris":
            by_atheris(make(), seeds, args)
        count = by_mutation(make(), seeds, words, args)
        print(f"{name}: {count} inputs in {args.seconds} s, nothing found")


if __name__ == "__main__":
    main()

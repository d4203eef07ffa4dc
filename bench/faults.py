"""Print the fault matrix: how workers fail, when, and what their clients get.

Every cell is played against a whole gateway over real sockets, once with the failing worker alone
and once with a well one beside it (``attempts`` are those of the latter). After each cell nothing
may be in flight, and no task, socket or busy connection left; the command fails otherwise, or where
a cell is not as designed.

    python -m bench.faults --front raw
"""

from __future__ import annotations

import argparse
import asyncio

from tests.fakes.matrix import PHASES, Cell, Outcome, cells, play


async def run(front: str) -> list[tuple[Cell, Outcome]]:
    return [(cell, await play(cell, "raw" if front == "raw" else "aiohttp")) for cell in cells()]


def shown(cell: Cell, seen: Outcome) -> str:
    """One field of the table."""
    text = seen.alone if seen.alone == seen.beside else f"{seen.alone}; {seen.beside}"
    if seen.attempts > 1:
        text += f", {seen.attempts} attempts"
    return text if is_as_designed(cell, seen) else text + " (NOT as designed)"


def is_as_designed(cell: Cell, seen: Outcome) -> bool:
    return (seen.alone, seen.beside, seen.attempts) == (cell.alone, cell.beside, cell.attempts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--front", choices=("raw", "aiohttp"), default="raw")
    played = asyncio.run(run(parser.parse_args().front))
    print("| fault | stream |", " | ".join(PHASES), "|")
    print("|---|---|" + "---|" * len(PHASES))
    rows = dict.fromkeys((cell.fault, cell.is_stream) for cell, _ in played)
    for fault, is_stream in rows:
        of_row = [
            each for each in played if (each[0].fault, each[0].is_stream) == (fault, is_stream)
        ]
        row = {cell.phase: shown(cell, seen) for cell, seen in of_row}
        texts = [row.get(phase, "-") for phase in PHASES]
        print(f"| {fault} | {'yes' if is_stream else 'no'} |", " | ".join(texts), "|")
    print(f"\n{len(played)} cells (alone; beside a well worker), nothing left in flight or open.")
    if wrong := sum(not is_as_designed(*each) for each in played):
        raise SystemExit(f"{wrong} cells are not as designed")


if __name__ == "__main__":
    main()

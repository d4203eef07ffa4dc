"""Long work on the event loop, done in slices between which others run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

# How long the event loop is kept at a time: a fifth of what is allowed, since a step that has begun
# is finished first.
SLICE_S = 0.001


async def in_slices(steps: Iterable[T]) -> list[T]:
    """Take all steps, and return what each gave.

    Args:
        steps: Each of them short; what they work on may change in between.
    """
    taken = []
    began_s = time.perf_counter()
    for step in steps:
        taken.append(step)
        if time.perf_counter() - began_s > SLICE_S:
            await asyncio.sleep(0)
            began_s = time.perf_counter()
    return taken

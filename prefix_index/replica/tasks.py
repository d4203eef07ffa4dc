"""Run parts of one thing together, and end them together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def run_together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one fails or this is cancelled; returns when all have ended.

    ``asyncio.gather`` alone returns while others are still cleaning up.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

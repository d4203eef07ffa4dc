"""``POST /cache/selftest``: a stress test of the disk tier, for whoever goes live on it.

It takes disk bandwidth from running requests for a few seconds, so one runs at a time and none
soon after another; whoever can reach this port can ask for it, as for ``/reset_prefix_cache``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

from runner.errors import ApiError
from runner.tiers.assemble import READER_THREADS
from runner.tiers.segments.errors import SegmentsError
from runner.tiers.segments.stress import stress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Enough for some hundred blocks of a large model, and written in a second by a slow SSD.
MAX_BYTES = 64 * 2**20
# Readers and writer together; requests that load from the disk wait no longer for it.
MAX_S = 5.0
# From the end of one to the next.
PAUSE_S = 30.0


class SelfTest:
    """The test of one runner; event loop only.

    Args:
        folder: Of the segments.
        capacity_bytes: Most the disk tier may take: a test takes no more.
        block_bytes: Payload of a block.
        block_size: Tokens of a block.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        block_bytes: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._max_bytes = min(MAX_BYTES, capacity_bytes)
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._clock = clock
        self._is_running = False
        self._next_s = float("-inf")

    async def run(self) -> dict[str, Any]:
        """Run it and return what it found; ``ok`` says whether every block was whole.

        Raises:
            ApiError: 429 while one runs or ended a moment ago; 507 if there is no room for it.
        """
        wait_s = self._next_s - self._clock()
        if self._is_running or wait_s > 0:
            retry_after_s = ceil(max(wait_s, 1.0))
            raise ApiError(
                429,
                f"a self-test runs, or ended a moment ago; again in {retry_after_s} s",
                code="selftest_too_soon",
                retry_after_s=retry_after_s,
            )
        self._is_running = True
        try:
            result = await asyncio.to_thread(
                stress,
                self._folder,
                block_bytes=self._block_bytes,
                block_size=self._block_size,
                max_bytes=self._max_bytes,
                max_s=MAX_S,
                num_readers=READER_THREADS["disk"],
                clock=self._clock,
            )
        except SegmentsError as error:
            raise ApiError(507, f"no self-test: {error}", code="selftest_impossible") from error
        finally:
            self._is_running = False
            self._next_s = self._clock() + PAUSE_S
        rates = {
            "write_bytes_per_s": round(result.write_bytes_per_s),
            "read_bytes_per_s": round(result.read_bytes_per_s),
        }
        return {"ok": result.is_ok, **asdict(result), **rates}

"""Where the knowledge of prompts ends that were read in full before, found again by its hash.

Which part of a user's message is a document shows only when the prompt is rendered with marks in
it, which is nothing for the request path. So prompts that share more with earlier ones than their
instructions are looked at afterwards, in one thread and a few a second, and the place where their
knowledge ends is remembered under the blocks before it. The same hash, found in a later prompt,
proves that everything up to there is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gateway.routing.segments import layout_reader, quick_stable_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.routing.plan import Plan
    from prefix_index.blocks import BlockHash
    from prefix_index.segments import Layout, Segment

# Tokens between the places in a prompt that are looked up.
GRAIN_TOKENS = 512
# Known ends, about 300 bytes each: 2 MB.
MAX_ENDS = 8192
# Ends behind one place: documents that differ only in their last 512 tokens.
MAX_SIBLINGS = 4
# Prompts looked at per second over a long time, and at once. One takes 10 to 60 ms of a thread.
LOOKS_PER_S = 2.0
BURST = 32
# Longer prompts are not looked at: the offsets of 100k tokens come in one piece, and the event loop
# would wait 100 ms for it.
MAX_PROMPT_TOKENS = 32_768
# A conversation is looked at this often: its beginning does not change, whatever it says next.
MAX_LOOKS = 2
MAX_LOOKED_AT = 8192
_SHARED = frozenset({"system", "tools", "knowledge"})


class StableEnds:
    """Remembers where knowledge ends; one event loop only.

    Args:
        clock: Monotonic seconds.

    Attributes:
        failed: Prompts that could not be looked at.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed = 0
        self._clock = clock
        self._ends: OrderedDict[BlockHash, list[tuple[int, BlockHash]]] = OrderedDict()
        self._looked_at: OrderedDict[str, int] = OrderedDict()
        self._credit = float(BURST)
        self._credit_s = clock()
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, hashes: Sequence[BlockHash], block_size: int) -> int:
        """Return the tokens up to the furthest known end in a prompt; 0 if there is none.

        At most one look-up per 512 tokens, from the prompt's end on.
        """
        if not self._ends:
            return 0
        stride = max(1, GRAIN_TOKENS // block_size)
        # The last grain end is at a whole number of strides.
        for at in range(len(hashes) // stride * stride - 1, 0, -stride):
            for num_blocks, end in self._ends.get(hashes[at], ()):
                if num_blocks <= len(hashes) and hashes[num_blocks - 1] == end:
                    return num_blocks * block_size
        return 0

    def observe(self, plan: Plan, shared_tokens: int) -> None:
        """Look at a finished request if it shares more with others than is known; never raises.

        Args:
            plan: The request, with its tokens.
            shared_tokens: Its leading tokens that had been computed before.
        """
        prompt = plan.prompt
        if prompt is None or plan.inbound.surface != "chat":
            return
        if prompt.num_tokens > MAX_PROMPT_TOKENS:
            return
        known = max(
            quick_stable_tokens(plan, "knowledge"),
            self.find(prompt.block_hashes, prompt.block_size),
        )
        if shared_tokens < known + GRAIN_TOKENS or not self._may_look(plan.key.ring_key):
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "stable-ends")
        task = asyncio.get_running_loop().create_task(
            self._look(plan, shared_tokens, self._executor)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Return once everything that is looked at has been."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _may_look(self, key: str) -> bool:
        looks = self._looked_at.get(key, 0)
        now_s = self._clock()
        self._credit = min(BURST, self._credit + (now_s - self._credit_s) * LOOKS_PER_S)
        self._credit_s = now_s
        if looks >= MAX_LOOKS or self._credit < 1.0:
            return False
        self._credit -= 1.0
        self._looked_at[key] = looks + 1
        self._looked_at.move_to_end(key)
        if len(self._looked_at) > MAX_LOOKED_AT:
            self._looked_at.popitem(last=False)
        return True

    async def _look(self, plan: Plan, shared_tokens: int, executor: ThreadPoolExecutor) -> None:
        try:
            read: Callable[[], Layout] = layout_reader(plan)
            layout = await asyncio.get_running_loop().run_in_executor(executor, read)
        except Exception:  # templates raise what they like
            self.failed += 1
            return
        prompt = plan.prompt
        if prompt is None:
            return
        end_token = knowledge_end(layout.segments)
        self._learn(prompt.block_hashes, prompt.block_size, end_token)
        # A phrase that many questions have in common may count as knowledge. Then the end above is
        # found again only with that question, and this one with all of them.
        self._learn(prompt.block_hashes, prompt.block_size, min(end_token, shared_tokens))

    def _learn(self, hashes: Sequence[BlockHash], block_size: int, end_token: int) -> None:
        stride = max(1, GRAIN_TOKENS // block_size)
        num_blocks = min(end_token // block_size, len(hashes))
        if num_blocks < stride:
            return
        place = hashes[num_blocks // stride * stride - 1]
        siblings = self._ends.setdefault(place, [])
        found = (num_blocks, hashes[num_blocks - 1])
        if found not in siblings:
            # The furthest first: it is what is looked for.
            self._ends[place] = sorted([*siblings[-MAX_SIBLINGS + 1 :], found], reverse=True)
        self._ends.move_to_end(place)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)


def knowledge_end(segments: Sequence[Segment]) -> int:
    """Return the end of the system, tools and knowledge segments that lead a prompt."""
    end = 0
    for segment in segments:
        if segment.kind not in _SHARED:
            break
        end = segment.end_token
    return end

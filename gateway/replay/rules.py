"""The rules of ``PeerRouter``: the pure policies, on what a gateway sees of one request.

Each returns the tied best workers as positions in the view's lists.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gateway.replay import policies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.replay.peers import View
    from gateway.replay.traces import Request

# Share of the prompts that the commonest block at a depth may have for that depth to tell users
# apart; what comes before is a system prompt.
MAX_COMMON_SHARE = 0.05


def any_worker(view: View) -> list[int]:
    """Random."""
    return [view.rng.randrange(len(view.workers))]


class RoundRobin:
    """One worker after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(self, view: View) -> list[int]:
        """Take the next."""
        self._turn += 1
        return [self._turn % len(view.workers)]


def least_requests(view: View) -> list[int]:
    """Fewest requests in flight."""
    return policies.least(view.in_flight)


def least_queued_tokens(view: View) -> list[int]:
    """Fewest uncached tokens without a first token."""
    return policies.least(view.queued_tokens)


def power_of_two(view: View) -> list[int]:
    """The one of two random workers with fewer requests."""
    n = view.in_flight
    pair = [view.rng.randrange(len(n)), view.rng.randrange(len(n))]
    return [min(pair, key=n.__getitem__)]


class Ringed:
    """A hash ring that follows the workers that take requests."""

    def __init__(self) -> None:
        self._ring = policies.HashRing(())
        self._workers: list[int] = []

    def order(self, view: View, key: int) -> list[int]:
        """Return positions in the key's order."""
        if self._workers != view.workers:
            self._workers = list(view.workers)
            self._ring = policies.HashRing(self._workers)
        at = {worker: i for i, worker in enumerate(view.workers)}
        return [at[worker] for worker in self._ring.order(key)[1]]


class SessionHash(Ringed):
    """A session always goes to one worker."""

    def __call__(self, view: View) -> list[int]:
        """Take the session's worker."""
        return [self.order(view, view.request.session)[0]]


class BoundedLoad(Ringed):
    """Consistent hashing of the first block after the system prompt, with bounded load.

    Args:
        key_block: Which block that is.
        load_factor: Multiple of the mean load that is allowed.
        plus_one: 1 counts as KubeAI does.
    """

    def __init__(self, key_block: int, load_factor: float = 1.25, plus_one: int = 0) -> None:
        super().__init__()
        self._key_block = key_block
        self._load_factor = load_factor
        self._plus_one = plus_one

    def __call__(self, view: View) -> list[int]:
        """Take the first worker within the bound."""
        blocks = view.request.blocks
        key = view.request.session
        if blocks:
            key = int.from_bytes(blocks[min(self._key_block, len(blocks) - 1)][-8:], "big")
        ring = self.order(view, key)
        chosen = policies.bounded_load(
            ring, view.in_flight, load_factor=self._load_factor, plus_one=self._plus_one
        )
        return [chosen]


def common_depth(requests: Sequence[Request]) -> int:
    """Return how many leading blocks many prompts have in common: the system prompt."""
    depth = 0
    while True:
        counts = Counter(r.blocks[depth] for r in requests if len(r.blocks) > depth)
        if max(counts.values(), default=0) < MAX_COMMON_SHARE * len(requests):
            return depth
        depth += 1


def sglang(view: View, *, thresholds: policies.SglangThresholds) -> list[int]:
    """SGLang cache_aware."""
    return policies.sglang(view.hits, view.in_flight, view.request.prompt_tokens, thresholds)[1]


def aibrix(view: View, *, imbalance_abs: int = 8, sd_factor: float = 1.0) -> list[int]:
    """AIBrix prefix-cache."""
    return policies.aibrix(
        view.hits, view.in_flight, imbalance_abs=imbalance_abs, sd_factor=sd_factor
    )[1]


def dynamo(view: View, *, weights: policies.DynamoWeights) -> list[int]:
    """Dynamo's KV cost."""
    request = view.request
    whole = len(request.blocks) * view.fleet.model.block_tokens
    costs = []
    for i, hit in enumerate(view.matched):
        new = whole - view.books[i].common_tokens(request.blocks)
        load = view.queued_tokens[i], view.active_tokens[i], new
        hits = hit.gpu, hit.cpu, hit.disk
        costs.append(policies.dynamo(request.prompt_tokens, *hits, *load, weights)[2])
    return policies.least(costs)


def llmd(view: View, *, weights: policies.LlmdWeights) -> list[int]:
    """llm-d precise prefix."""
    waiting, usage = zip(*map(view.fleet.scraped, view.workers), strict=True)
    scores = policies.llmd(view.hits, waiting, usage, view.request.prompt_tokens, weights)
    return policies.greatest([total for _, _, total in scores])


def lmetric(view: View, *, queue_weight: int = 0) -> list[int]:
    """LMetric: uncached tokens times requests."""
    tokens = view.request.prompt_tokens
    columns = zip(view.hits, view.in_flight, view.queued_tokens, strict=True)
    return policies.least(
        [policies.lmetric(tokens, *column, queue_weight=queue_weight) for column in columns]
    )


def mooncake(view: View) -> list[int]:
    """Mooncake's minimum TTFT, without transfers."""
    tokens, cost = view.request.prompt_tokens, view.fleet.model.cost
    columns = zip(view.hits, view.matched, view.queued_s, strict=True)
    return policies.least(
        [policies.mooncake(tokens, d, hit.cpu, hit.disk, q, cost) for d, hit, q in columns]
    )

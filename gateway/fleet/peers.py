"""Which bundled runners hand KV to each other, and how quickly they were seen to do it.

A runner tells it at ``GET /cache``: whether it serves its blocks, which peers it may be sent to,
and what it has pulled from each of them in which time. Its own clock is the best there is for a
link: a TTFT has the queue and the prefill in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from gateway.errors import UpstreamError
from gateway.routing.learner import MIN_RESTORED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.pool import Pool, Worker
    from gateway.upstream.client import Upstream

# A runner answers from figures that it has at hand.
DEADLINE_S = 5.0
# More peers than a fleet has workers are not read.
MAX_PEERS = 1024


class Pulled(msgspec.Struct, frozen=True):
    """What a runner has pulled from one peer since it started, and the time that all pulls took."""

    tokens: int = 0
    seconds: float = 0.0


class Peers(msgspec.Struct, frozen=True):
    """What a runner says about its peers.

    Attributes:
        serves: Whether it hands out its own blocks.
        pulls: By the URL of each peer that it may be sent to.
    """

    serves: bool = False
    pulls: dict[str, Pulled] = {}


class _Cache(msgspec.Struct, frozen=True):
    peers: Peers = Peers()


_DECODER = msgspec.json.Decoder(_Cache)


class PeerWatch:
    """Keeps asking one bundled runner about its peers; used from the event loop only.

    Args:
        pool: Its pool.
        workers: Its workers; get what it may pull, from whom, and the rates. May change.
        upstream: Its connections.
    """

    def __init__(self, pool: Pool, workers: Sequence[Worker], upstream: Upstream) -> None:
        self._pool = pool
        self._workers = workers
        self._upstream = upstream
        self._learned: dict[str, Pulled] = {}

    async def check(self) -> None:
        """Ask, and write down the answer; without one everything stays as it was."""
        peers = await fetch_peers(self._upstream)
        if peers is not None:
            self.take(peers)

    def take(self, peers: Peers) -> None:
        """Write down what the runner says, and learn from what it pulled since the last time."""
        listed = {base_url(url): pulled for url, pulled in list(peers.pulls.items())[:MAX_PEERS]}
        others = [w for w in self._pool.workers.values() if w not in self._workers]
        reached = {other: found for other in others if (found := listed.get(base_url(other.url)))}
        for worker in self._workers:
            worker.pull_style = "runner"
            worker.pull_peers = frozenset(other.url for other in reached)
            worker.can_pull = bool(reached)
            worker.serves_peers = peers.serves
        for other, pulled in reached.items():
            self._learn(other.id, pulled)

    def _learn(self, source: str, pulled: Pulled) -> None:
        known = self._learned.get(source, Pulled())
        if pulled.tokens < known.tokens or pulled.seconds < known.seconds:
            known = Pulled()  # another process, that counts from 0
        tokens = pulled.tokens - known.tokens
        if tokens < MIN_RESTORED_TOKENS:
            # Too little to tell a rate, and the time of pulls that failed waits with it.
            self._learned[source] = known
            return
        self._learned[source] = pulled
        for worker in self._workers:
            worker.learner.observe_pull(
                source, tokens=tokens, seconds=pulled.seconds - known.seconds
            )


async def fetch_peers(upstream: Upstream) -> Peers | None:
    """Ask a runner; None if it does not tell now. One that names no peers has none."""
    try:
        response = await upstream.request(
            "GET", "/cache", [], first_byte_s=DEADLINE_S, total_s=DEADLINE_S
        )
        try:
            body = await response.read()
        finally:
            response.close()
        return _DECODER.decode(body).peers if response.status == 200 else None
    except (UpstreamError, msgspec.MsgspecError):
        return None


def base_url(url: str) -> str:
    """Return a URL in the form in which the runners' own are compared: scheme, host, port."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname or ''}:{port}"

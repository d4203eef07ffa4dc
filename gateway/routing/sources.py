"""Where a worker can fetch KV from, and how it is told: peers and the shared store.

``find_sources`` reads who could hand over a prompt's leading tokens, ``gateway/routing/pull.py``
prices it, and ``pull_request`` says what a choice means for the body and the headers that are sent.
Nothing here costs anything where no worker of the pool can pull.

Source: ``kv_transfer_params.source`` is the bundled runner's, ``max_load_tokens`` vLLM's (0 = load
nothing), ``x-kv-cache-source-host-port`` the header of llm-d's router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.routing.cost import STORE, Source
from gateway.routing.pull import MIN_PULL_TOKENS, source_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.routing.choose import Decision
    from gateway.routing.pool import Pool, Worker
    from prefix_index.index import Hit

SOURCE_HEADER = "x-kv-cache-source-host-port"
# More holders of one prefix than this do not make a pull any cheaper.
MAX_SOURCES = 4


def can_pull(pool: Pool, worker: Worker) -> bool:
    """Whether a worker may be sent elsewhere for KV; one that is apart speaks another format."""
    if worker.is_apart or pool.peer_pull == "off":
        return False
    return worker.can_pull or pool.peer_pull == "llm-d"


def find_sources(pool: Pool, hits: Mapping[str, Hit]) -> tuple[list[Source], str]:
    """Return who could hand over the most of a prompt, and the fingerprint they share.

    Of several with equally many tokens those with the shortest queue on their link come first. A
    draining worker may still give; one that is not ready or ejected may not.

    Args:
        pool: The workers.
        hits: What the index says of the prompt, by worker; the shared store is ``STORE``.
    """
    found = []
    for worker_id, hit in hits.items():
        # Pulls are served from memory: device and CPU tier.
        tokens = hit.gpu + hit.cpu
        if tokens < MIN_PULL_TOKENS:
            continue
        worker = pool.workers.get(worker_id)
        if worker is not None and _may_give(pool, worker):
            found.append((-tokens, worker.books.out_busy_until_s, worker_id))
    found.sort()
    fingerprint = ""
    sources: list[Source] = []
    for negated, busy_until_s, worker_id in found:
        theirs = pool.workers[worker_id].fingerprint
        if not sources:
            fingerprint = theirs
        if theirs == fingerprint:
            sources.append(Source(worker_id, -negated, busy_until_s))
            if len(sources) == MAX_SOURCES:
                break
    stored = hits.get(STORE)
    if stored is not None and stored.total >= MIN_PULL_TOKENS:
        sources.append(Source(STORE, stored.total))
    return sources, fingerprint


def _may_give(pool: Pool, worker: Worker) -> bool:
    """Whether a worker's hits can be fetched from it at all."""
    if worker.is_apart or not worker.health.ready or not pool.is_readable(worker):
        return False
    return worker.serves_peers or pool.peer_pull == "llm-d"


def reaches(worker: Worker, pool: Pool, source: Source) -> bool:
    """Whether a worker may be sent to a source: a bundled runner refuses all but its peers."""
    if worker.pull_style != "runner" or source.worker == STORE or source.worker == worker.id:
        return True
    peer = pool.workers.get(source.worker)
    return peer is not None and peer.url in worker.pull_peers


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What a choice adds to the request that is sent to the chosen worker.

    Attributes:
        source: ``kv_transfer_params.source``; None = leave it out.
        max_load_tokens: ``kv_transfer_params.max_load_tokens``; None = no cap of ours.
        header: Value of ``SOURCE_HEADER``; empty = leave it out.
    """

    source: dict[str, Any] | None = None
    max_load_tokens: int | None = None
    header: str = ""

    def params(self, clients: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return ``kv_transfer_params`` as sent: the client's, with ours where it says nothing.

        Args:
            clients: The client's own object; anything but an object is left to the worker to
                refuse.

        Returns:
            None when the body stays as it is: nothing to add, or the client named a source.
        """
        before = dict(clients or {})
        params = dict(before)
        theirs = before.get("max_load_tokens")
        is_capped = isinstance(theirs, int) and not isinstance(theirs, bool)
        if self.source is not None and "source" not in before:
            tokens = self.source["tokens"]
            tokens = min(theirs, tokens) if is_capped else tokens
            if tokens > 0:
                params["source"] = {**self.source, "tokens": tokens}
        if self.max_load_tokens is not None:
            if theirs is None:
                params["max_load_tokens"] = self.max_load_tokens
            elif is_capped:
                params["max_load_tokens"] = min(theirs, self.max_load_tokens)
        return params if params != before else None


def pull_request(decision: Decision, pool: Pool) -> PullRequest | None:
    """Say what a decision means for the request; None when it is sent as it is.

    Args:
        decision: What was chosen.
        pool: Its pool, for the workers' addresses and ways.
    """
    chosen = decision.chosen
    if chosen is None or not decision.input.candidates[decision.position].can_pull:
        return None
    worker = pool.workers.get(chosen.worker)
    if worker is None:
        return None
    if chosen.source == "recompute" and decision.input.candidates[decision.position].hit_tokens:
        # It holds lower-tier blocks, and computing them again is cheaper than loading them.
        return PullRequest(max_load_tokens=0)
    if not chosen.pull_tokens:
        return None
    if chosen.source == "store":
        return None  # engines find the store's blocks by themselves
    peer = pool.workers.get(source_id(chosen.source))
    if peer is None or not reaches(worker, pool, Source(peer.id, chosen.hit_tokens)):
        return None
    style = worker.pull_style or ("llm-d" if pool.peer_pull == "llm-d" else "runner")
    if style == "runner":
        return PullRequest(source={"url": peer.url, "tokens": chosen.hit_tokens})
    return PullRequest(
        max_load_tokens=chosen.hit_tokens, header=urlsplit(peer.url).netloc.rpartition("@")[2]
    )

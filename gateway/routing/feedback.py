"""What an answer says about the worker's cache and its links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.learner import MAX_RATE_SURPRISE
from gateway.routing.pull import source_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.cost import Candidate, Estimate
    from gateway.routing.learner import Learner
    from gateway.routing.pool import Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index

# The bits of ``Index.copies`` that count the copies on the device.
GPU_COPIES = 0xFFFF


def correct_index(
    index: Index,
    worker: Worker,
    hashes: Sequence[BlockHash],
    *,
    cached_tokens: int,
    believed_tokens: int,
    since_s: float,
) -> None:
    """Believe a worker that held less of a prompt than the index said.

    By now it has computed the prompt and holds it. One that announces what it stores has said so:
    what is wrong is that the blocks believed before and those announced since count as two copies,
    and one removal would leave the other. Of one that was silent the chain is shortened; the next
    request there heals it.

    Args:
        index: Corrected in place.
        worker: Who answered.
        hashes: The prompt's blocks that can be hits.
        cached_tokens: What it reported.
        believed_tokens: What the index said when the request was sent.
        since_s: When that was.
    """
    num_blocks = cached_tokens // index.block_size
    heard_s = worker.last_event_s
    if worker.mode != "exact" or heard_s is None or heard_s < since_s:
        index.shorten(worker.id, hashes, num_blocks)
        return
    # One observation never takes the first block: it may have reasons of its own.
    for block in hashes[max(num_blocks, 1) : believed_tokens // index.block_size]:
        if index.copies(worker.id, block) & GPU_COPIES > 1:
            index.remove(worker.id, [block])


def learn_transfer(
    learner: Learner, estimate: Estimate, seen: Candidate, sent_s: float, ttft_s: float
) -> None:
    """Learn from a TTFT that was partly a restore or a pull.

    Args:
        learner: The worker's.
        estimate: What was expected of it.
        seen: The worker as it was when the request was sent.
        sent_s: When that was.
        ttft_s: Observed TTFT.
    """
    rest_s = estimate.prefill_s + estimate.interleave_s
    if not estimate.pull_tokens:
        learner.observe_restore(
            ttft_s,
            rest_s=rest_s + max(0.0, seen.restore_until_s - sent_s),
            cpu=seen.hit_cpu,
            disk=seen.hit_disk,
            remote=seen.hit_remote,
        )
    elif not estimate.restore_link_s:  # else nobody can tell which of the two took how long
        # What the pull was waited for beyond its own time: latency and busy links.
        waited_s = max(0.0, estimate.restore_s - estimate.pull_link_s)
        learner.observe_pull_ttft(
            ttft_s,
            source_id(estimate.source),
            rest_s=rest_s + waited_s,
            tokens=estimate.pull_tokens,
            predicted_s=estimate.pull_link_s,
        )


def learn_failed_pull(learner: Learner, estimate: Estimate) -> None:
    """Count a pull that brought nothing as a slow one, so that its source is asked less."""
    learner.observe_pull(
        source_id(estimate.source),
        tokens=estimate.pull_tokens,
        seconds=MAX_RATE_SURPRISE * estimate.pull_link_s,
    )

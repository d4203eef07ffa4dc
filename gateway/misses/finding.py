"""One prompt against its near-duplicates: which one it is, how much is lost, where and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.misses.compare import first_difference, known_tokens, shared_blocks
from gateway.misses.known import Known
from gateway.misses.locate import Place, locate
from gateway.routing.dispatch import Plan
from gateway.routing.segments import hints_of
from prefix_index.segments import read_layout

# Of two prompts that share less than this, neither is a near-duplicate of the other.
MIN_SHARED_RATIO = 0.5


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished request, as far as the report reads it.

    Attributes:
        known: Its prompt.
        plan: What was known when it was routed.
        hit_tokens: As the worker reported them, else as predicted.
        others_hit_tokens: The most that another worker held.
        worker: Where it went.
        decided_s: When that was decided (monotonic).
    """

    known: Known
    plan: Plan
    hit_tokens: int
    others_hit_tokens: int
    worker: str
    decided_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """What a comparison found.

    Attributes:
        tokens: Prompt tokens lost.
        place: Where and why.
        token: First token that differs.
    """

    tokens: int
    place: Place
    token: int


def nearest(finished: Finished, twins: list[Known]) -> tuple[Known | None, int, int]:
    """Return the twin that shares most, the tokens lost, and leading blocks shared; for a thread.

    None if none of them is a near-duplicate.
    """
    known = finished.known
    best: tuple[int, Known | None, int, int] = (0, None, 0, 0)
    tokens = known.prompt.token_ids
    for twin in twins:
        shared = shared_blocks(
            known.prompt.block_hashes, twin.prompt.block_hashes, known.num_blocks
        )
        start = shared * known.prompt.block_size
        behind = max(start, finished.hit_tokens)
        rest = tokens[start : known.usable_tokens]
        again = known_tokens(rest, twin.prompt.token_ids[start:])
        # What was hit thanks to a third prompt is not lost.
        lost = min(again, known.usable_tokens - behind)
        total = start + again
        if total > best[0]:
            best = (total, twin, lost, shared)
    total, found, lost, shared = best
    is_near = total >= MIN_SHARED_RATIO * known.usable_tokens
    return (found, lost, shared) if is_near else (None, 0, 0)


def find(finished: Finished, twin: Known, lost: int, shared: int) -> Finding:
    """Return where and why a prompt parts from its twin; for a thread.

    Args:
        finished: The request.
        twin: The near-duplicate.
        lost: Tokens lost behind that place.
        shared: Leading blocks they have in common.
    """
    known, prompt = finished.known, finished.known.prompt
    token = first_difference(prompt.token_ids, twin.prompt.token_ids, shared * prompt.block_size)
    place = locate(known, twin, token)
    if place.char is not None and _is_knowledge(finished, token):
        place = replace(place, segment="knowledge")
    return Finding(lost, place, token)


def _is_knowledge(finished: Finished, token: int) -> bool:
    """Whether a token belongs to documents that the request's hints point out.

    Without hints it takes a memory that belongs to the event loop to tell.
    """
    known, hints = finished.known, hints_of(finished.plan.inbound)
    if known.reader is None or not (hints.chunks or hints.has_documents):
        return False
    layout = read_layout(known.reader, known.body, hints, known.prompt)
    return any(
        segment.start_token <= token < segment.end_token and segment.kind == "knowledge"
        for segment in layout.segments
    )

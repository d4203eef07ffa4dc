"""The explain object: one decision with everything it was made from, as the contract writes it.

Live decisions and ``POST /admin/v1/explain`` are described by this one function, and the choice can
be taken again from its JSON: ``decide_again(explain) == explain["decision"]``.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.routing.advice import advice_of
from gateway.routing.choose import Decision, RouteInput, choose, compared_positions
from gateway.routing.segments import layout_of, observe
from prefix_index.segments import Found, stable_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.routing.cost import Candidate, Estimate
    from gateway.routing.dispatch import Plan
    from prefix_index.segments import Layout, Segment
    from prefix_index.volatile import Volatile


def explain_json(
    plan: Plan,
    decision: Decision,
    layout: Layout | None = None,
    canonicalization: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Describe a plan and its decision as plain JSON values.

    Not for the hot path: finding the segments renders the prompt up to five times and tokenizes it
    once. Mutates nothing but the pool's memory of recurring text.

    Args:
        plan: The request as read.
        decision: What ``Dispatcher.choose`` answered for it.
        layout: What ``layout_of(plan)`` found; found here if not given.
        canonicalization: What each rule did, or would do.
    """
    if layout is None:
        layout = layout_of(plan)
    observe(plan)
    prompt = plan.prompt
    compared = frozenset(compared_positions(decision.input))
    return {
        "request_id": plan.inbound.request_id,
        "model": plan.inbound.model,
        "pool": plan.pool.name,
        "tokens": plan.tokens,
        "prompt_tokens": plan.num_tokens,
        "stable_tokens": stable_tokens(layout.segments, plan.pool.block_size),
        "block_size": plan.pool.block_size,
        "block_hashes": [] if prompt is None else [block.hex() for block in prompt.block_hashes],
        "segments": [_segment(segment) for segment in layout.segments],
        "advice": advice_of(
            layout,
            pool=plan.pool.name,
            num_tokens=plan.num_tokens,
            block_size=plan.pool.block_size,
        ),
        "canonicalization": [dict(entry) for entry in canonicalization],
        "affinity": {
            "key": str(plan.key),
            "source": plan.key.source,
            "home": plan.home,
        },
        "candidates": [
            _candidate(
                c,
                e,
                seconds=decision.unit == "seconds" and c.model is not None,
                is_compared=position in compared,
            )
            | {"constants": _constants(plan, c)}
            for position, (c, e) in enumerate(
                zip(decision.input.candidates, decision.candidates, strict=True)
            )
        ],
        "decision": _decision(decision),
        "state": {
            "index_age_s": index_age_s(plan, decision),
            "load_age_s": _load_age_s(plan, decision),
        },
        "unread": plan.unread,
        "input": msgspec.to_builtins(decision.input),
        "rotation": decision.rotation,
    }


def decide_again(explain: Mapping[str, Any]) -> dict[str, Any]:
    """Take the decision of an explain object again, from its JSON alone.

    Raises:
        msgspec.ValidationError: If ``input`` is not what ``explain_json`` wrote.
    """
    request = msgspec.convert(explain["input"], RouteInput)
    return _decision(choose(request, rotation=int(explain["rotation"])))


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "worker": decision.worker,
        "reason": str(decision.reason),
        "source": decision.source,
        "mode": decision.mode,
        "pull_tokens": decision.pull_tokens,
        "hit_tokens": decision.hit_tokens,
        "ttft_s": decision.ttft_s,
        "unit": decision.unit,
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "start_token": segment.start_token,
        "end_token": segment.end_token,
        "volatile": [_volatile(span) for span in segment.volatile],
    }


def _volatile(span: Volatile) -> dict[str, Any]:
    out: dict[str, Any] = {
        "kind": span.kind,
        "start_char": span.start_char,
        "end_char": span.end_char,
        "text_hint": span.text_hint,
    }
    if isinstance(span, Found):
        out |= {"source": span.source, "message": span.message, "start_token": span.start_token}
    return out


def _candidate(c: Candidate, e: Estimate, *, seconds: bool, is_compared: bool) -> dict[str, Any]:
    terms = {
        "W": e.queue_s,
        "P": e.prefill_s,
        "I": e.interleave_s,
        "R": e.restore_s,
        "G": e.interference_s,
        "M": e.memory_s,
        "E": e.eviction_s,
    }
    return {
        "worker": c.worker,
        "eligible": c.eligible,
        "compared": is_compared,
        "reason": c.why,
        "hit_tokens": {
            "gpu": c.hit_gpu,
            "cpu": c.hit_cpu,
            "disk": c.hit_disk,
            "remote": c.hit_remote,
        },
        "pending_tokens": c.pending_tokens,
        "queue_s": e.queue_s if seconds else None,
        "restore_s": e.restore_s if seconds else None,
        "prefill_s": e.prefill_s if seconds else None,
        "cost_s": e.cost if seconds else None,
        "source": e.source,
        "pull_tokens": e.pull_tokens,
        "mode": c.mode,
        "terms": terms if seconds else {"token_requests": e.cost},
    }


def _constants(plan: Plan, c: Candidate) -> dict[str, Any] | None:
    """Return a worker's cost constants, and what share of them was seen of itself.

    The rest is its pool's (``gateway/routing/prior.py``).
    """
    if c.model is None:
        return None
    worker = plan.pool.workers.get(c.worker)
    learner = None if worker is None else worker.learner
    used: dict[str, Any] = msgspec.to_builtins(c.model)
    return used | {
        "own_prefill_share": 0.0 if learner is None else learner.trust,
        "own_decode_share": 0.0 if learner is None else learner.decode_trust,
    }


def index_age_s(plan: Plan, decision: Decision) -> float | None:
    """Age of the newest event of the event-fed workers; None when there are none."""
    events = [
        worker.last_event_s
        for worker in plan.pool.workers.values()
        if worker.mode == "exact" and worker.last_event_s is not None
    ]
    return max(0.0, decision.input.now_s - max(events)) if events else None


def _load_age_s(plan: Plan, decision: Decision) -> float | None:
    """Age of the view of other gateways' load; None while they cannot be heard."""
    others = plan.pool.others
    age_s = 0.0 if others is None else others.age_s(decision.input.now_s)
    return age_s if isfinite(age_s) else None

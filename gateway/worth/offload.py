"""The offload cap of one request: how many leading tokens of its KV a worker may write to a tier.

The lowest of what tenant, route, pool and client say and of the stable tokens of this very prompt;
0 where a lower tier is not worth it. It travels in the body's ``kv_transfer_params``.

Source: vLLM 0.22 and later (``max_offload_tokens`` of its offloading connectors), LMCache
(``lmcache.max_offload_tokens``, which it takes from the same object); the bundled runner has
vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.routing.segments import estimated_stable_tokens, quick_stable_tokens
from gateway.worth.rule import Verdict
from prefix_index.canonical.spans import Edit, locate, members, replace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.config import OffloadConfig
    from gateway.routing.plan import Plan
    from gateway.routing.segments import Scope
    from gateway.worth.stable_ends import StableEnds

FIELD = "kv_transfer_params"
CAP = "max_offload_tokens"
# Engine kind -> members that carry the cap. vLLM's connectors read one each and pass over the
# other's, so nobody has to configure which one is in use; generic servers get none.
MEMBERS: dict[str, tuple[str, ...]] = {
    "vllm": (CAP, f"lmcache.{CAP}"),
    "runner": (CAP,),
}


def offload_put(
    plan: Plan,
    route_cap: int | None,
    pool: OffloadConfig,
    verdict: Verdict,
    body: bytes,
    *,
    scope: Scope | None = None,
    ends: StableEnds | None = None,
    also: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Return the top-level members to splice into a body, by name; empty to leave it as it is.

    Pure. Nothing is sent unless the pool, the route or the tenant has a cap.

    Args:
        plan: The request as read; ``plan.inbound.body`` is the parsed ``body``.
        route_cap: The lower cap of its route and its tenant; None for none.
        pool: What the pool allows.
        verdict: Whether a lower tier is worth it for this request.
        body: The bytes that are forwarded.
        scope: Which stable boundary counts, where its route says so; None = the pool's.
        ends: Where knowledge is known to end.
        also: Other members for ``kv_transfer_params``, encoded, such as the source of a pull; they
            replace the client's.
    """
    put = dict(also or {})
    given = plan.inbound.body.get(FIELD)
    if given is not None and not isinstance(given, dict):
        return {}  # the engine's own 400
    names = MEMBERS.get(plan.pool.engine, ())
    configured = [cap for cap in (route_cap, pool.max_offload_tokens) if cap is not None]
    if names and configured:
        stable = 0 if verdict is Verdict.NO else stable_limit(plan, scope or pool.scope, ends)
        limit = min(*configured, stable)
        put |= _capped(given or {}, names, limit, is_strict=plan.pool.engine == "runner")
    if not put:
        return {}
    if not given:
        return {FIELD: _encoded(put)}
    return {FIELD: _with_members(body, put)}


def stable_limit(plan: Plan, scope: Scope, ends: StableEnds | None = None) -> int:
    """Return the stable tokens of a prompt up to a boundary; a lower bound.

    About 5 us for known prompts. Where the tokens are still on their way it is an estimate.
    """
    prompt = plan.prompt
    if prompt is None:
        return estimated_stable_tokens(plan, scope)
    quick = quick_stable_tokens(plan, scope)
    if ends is None:
        return quick
    return max(quick, ends.find(prompt.block_hashes, prompt.block_size))


def _capped(
    given: Mapping[str, Any], names: tuple[str, ...], limit: int, *, is_strict: bool
) -> dict[str, bytes]:
    """Return the members that must be set so that nothing above the limit is written.

    A client's lower value stays. What is no cap: the bundled runner refuses it, which is the
    client's to see; vLLM and LMCache take it for no cap at all, so the limit stands in for it.
    """
    put = {}
    for name in names:
        theirs = given.get(name)
        if isinstance(theirs, int) and not isinstance(theirs, bool) and theirs >= 0:
            is_lower = theirs <= limit
        else:
            is_lower = is_strict and name in given
        if not is_lower:
            put[name] = b"%d" % limit
    return put


def _encoded(put: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(orjson.dumps(name) + b":" + value for name, value in put.items()) + b"}"


def _with_members(body: bytes, put: Mapping[str, bytes]) -> bytes:
    """Return the client's object with some members set; all its other bytes stay."""
    span = locate(body, [FIELD])
    value = body[span.start : span.end]
    found = members(value)
    edits = [Edit(m.value_start, m.end, put[m.name]) for m in found if m.name in put]
    missing = {name: new for name, new in put.items() if name not in {m.name for m in found}}
    if missing:
        end = value.rindex(b"}")
        edits.append(Edit(end, end, b"," + _encoded(missing)[1:-1]))
    return replace(value, edits)

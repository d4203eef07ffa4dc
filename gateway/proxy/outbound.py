"""What the gateway says to a worker with a client's request: one splice, and a few header lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.proxy.splice import splice

if TYPE_CHECKING:
    from gateway.routing.dispatch import Plan, Ticket


def outbound(plan: Plan, ticket: Ticket, headers: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return the header lines and the body as a worker gets them.

    Everything the gateway says or takes away goes into the body in this one splice: the engine's
    model name, no gateway-only member. What depends on the worker is said anew for each attempt.
    """
    pool, inbound = plan.pool, plan.inbound
    put: dict[str, bytes] = {}
    drop: tuple[str, ...] = ()
    model = pool.aliases.get(inbound.model)
    if model is not None:
        put["model"] = orjson.dumps(model)
    if "warmlane" in inbound.body:
        drop = ("warmlane",)
    if put or drop:
        body = splice(body, put=put, drop=drop)
    rank = ticket.worker.rank
    if rank is not None:
        headers += b"x-data-parallel-rank: %d\r\n" % rank
    return headers, body

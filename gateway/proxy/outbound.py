"""What the gateway says to a worker with a client's request: one splice, and a few header lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import orjson

from gateway.proxy.hearing import PLAIN, WITHOUT_USAGE, Hearing
from gateway.proxy.splice import insert, splice
from gateway.routing.sources import SOURCE_HEADER, pull_request
from gateway.tenancy.salts import SALT_FIELD, SALT_FIELDS
from prefix_index.canonical.spans import locate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gateway.routing.dispatch import Plan, Ticket

# The object of a body that speaks of KV, as vLLM and the bundled runner have it.
PARAMS = "kv_transfer_params"
CAP = "max_offload_tokens"
STREAM_OPTIONS = "stream_options"
_INCLUDE_USAGE = {"include_usage": b"true"}
_ONLY_USAGE = b'{"include_usage":true}'


class OffloadPut(Protocol):
    """Says how much of a prompt's KV a worker may write to a lower tier."""

    def __call__(
        self, plan: Plan, body: bytes, *, also: Mapping[str, bytes] | None = None
    ) -> dict[str, bytes]:
        """Return members to put into ``body``; ``also`` are others for the same object."""


class Outbound:
    """A request as one worker gets it.

    Args:
        headers: Header lines, each with its end.
        body: The body.
        offload_tokens: Cap on offloaded tokens that the body carries; None = the gateway set none.
        path: Where it goes; empty = the client's path.
        hearing: How the answer is to be read.
    """

    __slots__ = ("body", "headers", "hearing", "offload_tokens", "path")

    def __init__(
        self,
        headers: bytes,
        body: bytes,
        offload_tokens: int | None = None,
        path: str = "",
        hearing: Hearing = PLAIN,
    ) -> None:
        self.headers = headers
        self.body = body
        self.offload_tokens = offload_tokens
        self.path = path
        self.hearing = hearing


def outbound(
    plan: Plan,
    ticket: Ticket,
    headers: bytes,
    body: bytes,
    offload_put: OffloadPut | None = None,
) -> Outbound:
    """Return a request as the chosen worker gets it.

    Everything the gateway says or takes away goes into the body in this one splice: the engine's
    model name, the tenant's cache salt, where to fetch KV, how much to offload, that a stream tells
    its usage, no gateway-only member. What depends on the worker is said anew for each attempt.

    Args:
        plan: The request; ``plan.inbound.body`` is the parsed ``body``.
        ticket: Of this attempt.
        headers: Header lines that came from the client.
        body: The body in the form in which it was planned.
        offload_put: Caps what is offloaded; None = nothing is capped.
    """
    pool, given = plan.pool, plan.inbound.body
    put: dict[str, bytes] = {}
    offload_tokens = None
    model = pool.aliases.get(plan.inbound.model)
    if model is not None:
        put["model"] = orjson.dumps(model)
    pull = pull_request(ticket.decision, pool)
    clients = given.get(PARAMS)
    params = None
    # What is no object is the worker's to refuse.
    if pull is not None and (clients is None or isinstance(clients, dict)):
        params = pull.params(clients)
        if pull.header:
            headers += f"{SOURCE_HEADER}: {pull.header}\r\n".encode()
    if offload_put is not None:
        put |= (said := offload_put(plan, body, also=_added(params, clients)))
        offload_tokens = _cap(said)
    elif params is not None:
        put[PARAMS] = orjson.dumps(params)
    drop = ["warmlane"] if "warmlane" in given else []
    if (salt := plan.inbound.salt) is not None:
        drop += [name for name in SALT_FIELDS if name in given]
        if salt:
            put[SALT_FIELD] = orjson.dumps(salt)
            drop = [name for name in drop if name != SALT_FIELD]
    hearing = PLAIN
    if given.get("stream") is True and (options := _with_usage(given, body)) is not None:
        put[STREAM_OPTIONS] = options
        hearing = WITHOUT_USAGE
    body = put_in(body, given, put, drop)
    return Outbound(with_rank(headers, ticket), body, offload_tokens, "", hearing)


def put_in(
    body: bytes, given: Mapping[str, Any], put: Mapping[str, bytes], drop: Collection[str]
) -> bytes:
    """Return ``body`` with members put in or taken out; ``given`` is what a parser reads of it."""
    if not drop and given.keys().isdisjoint(put):
        return insert(body, put) if put else body
    return splice(body, put=put, drop=drop)


def with_rank(headers: bytes, ticket: Ticket) -> bytes:
    """Return ``headers`` with the data-parallel rank that the worker stands for, if it is one."""
    rank = ticket.worker.rank
    return headers if rank is None else headers + b"x-data-parallel-rank: %d\r\n" % rank


def _with_usage(given: Mapping[str, Any], body: bytes) -> bytes | None:
    """Return ``stream_options`` that ask for the usage; None to leave them as they are.

    The client has asked for it, or says what is the engine's to judge.
    """
    options = given.get(STREAM_OPTIONS)
    if options is None:
        return _ONLY_USAGE
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    if options.get("continuous_usage_stats"):
        return None  # nothing comes of them without ``include_usage``, but with it they would
    span = locate(body, [STREAM_OPTIONS])
    return splice(body[span.start : span.end], put=_INCLUDE_USAGE)


def _added(params: Mapping[str, Any] | None, clients: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the members that are not the client's own, encoded."""
    if params is None:
        return {}
    before = clients or {}
    return {
        name: orjson.dumps(value)
        for name, value in params.items()
        if name not in before or before[name] != value
    }


def _cap(said: Mapping[str, bytes]) -> int | None:
    """Return the cap in what will be put into a body."""
    params = said.get(PARAMS)
    cap = None if params is None else orjson.loads(params).get(CAP)
    return cap if isinstance(cap, int) else None

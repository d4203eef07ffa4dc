"""One request's life: route -> attempt(s) -> deliver -> account.

Here its pool and its form are found; ``gateway/proxy/sending.py`` makes the attempts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import InvalidRequest, ModelNotFound
from gateway.proxy.deadline import HEADER, deadline_of
from gateway.proxy.headers import to_worker
from gateway.proxy.retry import RetryBudget
from gateway.proxy.sending import Form, Sending
from gateway.routing.explain import index_age_s
from gateway.routing.routes import named_pool
from gateway.tracing import without_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.front.exchange import Exchange, RequestHead
    from gateway.proxy.headers import RawPairs
    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.proxy.outbound import OffloadPut
    from gateway.proxy.rewrite import Rewriter
    from gateway.proxy.ways import Way
    from gateway.routing.dispatch import Dispatcher, Inbound, Target
    from gateway.routing.pool import Pool
    from gateway.telemetry.record import RequestRecord
    from gateway.tenancy import Tenancy


class Proxy:
    """Forwards requests to the workers that the dispatcher chooses; one event loop only.

    Args:
        dispatcher: Chooses workers and keeps their books.
        limits: Deadlines and the retry budget.
        lifecycle: Tells a shutdown from a client that left.
        clock: Monotonic seconds, the dispatcher's.
        rewriters: Pool name -> its canonicalisation; pools without one forward what came.
        tenancy: Says whose the clients' keys are; None = the workers'.

    Attributes:
        offload_put: Caps what a worker offloads of each request; None = nothing is capped.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
        rewriters: Mapping[str, Rewriter],
        tenancy: Tenancy | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.limits = limits
        self.lifecycle = lifecycle
        self.clock = clock
        self.offload_put: OffloadPut | None = None
        self._rewriters = rewriters
        self._tenancy = tenancy
        self._budgets: dict[str, RetryBudget] = {}

    async def forward(
        self,
        exchange: Exchange,
        inbound: Inbound,
        body: bytes,
        record: RequestRecord,
        started_s: float,
        way: Way | None = None,
    ) -> None:
        """Serve a request that was read and checked; ``record`` is filled in as things happen.

        Args:
            exchange: The client's request, not answered yet.
            inbound: What routing reads of it.
            body: Its bytes; of a request that is translated, those of the translation.
            record: Its account.
            started_s: When it came.
            way: How it is said to a worker; None = as a chat or text completion.

        Raises:
            GatewayError: If no answer of a worker can be given to the client.
        """
        timeout = exchange.headers.get(HEADER)
        if timeout is not None:
            inbound.deadline_s = deadline_of(timeout, started_s, self.clock())
        target = target_of(self.dispatcher, inbound)
        record.pool = target.pool.name
        head, trace = exchange.head, exchange.trace
        if trace is not None:
            lines = self._lines(head, without_context(head.raw))
        else:
            lines = head.lines = head.lines or self._lines(head, head.raw)
        headers = b"%bx-request-id: %b\r\n" % (lines, record.request_id.encode())
        routing_s = self.clock()
        form = self._known(target, inbound, body) or await self._routed(target, inbound, body)
        decision = self.dispatcher.choose(form.plan)
        record.route_s = self.clock() - routing_s
        if trace is not None:
            decided_s = (routing_s, routing_s + record.route_s)
            trace.decided(inbound, decision, decided_s, index_age_s(form.plan, decision))
        sending = Sending(self, exchange, form, headers, body, inbound, record, started_s, way)
        await sending.run(decision)

    def _lines(self, head: RequestHead, raw: RawPairs) -> bytes:
        """Return the header lines that go to a worker, of those in ``raw``."""
        keeps_keys = self._tenancy is None or self._tenancy.keeps_keys
        named = head.headers.get("connection")
        return to_worker(raw, named, self.limits.head_bytes, keeps_keys=keeps_keys)

    async def plan(self, pool: Pool, inbound: Inbound, body: bytes) -> Form:
        """Plan a request for one pool, in the form in which it will be sent there."""
        rewriter = self._rewriters.get(pool.name)
        if rewriter is None:
            return Form(await self.dispatcher.plan(pool, inbound), body)
        rewrite = await rewriter.plan(self.dispatcher, pool, inbound, body)
        return Form(rewrite.plan, rewrite.raw, rewrite.rules)

    def _known(self, target: Target, inbound: Inbound, body: bytes) -> Form | None:
        """Plan a body that came before, if it goes as it is and where it seems to."""
        pool, rewriter = target.pool, self._rewriters.get(target.pool.name)
        if target.by_class or (rewriter is not None and rewriter.mode == "rewrite"):
            return None
        plan = self.dispatcher.known_plan(pool, inbound)
        if plan is None:
            return None
        plan.route = target.route
        if rewriter is not None:
            rewriter.look_beside(self.dispatcher, plan, body)
        return Form(plan, body)

    async def _routed(self, target: Target, inbound: Inbound, body: bytes) -> Form:
        """Plan a request for the pool where it goes, which its prompt may change."""
        form = await self.plan(target.pool, inbound, body)
        other = self.dispatcher.redirected(form.plan, target)
        if other.pool is not target.pool:
            form = await self.plan(other.pool, inbound, body)
            form.plan.route = other.route
        return form

    def budget(self, pool: Pool) -> RetryBudget:
        """Return the retry budget of a pool."""
        ratio = self.limits.retry_ratio if pool.retry is None else pool.retry.budget
        budget = self._budgets.get(pool.name)
        if budget is None:
            budget = self._budgets[pool.name] = RetryBudget(ratio, self.clock)
        # A reload of the configuration may have changed it.
        budget.ratio = ratio
        return budget


def target_of(dispatcher: Dispatcher, inbound: Inbound) -> Target:
    """Return where a request goes before its prompt is read.

    Raises:
        ModelNotFound: If nobody serves its model.
        InvalidRequest: If it asks for a pool that is not open to it.
    """
    target = dispatcher.target(inbound)
    if target is None:
        raise ModelNotFound(
            f"The model {inbound.model!r} does not exist; GET /v1/models lists those that do.",
            param="model",
        )
    named = named_pool(inbound.body)
    if named is not None and target.pool.name != named:
        pools = [pool.name for pool in dispatcher.routes.open_to_clients(inbound.model)]
        if named not in pools:
            raise InvalidRequest(
                f"'warmlane.pool' must be one of {inbound.model!r}'s pools: {', '.join(pools)}.",
                param="warmlane.pool",
            )
    return target

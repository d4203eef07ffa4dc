"""One request's life: route -> attempt(s) -> deliver -> account.

Nothing is retried once a byte of an answer has reached the client, and never after a deadline: a
long prefill is not a dead worker. Every attempt's ticket is finished and every record observed,
whatever happens.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from gateway.errors import (
    ConnectFailed,
    FirstByteTimeout,
    ModelNotFound,
    PoolUnavailable,
    ResetBeforeFirstByte,
    UpstreamError,
    WorkerFailed,
    WorkerTimeout,
)
from gateway.proxy.delivery import Delivery
from gateway.proxy.headers import to_worker
from gateway.proxy.retry import RetryBudget
from gateway.proxy.splice import splice
from gateway.routing.dispatch import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.front.exchange import Exchange
    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Decision, Dispatcher, Inbound, Plan, Ticket
    from gateway.routing.pool import Pool
    from gateway.telemetry.record import RequestRecord


class Proxy:
    """Forwards requests to the workers that the dispatcher chooses; one event loop only.

    Args:
        dispatcher: Chooses workers and keeps their books.
        limits: Deadlines and the retry budget.
        lifecycle: Tells a shutdown from a client that left.
        clock: Monotonic seconds, the dispatcher's.
        rewriters: Pool name -> its canonicalisation; pools without one forward what came.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: Limits,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
        rewriters: Mapping[str, Rewriter],
    ) -> None:
        self.dispatcher = dispatcher
        self.limits = limits
        self.lifecycle = lifecycle
        self.clock = clock
        self._rewriters = rewriters
        self._budgets: dict[str, RetryBudget] = {}

    async def forward(
        self,
        exchange: Exchange,
        inbound: Inbound,
        body: bytes,
        record: RequestRecord,
        started_s: float,
    ) -> None:
        """Serve a request that was read and checked; ``record`` is filled in as things happen.

        Raises:
            GatewayError: If no answer of a worker can be given to the client.
        """
        pool = self.dispatcher.pool_for(inbound.model)
        if pool is None:
            raise ModelNotFound(
                f"The model {inbound.model!r} does not exist; GET /v1/models lists those that do.",
                param="model",
            )
        record.pool = pool.name
        head = exchange.head
        if not head.lines:
            named = head.headers.get("connection")
            head.lines = to_worker(head.raw, named, self.limits.head_bytes)
        headers = b"%bx-request-id: %b\r\n" % (head.lines, record.request_id.encode())
        routing_s = self.clock()
        rewriter = self._rewriters.get(pool.name)
        if rewriter is None:
            plan = await self.dispatcher.plan(pool, inbound)
        else:
            rewrite = await rewriter.plan(self.dispatcher, pool, inbound, body)
            plan, body = rewrite.plan, rewrite.raw
            record.canonicalized = ",".join(rewrite.rules)
        decision = self.dispatcher.choose(plan)
        record.route_s = self.clock() - routing_s
        budget = self._budgets.get(pool.name)
        if budget is None:
            budget = self._budgets[pool.name] = RetryBudget(self.limits.retry_ratio, self.clock)
        budget.deposit()
        outbound = _outbound(pool, plan.inbound, body)
        sending = _Sending(self, exchange, plan, headers, outbound, budget, record, started_s)
        await sending.run(decision)


class _Sending:
    """The attempts of one request: at most ``limits.attempts``, each on another worker."""

    __slots__ = (
        *("_body", "_budget", "_exchange", "_failed", "_headers", "_is_spent", "_plan", "_proxy"),
        *("_record", "_started_s"),
    )

    def __init__(
        self,
        proxy: Proxy,
        exchange: Exchange,
        plan: Plan,
        headers: bytes,
        body: bytes,
        budget: RetryBudget,
        record: RequestRecord,
        started_s: float,
    ) -> None:
        self._proxy = proxy
        self._exchange = exchange
        self._plan = plan
        self._headers = headers
        self._body = body
        self._budget = budget
        self._record = record
        self._started_s = started_s
        self._failed: list[str] = []
        self._is_spent = False

    async def run(self, decision: Decision) -> None:
        """Try the chosen worker, then others while that is allowed."""
        if decision.worker is None:
            raise PoolUnavailable(
                f"No worker of pool {self._plan.pool.name!r} takes requests right now."
            )
        while True:
            # Nothing may be awaited between the choice and this.
            ticket = self._proxy.dispatcher.admit(self._plan, decision)
            _note(self._record, ticket)
            try:
                other = await self._attempt(ticket)
            except asyncio.CancelledError:
                is_over = self._proxy.lifecycle.is_over
                ticket.finish(Outcome.CANCELLED if is_over else Outcome.CLIENT_CLOSED)
                raise
            except ConnectionError:
                ticket.finish(Outcome.CLIENT_CLOSED)
                raise
            finally:
                _settle(self._record, ticket)
            if other is None:
                return
            decision = other

    async def _attempt(self, ticket: Ticket) -> Decision | None:
        """Ask one worker and deliver its answer, or return the decision for another attempt."""
        upstream, limits = ticket.worker.upstream, self._proxy.limits
        if upstream is None:
            raise LookupError(f"worker {ticket.worker.id} has no connections")
        try:
            answer = await upstream.request(
                "POST",
                self._exchange.path,
                self._headers,
                self._body,
                first_byte_s=limits.first_byte_s,
                total_s=limits.request_s,
            )
        except (ConnectFailed, ResetBeforeFirstByte) as error:
            is_connect = isinstance(error, ConnectFailed)
            ticket.finish(Outcome.CONNECT_FAILED if is_connect else Outcome.UPSTREAM_RESET)
            return self._again(ticket, error)
        except FirstByteTimeout as error:
            ticket.finish(Outcome.FIRST_BYTE_TIMEOUT)
            raise WorkerTimeout(
                f"Worker {ticket.worker.id} did not begin to answer within "
                f"{limits.first_byte_s:g} s.",
                code="first_byte_timeout",
                should_retry=False,
            ) from error
        except UpstreamError as error:
            ticket.finish(Outcome.UPSTREAM_ERROR)
            raise WorkerFailed(
                f"Worker {ticket.worker.id} sent no valid answer: {error}.", code="bad_answer"
            ) from error
        try:
            if answer.status == 503 and (other := self._other(ticket)) is not None:
                ticket.finish(Outcome.UPSTREAM_ERROR)
                return other
            await Delivery(
                self._exchange, answer, ticket, self._record, self._proxy, self._started_s
            ).run()
            return None
        finally:
            answer.close()

    def _again(self, ticket: Ticket, error: UpstreamError) -> Decision:
        """Choose where to try again after a failure before the first byte.

        Raises:
            WorkerFailed: If there is nowhere, or no retry is left.
        """
        other = self._other(ticket)
        if other is not None:
            return other
        raise WorkerFailed(
            f"Worker {ticket.worker.id} could not be reached or broke off: {error}.",
            code="worker_unreachable",
            should_retry=False if self._is_spent else None,
        ) from error

    def _other(self, ticket: Ticket) -> Decision | None:
        """Choose another worker if there is one and a retry is left for it."""
        self._failed.append(ticket.worker.id)
        if self._record.attempts >= self._proxy.limits.attempts:
            self._is_spent = True
            return None
        decision = self._proxy.dispatcher.choose(self._plan, self._failed)
        if decision.worker is None:
            return None
        if not self._budget.take():
            self._is_spent = True
            return None
        return decision


def _outbound(pool: Pool, inbound: Inbound, body: bytes) -> bytes:
    """Return the body as the worker gets it: the engine's model name, no gateway-only member."""
    target = pool.aliases.get(inbound.model)
    is_hinted = "warmlane" in inbound.body
    if target is None and not is_hinted:
        return body
    put = {} if target is None else {"model": orjson.dumps(target)}
    return splice(body, put=put, drop=("warmlane",) if is_hinted else ())


def _note(record: RequestRecord, ticket: Ticket) -> None:
    """Write down a decision before it is acted on."""
    decision = ticket.decision
    record.attempts += 1
    record.worker = ticket.worker.id
    record.reason = decision.reason.value
    record.prompt_tokens = decision.input.prompt_tokens
    record.predicted_hit_tokens = ticket.predicted_hit_tokens
    record.predicted_ttft_s = decision.ttft_s


def _settle(record: RequestRecord, ticket: Ticket) -> None:
    """Release the books if nothing else did, and write down how the attempt ended."""
    # Only an exception that names no outcome gets here unfinished: cancellation, or a defect.
    ticket.finish(Outcome.CANCELLED)
    if ticket.outcome is not None:
        record.outcome = ticket.outcome.value
    record.observed_hit_tokens = ticket.observed_hit_tokens

"""The attempts of one request at the workers, and where it goes when one fails.

Nothing is retried once a byte of an answer has reached the client, and never after a deadline: a
long prefill is not a dead worker. Every attempt's ticket is finished, whatever happens.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from gateway.errors import (
    ConnectFailed,
    DeadlineExceeded,
    FirstByteTimeout,
    PoolOverloaded,
    PoolUnavailable,
    ResetBeforeFirstByte,
    UpstreamError,
    WorkerFailed,
    WorkerTimeout,
)
from gateway.proxy.deadline import line_of, within
from gateway.proxy.delivery import Delivery
from gateway.proxy.noting import note_decision, note_outcome
from gateway.proxy.outbound import outbound
from gateway.proxy.retry import retry_after_s
from gateway.proxy.ways import Sent
from gateway.routing.dispatch import GateFull, GateTimeout, Outcome

if TYPE_CHECKING:
    from gateway.front.exchange import Exchange
    from gateway.proxy.forward import Proxy
    from gateway.proxy.outbound import Outbound
    from gateway.proxy.ways import Way
    from gateway.routing.dispatch import Decision, Inbound, Plan, Ticket
    from gateway.telemetry.record import RequestRecord
    from gateway.upstream.client import Response

# Answers by which a worker says that it has no room.
_REFUSALS = (429, 503)


class Form:
    """A request in the form in which one pool gets it.

    Args:
        plan: Its plan.
        raw: Its body, before what the gateway itself says to a worker.
        rules: Canonicalisation rules that changed it.
    """

    __slots__ = ("plan", "raw", "rules")

    def __init__(self, plan: Plan, raw: bytes, rules: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.raw = raw
        self.rules = rules


class Sending:
    """The attempts of one request: as many as its pool allows, each on another worker.

    Args:
        proxy: Lends its dispatcher, limits, lifecycle and retry budgets.
        exchange: The client's request, not answered yet.
        form: Its plan, and the body in which that pool gets it.
        headers: Header lines for the worker.
        raw: The body as the client sent it, for a fallback pool that may get another form.
        inbound: The request as the client sent it.
        record: Filled in as things happen.
        started_s: When the request came.
        way: How it is said to a worker; None = as a chat or text completion.
    """

    __slots__ = (
        *("_body", "_budget", "_exchange", "_failed", "_headers", "_inbound", "_is_spent"),
        *("_max_attempts", "_plan", "_proxy", "_raw", "_record", "_started_s", "_way"),
    )

    def __init__(
        self,
        proxy: Proxy,
        exchange: Exchange,
        form: Form,
        headers: bytes,
        raw: bytes,
        inbound: Inbound,
        record: RequestRecord,
        started_s: float,
        way: Way | None = None,
    ) -> None:
        self._way = way
        self._proxy = proxy
        self._exchange = exchange
        self._headers = headers
        self._raw = raw
        self._inbound = inbound
        self._record = record
        self._started_s = started_s
        self._failed: list[str] = []
        self._is_spent = False
        self._take(form)
        pool = form.plan.pool
        self._budget = proxy.budget(pool)
        self._budget.deposit()
        self._max_attempts = (pool.retry or proxy.limits).attempts

    def _take(self, form: Form) -> None:
        """Send it in this form from here on."""
        self._plan, self._body = form.plan, form.raw
        self._record.pool = form.plan.pool.name
        self._record.canonicalized = ",".join(form.rules)

    async def run(self, decision: Decision) -> None:
        """Try the chosen worker, then others while that is allowed. Called once.

        Raises:
            GatewayError: If no answer of a worker can be given to the client.
        """
        dispatcher = self._proxy.dispatcher
        if _is_last_resort(decision) and self._plan.pool.fallback is not None:
            decision = await self._fall_back(decision)
        ticket: Ticket | None = None
        # A retry goes at once: its client has waited already.
        if decision.worker is not None and not dispatcher.is_open(self._plan, decision):
            ticket = await self._wait(decision)
            if ticket is None:
                decision = await self._fall_back(dispatcher.choose(self._plan))
        while True:
            # Nothing may be awaited between the choice and this.
            if ticket is None:
                if decision.worker is None:
                    raise PoolUnavailable(
                        f"No worker of pool {self._plan.pool.name!r} takes requests right now."
                    )
                ticket = dispatcher.admit(self._plan, decision)
            note_decision(self._record, ticket, self._plan)
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
                note_outcome(self._record, ticket)
                if (trace := self._exchange.trace) is not None:
                    trace.end_attempt(self._proxy.clock())
            if other is None:
                return
            decision, ticket = other, None

    async def _wait(self, decision: Decision) -> Ticket | None:
        """Wait for a free worker; None when none is left.

        Raises:
            PoolUnavailable: If too many wait, or none got free in time.
            DeadlineExceeded: If the client's own time was over before that.
        """
        plan = self._plan
        try:
            return await self._proxy.dispatcher.wait(plan, decision)
        except GateFull as full:
            message = (
                f"All workers of pool {plan.pool.name!r} are busy and {full.num_waiting} requests "
                "wait for them already."
            )
            raise PoolOverloaded(
                message, code="queue_full", retry_after_s=full.retry_after_s
            ) from full
        except GateTimeout as late:
            if late.waited_s < plan.pool.deadline_s:
                self._record.outcome = Outcome.DEADLINE.value
                raise DeadlineExceeded(
                    f"No worker of pool {plan.pool.name!r} became free in the time that the client "
                    "gave this request."
                ) from late
            message = (
                f"No worker of pool {plan.pool.name!r} became free within {late.waited_s:g} s."
            )
            raise PoolOverloaded(
                message, code="queue_timeout", retry_after_s=late.retry_after_s
            ) from late
        finally:
            self._record.queue_s += plan.queued_s

    async def _fall_back(self, decision: Decision) -> Decision:
        """Choose in the first fallback pool that has a worker; else stay with what there was."""
        here = self._plan
        pool = here.pool.fallback
        # A client's request runs into each pool once: the configuration has no circles.
        while pool is not None:
            form = await self._proxy.plan(pool, self._inbound, self._raw)
            form.plan.route = here.route
            form.plan.attempts = here.attempts
            other = self._proxy.dispatcher.choose(form.plan, self._failed)
            if not _is_last_resort(other):
                self._take(form)
                return other
            pool = pool.fallback
        if here.pool.fallback is None:
            return decision
        # Time has passed meanwhile.
        return self._proxy.dispatcher.choose(here, self._failed)

    async def _attempt(self, ticket: Ticket) -> Decision | None:
        """Ask one worker and deliver its answer, or return the decision for another attempt."""
        headers, deadline_s = self._headers, self._inbound.deadline_s
        if (trace := self._exchange.trace) is not None:
            headers += trace.begin_attempt(self._plan.pool, ticket, self._proxy.clock())
        upstream, limits = ticket.worker.upstream, self._proxy.limits
        if upstream is None:
            raise LookupError(f"worker {ticket.worker.id} has no connections")
        if deadline_s is not None:
            headers += line_of(self._left_s(ticket, deadline_s))
        plan, body, offload_put = self._plan, self._body, self._proxy.offload_put
        if self._way is None:
            out = outbound(plan, ticket, headers, body, offload_put)
        else:
            sent = Sent(plan, ticket, headers, body, offload_put)
            out = await self._say(self._way, sent)
        left_s = None if deadline_s is None else self._left_s(ticket, deadline_s)
        self._record.offload_tokens = out.offload_tokens
        asked = upstream.request(
            "POST",
            out.path or self._exchange.path,
            out.headers,
            out.body,
            first_byte_s=limits.first_byte_s,
            total_s=limits.request_s if left_s is None else min(left_s, limits.request_s),
        )
        try:
            answer = await (asked if left_s is None else within(left_s, asked))
        except TimeoutError as late:
            raise self._late(ticket) from late
        except (ConnectFailed, ResetBeforeFirstByte) as untried:
            is_connect = isinstance(untried, ConnectFailed)
            ticket.finish(Outcome.CONNECT_FAILED if is_connect else Outcome.UPSTREAM_RESET)
            return await self._again(ticket, untried)
        except FirstByteTimeout as silent:
            ticket.finish(Outcome.FIRST_BYTE_TIMEOUT)
            raise WorkerTimeout(
                f"Worker {ticket.worker.id} did not begin to answer within "
                f"{limits.first_byte_s:g} s.",
                code="first_byte_timeout",
                should_retry=False,
            ) from silent
        except UpstreamError as error:
            ticket.finish(Outcome.UPSTREAM_ERROR)
            raise WorkerFailed(
                f"Worker {ticket.worker.id} sent no valid answer: {error}.", code="bad_answer"
            ) from error
        if trace is not None:
            trace.answered(answer.status)
        try:
            if answer.status in _REFUSALS:
                other = await self._refused(ticket, answer)
                if other is not None:
                    return other
            await Delivery(
                self._exchange,
                answer,
                ticket,
                self._record,
                self._proxy,
                self._started_s,
                out.hearing,
            ).run()
            return None
        finally:
            answer.close()

    async def _say(self, way: Way, sent: Sent) -> Outbound:
        """Say it in another way, for which the worker may have to be asked something."""
        deadline_s = self._inbound.deadline_s
        if deadline_s is None:
            return await way.say(sent)
        try:
            return await within(self._left_s(sent.ticket, deadline_s), way.say(sent))
        except TimeoutError as error:
            raise self._late(sent.ticket) from error

    def _left_s(self, ticket: Ticket, deadline_s: float) -> float:
        """Return what is left of the client's time.

        Raises:
            DeadlineExceeded: If nothing is.
        """
        left_s = deadline_s - self._proxy.clock()
        if left_s <= 0.0:
            raise self._late(ticket)
        return left_s

    def _late(self, ticket: Ticket) -> DeadlineExceeded:
        ticket.finish(Outcome.DEADLINE)
        return DeadlineExceeded(
            f"Worker {ticket.worker.id} did not begin to answer in the time that the client gave "
            "this request."
        )

    async def _refused(self, ticket: Ticket, answer: Response) -> Decision | None:
        """Do as a worker says that has no room; the decision for another attempt, if there is one.

        Without one its client gets what it said, as it said it.
        """
        wait_s = retry_after_s(answer.headers)
        is_unavailable = answer.status == 503
        if wait_s is not None:
            health, now_s = ticket.worker.health, self._proxy.clock()
            if is_unavailable:
                health.asked_to_wait(now_s, wait_s)
            else:
                health.asked_for_less(now_s, wait_s)
        elif not is_unavailable:
            return None
        other = await self._other(ticket, is_overload=wait_s is not None)
        if other is not None:
            ticket.finish(Outcome.UPSTREAM_ERROR if is_unavailable else Outcome.REJECTED)
        return other

    async def _again(self, ticket: Ticket, error: UpstreamError) -> Decision:
        """Choose where to try again after a failure before the first byte.

        Raises:
            WorkerFailed: If there is nowhere, or no retry is left.
        """
        other = await self._other(ticket)
        if other is not None:
            return other
        raise WorkerFailed(
            f"Worker {ticket.worker.id} could not be reached or broke off: {_reason(error)}.",
            code="worker_unreachable",
            should_retry=False if self._is_spent else None,
        ) from error

    async def _other(self, ticket: Ticket, *, is_overload: bool = False) -> Decision | None:
        """Choose another worker if there is one and a retry is left for it.

        Overload is not handed on to those that are ill or asked for time themselves.
        """
        self._failed.append(ticket.worker.id)
        if self._record.attempts >= self._max_attempts:
            self._is_spent = True
            return None
        decision = self._proxy.dispatcher.choose(self._plan, self._failed)
        if _is_last_resort(decision) and self._plan.pool.fallback is not None:
            decision = await self._fall_back(decision)
        if decision.worker is None or (is_overload and _is_last_resort(decision)):
            return None
        if not self._budget.take():
            self._is_spent = True
            self._plan.pool.num_retries_refused += 1
            return None
        return decision


def _is_last_resort(decision: Decision) -> bool:
    """Whether nobody could be chosen, or only a worker that should not be: the health's panic."""
    if decision.worker is None:
        return True
    return decision.input.candidates[decision.position].why == "panic"


def _reason(error: UpstreamError) -> str:
    """Return why an attempt failed, without the worker's address: that is no client's business."""
    if not isinstance(error, ConnectFailed):
        return str(error)
    # Compiled code has the error that was caught as context alone.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, TimeoutError):
        return "no connection in time"
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number else "no connection"

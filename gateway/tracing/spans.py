"""The spans of a traced request that is over: server, routing, and one client span per attempt.

Nothing here reads a prompt but ``_messages``, which only ``telemetry.log_prompts`` has called.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from gateway.routing.affinity import SESSION_HEADERS
from gateway.tracing import names
from gateway.tracing.answers import MAX_TEXT_CHARS, told_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from gateway.routing.dispatch import Decision, Inbound
    from gateway.telemetry.record import RequestRecord
    from gateway.tracing.trace import Attempt, Trace

    Attributes = dict[str, Any]

# A span is no table: of larger pools the first are shown, and their number.
MAX_CANDIDATES = 16
# Longer prompts are cut; collectors refuse spans of megabytes.
MAX_PROMPT_CHARS = 32 << 10
# Not failures of anybody: the client left, or this gateway was stopped.
_WITHDRAWN = ("client_closed", "cancelled")
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class SpanMaker:
    """Makes the spans of traces.

    Args:
        resource: Who this process is.
        scope: What makes them.
        scheme: Of the client port.
        logs_prompts: Whether they may carry prompts.
    """

    def __init__(
        self,
        resource: Resource,
        scope: InstrumentationScope,
        *,
        scheme: str = "http",
        logs_prompts: bool = False,
    ) -> None:
        self._scheme = scheme
        self._resource = resource
        self._scope = scope
        self._logs_prompts = logs_prompts

    def make(
        self, trace: Trace, record: RequestRecord, route: str | None
    ) -> Iterator[ReadableSpan]:
        """Yield the spans of a request that is over, the server span first.

        Args:
            trace: Its notes.
            record: Its account.
            route: The pattern of its path; None if there is no such path.
        """
        end_ns = trace.time_ns(trace.start_s + record.duration_s)
        parent = trace.parent
        above = None if parent is None else _context(trace, parent.span_id, is_remote=True)
        here = _context(trace, trace.span_id)
        name = "POST" if route is None else f"POST {route}"
        attributes, status = _server(record, route)
        attributes[names.URL_SCHEME] = self._scheme
        times = (trace.start_ns, end_ns)
        yield self._span(name, SpanKind.SERVER, here, above, times, attributes, status)
        if trace.decision is None:
            return
        context = _context(trace, trace.draw_id())
        begin_s, decided_s = trace.decided_s
        times = (trace.time_ns(begin_s), trace.time_ns(decided_s))
        routing = _routing(trace.decision, trace.index_age_s)
        yield self._span("route", SpanKind.INTERNAL, context, here, times, routing, _UNSET)
        for number, attempt in enumerate(trace.attempts):
            attributes, status = _client(trace, record, attempt, number)
            if self._logs_prompts and trace.inbound is not None:
                attributes[names.INPUT_MESSAGES] = _messages(trace.inbound)
            context = _context(trace, attempt.span_id)
            last_ns = end_ns if attempt.end_s is None else trace.time_ns(attempt.end_s)
            times = (trace.time_ns(attempt.start_s), last_ns)
            name = f"{attributes[names.OPERATION]} {attributes[names.REQUEST_MODEL]}"
            yield self._span(name, SpanKind.CLIENT, context, here, times, attributes, status)

    def _span(
        self,
        name: str,
        kind: SpanKind,
        context: SpanContext,
        parent: SpanContext | None,
        times_ns: tuple[int, int],
        attributes: Attributes,
        status: Status,
    ) -> ReadableSpan:
        start_ns, end_ns = times_ns
        return ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes={key: value for key, value in attributes.items() if value is not None},
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=self._scope,
        )


def _context(trace: Trace, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        trace.trace_id,
        span_id,
        is_remote=is_remote,
        trace_flags=TraceFlags(trace.flags),
        trace_state=TraceState(trace.state),
    )


def _server(record: RequestRecord, route: str | None) -> tuple[Attributes, Status]:
    is_withdrawn = record.outcome in _WITHDRAWN
    failure = None
    if is_withdrawn or record.outcome in ("truncated", "upstream_error", "deadline"):
        failure = record.outcome
    elif record.status >= 500:
        failure = str(record.status)
    attributes: Attributes = {
        names.HTTP_METHOD: "POST",
        names.HTTP_ROUTE: route,
        # Paths beyond the known ones are chosen by clients; nor is a query ever shown.
        names.URL_PATH: None if route is None or "{" in route else route,
        # 499 stands in the log alone: the client was gone before there was a status.
        names.HTTP_STATUS: None if record.status in (0, 499) else record.status,
        names.ERROR_TYPE: failure,
        names.REQUEST_ID: record.request_id,
        names.TENANT: record.tenant or None,
        names.POOL: record.pool or None,
        names.OUTCOME: record.outcome,
        names.QUEUE_TIME: record.queue_s or None,
    }
    return attributes, _UNSET if failure is None or is_withdrawn else _ERROR


def _routing(decision: Decision, index_age_s: float | None) -> Attributes:
    return {
        names.WORKER: decision.worker,
        names.ROUTING_REASON: decision.reason.value,
        names.ROUTING_SOURCE: decision.source or None,
        names.ROUTING_PROMPT_TOKENS: decision.input.prompt_tokens,
        names.ROUTING_PREDICTED_HIT_TOKENS: decision.hit_tokens,
        names.ROUTING_PREDICTED_TTFT: decision.ttft_s,
        names.ROUTING_CANDIDATES: list(_candidates(decision)),
        names.ROUTING_INDEX_AGE: index_age_s,
    }


def _candidates(decision: Decision) -> Iterator[str]:
    """Say of each worker what it holds and what it would cost, in the rule's own unit."""
    known = zip(decision.input.candidates, decision.candidates, strict=True)
    for position, (candidate, estimate) in enumerate(known):
        if position == MAX_CANDIDATES:
            yield f"and {len(decision.candidates) - position} more"
            return
        if candidate.eligible:
            told = f"hit_tokens={candidate.hit_tokens} cost={estimate.cost:.4g}"
        else:
            told = f"excluded={candidate.why}"
        yield f"{candidate.worker} {told}"


def _client(
    trace: Trace, record: RequestRecord, attempt: Attempt, number: int
) -> tuple[Attributes, Status]:
    ticket, usage, told = attempt.ticket, attempt.usage, told_by(attempt.said)
    inbound = trace.inbound
    outcome = "" if ticket.outcome is None else ticket.outcome.value
    failure = None if outcome == "ok" else outcome
    if attempt.status is not None and attempt.status >= 400:
        failure = str(attempt.status)
    server = urlsplit(ticket.worker.url)
    first_s = None
    if record.ttft_s is not None and attempt is trace.attempts[-1]:
        first_s = trace.start_s + record.ttft_s - attempt.start_s
    attributes: Attributes = {
        names.OPERATION: names.OPERATIONS.get(record.surface, record.surface),
        names.PROVIDER: attempt.pool.engine,
        names.REQUEST_MODEL: record.model[:MAX_TEXT_CHARS],
        names.REQUEST_STREAM: record.stream,
        names.REQUEST_MAX_TOKENS: None if inbound is None else _max_tokens(inbound),
        names.CONVERSATION: None if inbound is None else _conversation(inbound),
        names.RESPONSE_ID: told.response_id,
        names.RESPONSE_MODEL: told.model,
        names.FINISH_REASONS: told.finish_reasons or None,
        names.TIME_TO_FIRST_CHUNK: first_s,
        names.CACHE_WRITE_TOKENS: told.cache_write_tokens,
        names.REASONING_TOKENS: told.reasoning_tokens,
        names.SERVER_ADDRESS: server.hostname,
        names.SERVER_PORT: server.port or (443 if server.scheme == "https" else 80),
        names.HTTP_STATUS: attempt.status,
        # As the convention has it, of attempts that repeat another one.
        names.HTTP_RESEND_COUNT: number or None,
        names.ERROR_TYPE: failure,
        names.WORKER: ticket.worker.id,
        names.POOL: attempt.pool.name,
        names.OUTCOME: outcome or None,
        names.ROUTING_REASON: ticket.decision.reason.value,
        names.ROUTING_PREDICTED_HIT_TOKENS: ticket.predicted_hit_tokens,
    }
    if usage is not None:
        attributes[names.INPUT_TOKENS] = usage.prompt_tokens
        attributes[names.OUTPUT_TOKENS] = usage.completion_tokens
        attributes[names.CACHE_READ_TOKENS] = usage.cached_tokens
    return attributes, _UNSET if failure is None or outcome in _WITHDRAWN else _ERROR


def _max_tokens(inbound: Inbound) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if isinstance(value := inbound.body.get(name), int):
            return value
    return None


def _conversation(inbound: Inbound) -> str | None:
    """Return what tells conversations apart and not what their clients call them."""
    ours = inbound.body.get("warmlane")
    session = next(
        (value for name in SESSION_HEADERS if (value := inbound.headers.get(name))),
        ours.get("session") if isinstance(ours, dict) else None,
    )
    if not isinstance(session, str) or not session:
        return None
    text = f"{inbound.tenant}\0{session}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _messages(inbound: Inbound) -> str:
    """Return the prompt as JSON, cut."""
    prompt = inbound.body.get("messages", inbound.body.get("prompt", inbound.body.get("input")))
    return orjson.dumps(prompt).decode()[:MAX_PROMPT_CHARS]

"""What is known about one finished request; telemetry, logs and feedback read it.

Written by ``gateway/proxy/forward.py`` while the request lives, handed to the observer exactly
once.
"""

from __future__ import annotations

from dataclasses import dataclass


# Its constructor is written out, since one that a dataclass makes itself is not compiled.
@dataclass(slots=True, init=False)
class RequestRecord:
    """The account of one request to an inference path.

    Predictions stand beside their observations; an observation nobody reported is None, never 0.
    All durations are in seconds. ``status`` is the HTTP status sent to the client (499 when the
    client left before one could be sent). ``outcome`` is that of the last attempt
    (``dispatch.Outcome``), or, when no worker was asked, ``refused``, ``unavailable`` or
    ``failed``. ``canonicalized`` names the rules that changed the prompt, with commas. ``queue_s``
    is time spent waiting in the gateway, not in the worker.

    ``source`` is where the tokens come from that the worker does not hold on its device (``own``
    lower tiers, ``recompute``, ``peer:ID``, ``store``), ``pull_tokens`` how many of them are
    fetched, ``route`` names the configured route, ``offload_tokens`` is the cap that was sent.
    ``counted_tokens`` counts the events of a stream: about what was generated, where nobody told.
    ``shadow_*`` is what the routing rule would have done where it did not decide (``routing.mode``
    observe, or outside the share): its worker, the hit tokens it predicts there, and the TTFT it
    would have saved, negative where it would have cost some.
    ``trace_id`` is the trace that has this request's spans, 32 hex digits; None where it has none.
    """

    request_id: str
    surface: str
    stream: bool
    tenant: str
    pool: str
    model: str
    worker: str
    reason: str
    status: int
    outcome: str
    attempts: int
    canonicalized: str
    prompt_tokens: int
    predicted_hit_tokens: int
    observed_hit_tokens: int | None
    completion_tokens: int | None
    counted_tokens: int | None
    predicted_ttft_s: float | None
    ttft_s: float | None
    route_s: float
    queue_s: float
    duration_s: float
    source: str
    pull_tokens: int
    route: str
    offload_tokens: int | None
    shadow_worker: str
    shadow_hit_tokens: int | None
    shadow_saved_s: float | None
    trace_id: str | None

    def __init__(
        self,
        request_id: str,
        surface: str,
        stream: bool = False,
        tenant: str = "",
        pool: str = "",
        model: str = "",
        worker: str = "",
        reason: str = "",
        status: int = 0,
        outcome: str = "",
        attempts: int = 0,
        canonicalized: str = "",
        prompt_tokens: int = 0,
        predicted_hit_tokens: int = 0,
        observed_hit_tokens: int | None = None,
        completion_tokens: int | None = None,
        counted_tokens: int | None = None,
        predicted_ttft_s: float | None = None,
        ttft_s: float | None = None,
        route_s: float = 0.0,
        queue_s: float = 0.0,
        duration_s: float = 0.0,
        source: str = "",
        pull_tokens: int = 0,
        route: str = "",
        offload_tokens: int | None = None,
        shadow_worker: str = "",
        shadow_hit_tokens: int | None = None,
        shadow_saved_s: float | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.surface = surface
        self.stream = stream
        self.tenant = tenant
        self.pool = pool
        self.model = model
        self.worker = worker
        self.reason = reason
        self.status = status
        self.outcome = outcome
        self.attempts = attempts
        self.canonicalized = canonicalized
        self.prompt_tokens = prompt_tokens
        self.predicted_hit_tokens = predicted_hit_tokens
        self.observed_hit_tokens = observed_hit_tokens
        self.completion_tokens = completion_tokens
        self.counted_tokens = counted_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.ttft_s = ttft_s
        self.route_s = route_s
        self.queue_s = queue_s
        self.duration_s = duration_s
        self.source = source
        self.pull_tokens = pull_tokens
        self.route = route
        self.offload_tokens = offload_tokens
        self.shadow_worker = shadow_worker
        self.shadow_hit_tokens = shadow_hit_tokens
        self.shadow_saved_s = shadow_saved_s
        self.trace_id = trace_id

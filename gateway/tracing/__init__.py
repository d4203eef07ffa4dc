"""Traces: what a sampled request did, told to an OTLP collector once it is over.

``sampling.py`` decides when a request begins, ``trace.py`` notes what happens to it, ``spans.py``
makes spans of that when it is over, ``export.py`` sends them from a thread of its own. Requests
that are not sampled leave nothing anywhere.
"""

from __future__ import annotations

from gateway.tracing.context import without_context
from gateway.tracing.making import make_tracing
from gateway.tracing.metrics import SpanCollector
from gateway.tracing.sampling import Tracing
from gateway.tracing.trace import Attempt, Trace

__all__ = ["Attempt", "SpanCollector", "Trace", "Tracing", "make_tracing", "without_context"]

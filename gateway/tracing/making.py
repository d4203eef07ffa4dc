"""Make the tracing that settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.tracing.sampling import Tracing

if TYPE_CHECKING:
    from gateway.config import Settings


def make_tracing(settings: Settings) -> Tracing | None:
    """Make the tracing of one process; None where no collector is configured.

    Starts the thread that exports.
    """
    config = settings.telemetry
    if config.otlp_endpoint is None:
        return None
    # A third of a second of imports, which nobody pays who traces nothing.
    from gateway.tracing.export import Export

    scheme = "http" if settings.server.tls.cert is None else "https"
    export = Export(config.otlp_endpoint, scheme=scheme, logs_prompts=config.log_prompts)
    return Tracing(config.trace_sample, export)

"""Bounds on what a client or a worker may send, and on how long either may take."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Limits:
    """Plain numbers of the data plane; the defaults are those of the configuration.

    ``decompressed_bytes`` bounds what clients and workers sent compressed. ``retry_ratio`` is the
    share of recent requests that may be retried, ``attempts`` the most tries of one request.
    """

    body_bytes: int = 32 << 20
    head_bytes: int = 64 << 10
    headers: int = 128
    decompressed_bytes: int = 64 << 20
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    first_byte_s: float = 600.0
    request_s: float = 1800.0
    retry_ratio: float = 0.2
    attempts: int = 2

    def change(self, other: Limits) -> None:
        """Take over another one's bounds: for requests and connections from now on."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))

"""What gateways tell each other: bytes on a channel, and nothing in them is believed unchecked.

A report is a msgpack array, so that a later version can append fields. Times are ages and
remainders at the moment of sending, in microseconds: gateways share no clock. What is not said is
as before, until the next full report. Prompts travel as a few of their block hashes, never as text.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.routing.others import WorkerLoad

VERSION = 1
# A hundred workers and a full set of leads take 20 KB.
MAX_BYTES = 256 << 10
# Leads one gateway announces at once, and the samples of each chain (a lead is right to 1/16).
MAX_LEADS = 32
MAX_SAMPLES = 16
US_PER_S = 1_000_000

# Bounds far above anything real: sums over any number of gateways stay exact in a float.
Count = Annotated[int, Meta(ge=0, le=10**6)]
Tokens = Annotated[int, Meta(ge=0, le=10**10)]
Micros = Annotated[int, Meta(ge=0, le=10**11)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Hash = Annotated[bytes, Meta(min_length=16, max_length=16)]


class BadMessage(ValueError):
    """The bytes are no report; the message says what was expected."""


class LoadRow(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One worker's load at one gateway: ``WorkerLoad`` with its times as ages."""

    worker: Name
    in_flight: Count
    queued_tokens: Tokens
    queued_us: Micros
    context_tokens: Tokens
    progress_age_us: Micros
    restore_left_us: Micros

    def translate(self, now_s: float) -> WorkerLoad:
        """Return it on the receiver's clock, as of ``now_s``."""
        return WorkerLoad(
            self.in_flight,
            self.queued_tokens,
            self.queued_us / US_PER_S,
            self.context_tokens,
            now_s - self.progress_age_us / US_PER_S,
            now_s + self.restore_left_us / US_PER_S if self.restore_left_us else 0.0,
        )


class LeadRow(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A cold prompt being prefilled: samples of its chain at ``positions(num_links)``."""

    worker: Name
    num_links: Annotated[int, Meta(ge=1, le=10**7)]
    samples: Annotated[tuple[Hash, ...], Meta(max_length=MAX_SAMPLES + 1)]


Leads = Annotated[tuple[LeadRow, ...], Meta(max_length=MAX_LEADS)]


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway says on a pool's channel.

    Attributes:
        version: ``VERSION``; others are not read.
        gateway: The sender's id.
        loads: Workers whose load changed; None = none.
        is_full: Whether ``loads`` is everything: there is nothing on all other workers.
        leads: Cold prompts by block hashes; None = as before.
        texts: Cold prompts by text hashes; None = as before.
        is_leaving: The sender ends; nothing else counts.
    """

    version: int
    gateway: Name
    loads: tuple[LoadRow, ...] | None = None
    is_full: bool = False
    leads: Leads | None = None
    texts: Leads | None = None
    is_leaving: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """Return the bytes of a report."""
    return _encoder.encode(report)


def decode(data: object) -> Report:
    """Read what came over the channel.

    Raises:
        BadMessage: If it is anything but a report of this version.
    """
    if not isinstance(data, bytes) or len(data) > MAX_BYTES:
        raise BadMessage(f"expected at most {MAX_BYTES} bytes")
    try:
        report = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"expected a load report: {error}") from error
    if report.version != VERSION:
        raise BadMessage(f"expected version {VERSION}, got {report.version}")
    return report


def micros(seconds: float) -> int:
    """Return a duration as it is sent: not negative, and bounded."""
    return min(10**11, max(0, int(seconds * US_PER_S)))

"""What gateways tell each other of their tenants' spending: bytes on a channel, checked as read.

Totals since a gateway's start, so that a message that was lost is made up for by the next one; and
what the sender knows to be left, for gateways that have just started.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
# Rows of one message; more tenants take several.
MAX_ROWS = 1000
MAX_BYTES = 256 << 10

Total = Annotated[float, Meta(ge=-1e15, le=1e15)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class BadSpendingError(ValueError):
    """The bytes are no report; the message says what was expected."""


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One budget as a gateway has it.

    Attributes:
        tenant: Its name.
        resource: ``requests`` or ``tokens``.
        spent: By this gateway since it started.
        balance: What it knows to be left; negative where too much was spent.
    """

    tenant: Name
    resource: Annotated[str, Meta(max_length=16)]
    spent: Total
    balance: Total


class Spending(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway says.

    Attributes:
        version: ``VERSION``; others are not read.
        gateway: The sender's id.
        rows: Budgets whose spending changed.
        is_full: Whether what is in none of its messages so far was never spent.
    """

    version: int
    gateway: Annotated[str, Meta(min_length=1, max_length=64)]
    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_ROWS)]
    is_full: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Spending)


def encode(gateway: str, rows: tuple[Row, ...], *, is_full: bool) -> bytes:
    """Return the bytes of a report."""
    return _encoder.encode(Spending(VERSION, gateway, rows, is_full))


def decode(data: object) -> Spending:
    """Read what came over the channel.

    Raises:
        BadSpendingError: If it is anything but a report of this version.
    """
    if not isinstance(data, bytes) or len(data) > MAX_BYTES:
        raise BadSpendingError(f"expected at most {MAX_BYTES} bytes")
    try:
        report = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadSpendingError(f"expected a report of spending: {error}") from error
    if report.version != VERSION:
        raise BadSpendingError(f"expected version {VERSION}, got {report.version}")
    return report

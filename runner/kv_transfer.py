"""The body field ``kv_transfer_params``: how far one request's KV may travel between tiers.

Source: vLLM 0.32, ``max_offload_tokens`` and ``max_load_tokens``; ``source`` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.errors import ApiError, invalid

if TYPE_CHECKING:
    from runner.fields import Fields


@dataclass(frozen=True, slots=True)
class OffloadCaps:
    """Most leading tokens whose KV may be stored in or taken from lower tiers; None = no cap."""

    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None


def parse_kv_transfer(fields: Fields) -> OffloadCaps:
    """Read ``kv_transfer_params`` of a request body.

    Raises:
        ApiError: 400 for anything but the known members with non-negative integers, and for a
            peer, since no configuration allows one.
    """
    transfer = fields.object("kv_transfer_params")
    if transfer is None:
        return OffloadCaps()
    unknown = transfer.values.keys() - {"max_offload_tokens", "max_load_tokens", "source"}
    if unknown:
        name = transfer.name(min(unknown))
        raise invalid(f"`{name}` is not supported by this runner", name, "unsupported_parameter")
    if (source := transfer.object("source")) is not None:
        raise _refuse_source(source)
    return OffloadCaps(
        max_offload_tokens=_cap(transfer, "max_offload_tokens"),
        max_load_tokens=_cap(transfer, "max_load_tokens"),
    )


def _cap(transfer: Fields, key: str) -> int | None:
    cap = transfer.integer(key, None, low=0)
    # Only an absent member means "no cap": a null is as likely a sender's lost number.
    if cap is None and key in transfer.values:
        raise transfer.refuse(key, "an integer of at least 0")
    return cap


def _refuse_source(source: Fields) -> ApiError:
    if source.string("url", None) is None:
        return source.refuse("url", "a non-empty string")
    if source.integer("tokens", None, low=0) is None:
        return source.refuse("tokens", "an integer of at least 0")
    return invalid(
        f"`{source.path}` names a peer, but this runner's setting `peers` allows none",
        source.path,
        "peer_not_allowed",
    )

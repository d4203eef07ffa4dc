"""The body field ``kv_transfer_params``: how far one request's KV may travel between tiers.

Source: vLLM 0.32, ``max_offload_tokens`` and ``max_load_tokens``; ``source`` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.errors import invalid
from runner.tiers.peer import peer_url
from runner.tiers.types import PeerSource

if TYPE_CHECKING:
    from collections.abc import Collection

    from runner.fields import Fields


@dataclass(frozen=True, slots=True)
class OffloadCaps:
    """How far one request's KV may travel.

    Attributes:
        max_offload_tokens: Most leading tokens stored in lower tiers; None for no cap.
        max_load_tokens: Most leading tokens taken from there; None for no cap.
        source: A runner that is said to hold the prefix.
    """

    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    source: PeerSource | None = None


NO_CAPS = OffloadCaps()


def parse_kv_transfer(fields: Fields) -> OffloadCaps:
    """Read ``kv_transfer_params`` of a request body.

    Raises:
        ApiError: 400 for anything but the known members as they should be.
    """
    transfer = fields.object("kv_transfer_params")
    if transfer is None:
        return NO_CAPS
    unknown = transfer.values.keys() - {"max_offload_tokens", "max_load_tokens", "source"}
    if unknown:
        name = transfer.name(min(unknown))
        raise invalid(f"`{name}` is not supported by this runner", name, "unsupported_parameter")
    return OffloadCaps(
        max_offload_tokens=_cap(transfer, "max_offload_tokens"),
        max_load_tokens=_cap(transfer, "max_load_tokens"),
        source=_source(transfer.object("source")),
    )


def check_source(source: PeerSource | None, allowed: Collection[str]) -> None:
    """Refuse a peer that the configuration does not name: a request must not choose whom we ask.

    Raises:
        ApiError: 400.
    """
    if source is not None and source.url not in allowed:
        name = "kv_transfer_params.source"
        listed = ", ".join(sorted(allowed)) or "none"
        raise invalid(
            f"`{name}` names a peer that this runner's setting `--peer` does not allow; it "
            f"allows {listed}",
            name,
            "peer_not_allowed",
        )


def _cap(transfer: Fields, key: str) -> int | None:
    cap = transfer.integer(key, None, low=0)
    # Only an absent member means "no cap": a null is as likely a sender's lost number.
    if cap is None and key in transfer.values:
        raise transfer.refuse(key, "an integer of at least 0")
    return cap


def _source(source: Fields | None) -> PeerSource | None:
    if source is None:
        return None
    url, tokens = source.string("url", None), source.integer("tokens", None, low=0)
    if url is None:
        raise source.refuse("url", "a non-empty string")
    if tokens is None:
        raise source.refuse("tokens", "an integer of at least 0")
    try:
        return PeerSource(peer_url(url), tokens)
    except ValueError as error:
        raise source.refuse("url", "a base URL, http://HOST:PORT") from error

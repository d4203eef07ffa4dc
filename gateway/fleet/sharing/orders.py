"""First-seen tool orders, shared: all gateways forward a tool set in the order one saw first.

What is shared is an order of digests, never a tool: each gateway puts the bytes that its own client
sent into that order. Clients that write the same tools with other spaces keep their spaces.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from prefix_index.canonical.firstseen import FirstSeenMemory
from prefix_index.canonical.spans import value_end
from prefix_index.canonical.tools import identify
from prefix_index.replica.shared_map import SharedMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.replica.link import Link

# As many sets as one process keeps.
_MAX_SETS: Final = 4096
_DIGEST_BYTES: Final = 16
_SPACES: Final = b" \t\r\n"


class SharedFirstSeen(FirstSeenMemory):
    """A memory of first-seen forms whose orders are those of the whole fleet; event loop only.

    Args:
        clock: Monotonic seconds.
        link: Connection.

    Attributes:
        map: What carries the orders; ``map.run`` must be running.
        decode_errors: Shared orders that are none.
    """

    def __init__(self, clock: Callable[[], float], link: Link) -> None:
        super().__init__(clock, max_sets=_MAX_SETS)
        self.decode_errors = 0
        self.map = SharedMap(
            link, "tool-orders", max_entries=_MAX_SETS, first_wins=True, on_entry=self._heard
        )
        self._orders: OrderedDict[bytes, bytes] = OrderedDict()
        # Key of an order -> whose set it is, for sets kept here.
        self._owners: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()

    def keep(self, tenant: str, set_id: bytes, form: bytes) -> bytes:
        """Return the kept form, or keep ``form``, in the order that others saw first."""
        if self.get(tenant, set_id) is not None:
            return super().keep(tenant, set_id, form)
        key = _key(tenant, set_id)
        order = self._orders.get(key)
        if order is not None:
            return super().keep(tenant, set_id, reordered(form, order) or form)
        self._owners[key] = tenant, set_id
        if len(self._owners) > _MAX_SETS:
            self._owners.popitem(last=False)
        tools = identify(form)
        if tools is not None:
            self.map.put(key, b"".join(tools.order))
        return super().keep(tenant, set_id, form)

    def _heard(self, key: bytes, order: bytes) -> None:
        if len(key) != _DIGEST_BYTES or not order or len(order) % _DIGEST_BYTES:
            self.decode_errors += 1
            return
        self._orders[key] = order
        if len(self._orders) > _MAX_SETS:
            self._orders.popitem(last=False)
        owner = self._owners.get(key)
        kept = None if owner is None else self.get(*owner)
        if owner is None or kept is None:
            return
        form = reordered(kept, order)
        if form is not None and form != kept:
            self._forget(owner)
            super().keep(*owner, form)


def reordered(form: bytes, order: bytes) -> bytes | None:
    """Return a JSON list of tools in another order, all bytes of the tools as they are.

    Args:
        form: The list.
        order: Digest of each tool as ``identify`` gives them, one after the other.

    Returns:
        None if these are not the same tools.
    """
    tools = identify(form)
    wanted = [order[at : at + _DIGEST_BYTES] for at in range(0, len(order), _DIGEST_BYTES)]
    if tools is None or sorted(tools.order) != sorted(wanted):
        return None
    spans = _elements(form)
    # Equal tools may stand there twice: each is taken once.
    places: dict[bytes, list[int]] = {}
    for at, digest in enumerate(tools.order):
        places.setdefault(digest, []).append(at)
    parts: list[bytes] = []
    end = 0
    for digest, (start, stop) in zip(wanted, spans, strict=True):
        first, last = spans[places[digest].pop(0)]
        parts += (form[end:start], form[first:last])
        end = stop
    return b"".join((*parts, form[end:]))


def _elements(form: bytes) -> list[tuple[int, int]]:
    """Return where each element of a JSON list begins and ends."""
    spans = []
    at = _after_spaces(form, 1)
    while form[at] != ord("]"):
        end = value_end(form, at)
        spans.append((at, end))
        at = _after_spaces(form, end)
        if form[at] == ord(","):
            at = _after_spaces(form, at + 1)
    return spans


def _after_spaces(form: bytes, at: int) -> int:
    while form[at] in _SPACES:
        at += 1
    return at


def _key(tenant: str, set_id: bytes) -> bytes:
    # Whose set it is does not leave the process either.
    raw = tenant.encode("utf-8", "surrogatepass")
    return blake2b(len(raw).to_bytes(8, "little") + raw + set_id, digest_size=16).digest()

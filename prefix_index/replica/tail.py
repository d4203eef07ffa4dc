"""Follow a stream of Redis from a known entry on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prefix_index.replica.codec import SharedValueError, entry_order
from prefix_index.replica.link import BLOCK_S, answer

if TYPE_CHECKING:
    from prefix_index.replica.link import Link

# Entries per read; each is applied in two milliseconds at most.
_READ_ENTRIES: Final = 32
_START: Final = b"0-0"

Fields = dict[bytes, bytes]


class Tail:
    """A place in a stream. Every entry behind it comes once and in order, as far as it is kept.

    Attributes:
        at: Id of the last entry that was read; None before ``start``.
    """

    def __init__(self, link: Link, key: str) -> None:
        self.at: bytes | None = None
        self._link = link
        self._key = key

    @property
    def is_started(self) -> bool:
        """Whether there is a place to go on from."""
        return self.at is not None

    def has_passed(self, entry_id: bytes) -> bool:
        """Say whether an entry is behind us: it was read, or it never will be."""
        return self.at is not None and entry_order(self.at) >= entry_order(entry_id)

    async def start(self) -> None:
        """Begin at the stream's end, or go on where we were if the stream still goes that far.

        A server that lost its data, or a replica that was behind, numbers from an earlier time on.

        Raises:
            LINK_ERRORS: If Redis does not answer.
        """
        last: Any = await answer(self._link.client.xrevrange(self._key, count=1))
        end = last[0][0] if last else _START
        if self.at is None or entry_order(end) < entry_order(self.at):
            self.at = end

    async def read(self) -> list[tuple[bytes, Fields]]:
        """Wait a while for entries and return them.

        Raises:
            LINK_ERRORS: If Redis does not answer.
        """
        assert self.at is not None, "start comes first"
        found: Any = await answer(
            self._link.blocking.xread(
                {self._key: self.at}, count=_READ_ENTRIES, block=int(BLOCK_S * 1000)
            )
        )
        entries = found[0][1] if found else []
        if entries:
            self.at = entries[-1][0]
        return [(entry_id, fields) for entry_id, fields in entries if fields]


def field(fields: Fields, name: bytes) -> bytes:
    """Return a field of an entry.

    Raises:
        SharedValueError: If it has none of that name.
    """
    value = fields.get(name)
    if value is None:
        raise SharedValueError("entry lacks a field")
    return value

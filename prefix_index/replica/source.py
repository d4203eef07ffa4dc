"""What the replica needs of the process it runs in: one worker's own events, on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prefix_index.blocks import BlockHash
    from prefix_index.events import EngineHash
    from prefix_index.ingest import FeedChange


class Source(Protocol):
    """One worker's events. Used from the event loop; nothing here waits."""

    def follow(self, next_sequence: int, digest: int) -> None:
        """Read the worker's events, going on behind a known batch (0 = from the first one on)."""

    def unfollow(self) -> None:
        """Stop reading them; what is known stays."""

    def clear(self) -> None:
        """Forget the worker's blocks and their names."""

    def adopt(self, names: list[EngineHash], blocks: list[BlockHash]) -> None:
        """Learn the engine's names of blocks that are, or will be, in the index."""

    def names(self) -> Iterable[EngineHash]:
        """Return a copy of the names that are known."""

    def block_of(self, name: EngineHash) -> BlockHash | None:
        """Return the block of a name."""

    def position(self) -> tuple[int, int]:
        """Return the next batch's sequence and the last one's digest."""

    def is_silent(self) -> bool:
        """Say whether the worker stopped telling although it should."""

    def set_silent(self, is_silent: bool) -> None:
        """Take over from the reader of its events whether the worker tells."""

    def listen(self, on_change: Callable[[FeedChange], None] | None) -> None:
        """Call back after each batch that changed something."""

"""Which tiers a runner has beneath its pool, as configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Sizes and addresses; the defaults are a runner without tiers.

    Attributes:
        host_bytes: Hard bound of the host slab (tier ``cpu``); 0 for none.
        disk_dir: Folder of the segments (tier ``disk``); None for none.
        disk_bytes: Hard bound of what is kept there; 0 without a folder.
        remote_url: Store shared with other runners (tier ``remote``); None for none.
        peers: Runners that a request may name as the source of its prefix.
    """

    host_bytes: int = 0
    disk_dir: Path | None = None
    disk_bytes: int = 0
    remote_url: str | None = None
    peers: tuple[str, ...] = ()

    @property
    def has_any(self) -> bool:
        """Whether there is anything to build."""
        return bool(self.host_bytes or self.disk_dir or self.remote_url or self.peers)

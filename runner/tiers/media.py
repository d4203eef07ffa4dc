"""Opens the media that an operator configured: memory, a directory, a server, other runners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.tiers.arena import ArenaError, allocate_arena, map_memory, pin_memory
from runner.tiers.host import HostStore
from runner.tiers.peer import PeerStore
from runner.tiers.remote import RemoteStore
from runner.tiers.segments.errors import SegmentsError
from runner.tiers.segments.store import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.kvkeys import KvKey
    from runner.tiers.options import TierOptions
    from runner.tiers.types import Place

PINNED_FIRST = (pin_memory, map_memory)
"""Allocators of host memory for a device that copies by itself."""

PLAIN = (map_memory,)
"""Allocators of host memory where the device is the host."""


class TiersError(RuntimeError):
    """A tier cannot be had as configured; the message names the option and the reason."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The media, opened; None for what is not configured.

    Attributes:
        recovered: What the disk held before.
        allocators: Where more memory of the host tier's kind comes from.
    """

    host: HostStore | None = None
    disk: SegmentStore | None = None
    recovered: Sequence[Place] = ()
    remote: RemoteStore | None = None
    peers: PeerStore | None = None
    allocators: tuple[Callable[[int], memoryview], ...] = PLAIN


def open_stores(
    options: TierOptions,
    block_bytes: int,
    block_size: int,
    namespace: KvKey,
    facts: Mapping[str, object],
    clock: Callable[[], float],
    *,
    is_cuda: bool,
) -> Stores:
    """Open what is configured, the directory last: it is the one that must be closed again.

    Raises:
        TiersError: If one cannot be had; nothing is left open then.
    """
    allocators = PINNED_FIRST if is_cuda else PLAIN
    host = remote = peers = None
    if options.host_bytes:
        try:
            arena = allocate_arena(
                options.host_bytes, block_bytes, option="--host-bytes", allocators=allocators
            )
        except ArenaError as error:
            raise TiersError(str(error)) from error
        host = HostStore(arena, clock=clock)
    if options.remote_url:
        try:
            remote = RemoteStore(
                options.remote_url, namespace=namespace, block_bytes=block_bytes, clock=clock
            )
        except ValueError as error:
            # Without the URL: it may hold a password.
            raise TiersError(f"--remote: {error}") from error
    if options.peers:
        peers = PeerStore(
            options.peers,
            namespace=namespace,
            block_bytes=block_bytes,
            block_size=block_size,
            clock=clock,
        )
    if options.disk_dir is None:
        return Stores(host, remote=remote, peers=peers, allocators=allocators)
    try:
        disk, recovered = SegmentStore.open(
            options.disk_dir,
            namespace=namespace,
            facts=facts,
            block_bytes=block_bytes,
            block_size=block_size,
            capacity_bytes=options.disk_bytes,
            clock=clock,
        )
    except SegmentsError as error:
        raise TiersError(f"--ssd-dir: {error}") from error
    return Stores(host, disk, recovered, remote, peers, allocators)

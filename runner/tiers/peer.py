"""Pulling a prefix's blocks from another runner: one HTTP request, blocks streamed back in order.

Whatever goes wrong (refused, busy, late, cut off, damaged) only ends the pull: what came verified
is used, the rest is computed. The other side is ``runner/peers.py``.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runner.tiers.record import head_bytes, is_sound
from runner.tiers.wire import ProtocolError, Target, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.kvkeys import KvKey
    from runner.tiers.types import Deliver, Outcome, Place

PATH = "/kv/blocks"
# A peer in the same network accepts within a millisecond, or is gone.
CONNECT_S = 1.0
# Any server's answer has fewer.
MAX_HEADERS = 64
_HTTP_OK = 200


def peer_url(url: str) -> str:
    """Return a peer's base URL in the one form in which peers are compared.

    Raises:
        ValueError: If it is no ``http://HOST:PORT``.
    """
    parts = urlsplit(url.strip())
    try:
        port = parts.port or 80
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from error
    is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    if parts.scheme != "http" or not parts.hostname or parts.username or not is_bare:
        raise ValueError(f"{url!r} is no peer; expected http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """What was pulled from one peer; all of it only grows.

    Attributes:
        blocks: Blocks that came.
        bytes: Their bytes.
        tokens: Their tokens.
        seconds: Time of all pulls, also of those in which little or nothing came: what a peer is
            worth asking for.
        failed: Pulls that ended early, for any reason but that the peer had no more.
    """

    blocks: int = 0
    bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0


class PeerStore:
    """Asks other runners for blocks. Blocking calls, several at once from transfer threads."""

    def __init__(
        self,
        peers: Sequence[str],
        *,
        namespace: KvKey,
        block_bytes: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nobody yet.

        Args:
            peers: Who may be asked, as ``peer_url`` writes them.
            namespace: Of this runner's KV; a peer of another one has nothing for it.
            block_bytes: Bytes of a block.
            block_size: Its tokens.
            clock: Of all deadlines.
        """
        self.block_bytes = block_bytes
        self._namespace = namespace
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._figures = {url: PeerFigures() for url in peers}

    def figures(self) -> dict[str, PeerFigures]:
        """Return what was pulled from each peer so far; from any thread."""
        with self._lock:
            return dict(self._figures)

    def read_from(
        self, url: str, wanted: Sequence[Place], deliver: Deliver, deadline_s: float
    ) -> Outcome:
        """Pull blocks from a peer; as ``BlockStore.read``.

        Args:
            url: One of the peers; anybody else is not asked.
            wanted: First block first; slots do not matter.
            deliver: Called from this thread with verified bytes.
            deadline_s: When to give up.

        Returns:
            ``missing`` if the peer has fewer blocks.
        """
        if url not in self._figures:
            return "failed"
        pull = _Pull(self, url, wanted, deliver, deadline_s)
        started_s = self._clock()
        outcome = pull.run()
        self._count(url, pull.num_delivered, self._clock() - started_s, outcome, pull.is_late)
        return outcome

    def close(self) -> None:
        """Nothing stays open between pulls."""

    def _count(
        self, url: str, num_blocks: int, elapsed_s: float, outcome: Outcome, is_late: bool
    ) -> None:
        has_failed = outcome in ("damaged", "failed") or is_late
        with self._lock:
            known = self._figures[url]
            self._figures[url] = PeerFigures(
                known.blocks + num_blocks,
                known.bytes + num_blocks * self.block_bytes,
                known.tokens + num_blocks * self._block_size,
                known.seconds + elapsed_s,
                known.failed + has_failed,
            )


class _Pull:
    """One request to one peer; used once."""

    def __init__(
        self,
        store: PeerStore,
        url: str,
        wanted: Sequence[Place],
        deliver: Deliver,
        deadline_s: float,
    ) -> None:
        self.num_delivered = 0
        self.is_late = False
        self._store = store
        self._url = url
        self._wanted = wanted
        self._deliver = deliver
        self._deadline_s = deadline_s

    def run(self) -> Outcome:
        if not self._wanted:
            return "done"
        clock = self._store._clock
        wire: Wire | None = None
        try:
            wire = Wire(_target(self._url), min(self._deadline_s, clock() + CONNECT_S), clock)
            wire.send([self._request(self._deadline_s - clock())], self._deadline_s)
            return self._receive(wire, _content_length(wire, self._deadline_s))
        except TimeoutError:
            self.is_late = clock() >= self._deadline_s
            return "stopped" if self.is_late else "failed"
        except OSError:
            return "failed"
        finally:
            if wire is not None:
                wire.close()

    def _request(self, left_s: float) -> bytes:
        body = json.dumps(
            {
                "namespace": self._store._namespace.hex(),
                "keys": [place.record.key.hex() for place in self._wanted],
                "deadline_s": max(left_s, 0.0),
            }
        )
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {urlsplit(self._url).netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        return head.encode() + body.encode()

    def _receive(self, wire: Wire, num_bytes: int) -> Outcome:
        store = self._store
        head = head_bytes(len(self._wanted[0].record.tokens))
        record_bytes = head + store.block_bytes
        num_blocks, rest = divmod(num_bytes, record_bytes)
        if rest or num_blocks > len(self._wanted):
            return "damaged"
        # Reused for every block, since a buffer is valid only during its delivery.
        buffer = memoryview(bytearray(record_bytes if num_blocks else 0))
        for at, place in enumerate(self._wanted[:num_blocks]):
            wire.fill(buffer, self._deadline_s)
            if not is_sound(buffer[:head], buffer[head:], store._namespace, place.record):
                return "damaged"
            if not self._deliver(at, buffer[head:]):
                return "stopped"
            self.num_delivered += 1
        return "done" if num_blocks == len(self._wanted) else "missing"


def _target(url: str) -> Target:
    parts = urlsplit(url)
    return Target(parts.hostname or "", parts.port or 80)


def _content_length(wire: Wire, deadline_s: float) -> int:
    """Read the head of an answer; return how many bytes of blocks follow.

    Raises:
        ProtocolError: If the peer refuses, or does not speak HTTP.
    """
    status = wire.line(deadline_s).split(b" ")
    if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or not status[1].isdigit():
        raise ProtocolError("the peer does not speak HTTP/1")
    if int(status[1]) != _HTTP_OK:
        raise ProtocolError(f"the peer answers {int(status[1])}")
    length = None
    for _ in range(MAX_HEADERS):
        line = wire.line(deadline_s)
        if not line:
            break
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            length = int(value)
    else:
        raise ProtocolError(f"the peer's answer has more than {MAX_HEADERS} headers")
    if length is None:
        raise ProtocolError("the peer does not tell how much it sends")
    return length

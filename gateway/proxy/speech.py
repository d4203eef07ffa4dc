"""Which workers speak an API themselves: asked once in each of their lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import UpstreamError

if TYPE_CHECKING:
    from gateway.routing.pool import Worker
    from gateway.upstream.client import Upstream

# A worker answers an empty request from its HTTP thread.
DEADLINE_S = 5.0
# By which servers say that there is no such path.
_NO_SUCH_PATH = frozenset((404, 405, 501))
# Engines of which it is known.
_SPEAKS_NEITHER = frozenset(("runner",))


class Speech:
    """Asks workers what they speak, and notes it on their upstreams; one event loop only."""

    async def speaks(self, worker: Worker, engine: str, path: str, headers: bytes) -> bool:
        """Whether a worker has a path; asked with an empty request, which nobody computes.

        A worker that does not answer is taken not to, this time.

        Args:
            worker: The worker.
            engine: Its kind.
            path: The path.
            headers: Header lines of the request that is to be sent, with the keys that it has.
        """
        upstream = worker.upstream
        if engine in _SPEAKS_NEITHER or upstream is None:
            return False
        known = upstream.spoken
        key = (path, worker.epoch)
        if key not in known:
            status = await _status(upstream, path, headers)
            if status is None or (status >= 500 and status not in _NO_SUCH_PATH):
                return False
            for old in [old for old in known if old[1] != worker.epoch]:
                del known[old]  # what an earlier life of it spoke
            known[key] = status not in _NO_SUCH_PATH
        return known[key]


async def _status(upstream: Upstream, path: str, headers: bytes) -> int | None:
    try:
        answer = await upstream.request(
            "POST", path, headers, b"{}", first_byte_s=DEADLINE_S, total_s=DEADLINE_S
        )
        try:
            await answer.read()
        finally:
            answer.close()
    except UpstreamError:
        return None
    return answer.status

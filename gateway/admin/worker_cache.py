"""What a bundled runner says of its own cache, asked through the gateway by an operator.

Workers are often out of an operator's reach; their figures and their self-test are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import NotFound, UpstreamError, WorkerFailed

if TYPE_CHECKING:
    from gateway.routing.pool import Pool, Worker

# The runner answers from memory.
CACHE_TIMEOUT_S = 5.0
# A self-test takes five seconds at most, on a slow disk some more to clear up.
SELFTEST_TIMEOUT_S = 9.0


async def cache_of(pool: Pool, worker: Worker) -> dict[str, Any]:
    """Return ``GET /cache`` of a runner: blocks by state and tier, with their sizes.

    Raises:
        NotFound: If this kind of engine has no such report.
        WorkerFailed: If the worker does not give it.
    """
    return await _asked(pool, worker, "GET", "/cache", CACHE_TIMEOUT_S)


async def selftest_of(pool: Pool, worker: Worker) -> dict[str, Any]:
    """Have a runner stress-test its disk tier and return what it found; some seconds.

    Raises:
        NotFound: If this kind of engine has no such test.
        WorkerFailed: If the worker does not run it, with what it said.
    """
    return await _asked(pool, worker, "POST", "/cache/selftest", SELFTEST_TIMEOUT_S)


async def _asked(
    pool: Pool, worker: Worker, method: str, path: str, timeout_s: float
) -> dict[str, Any]:
    if pool.engine != "runner" or worker.upstream is None:
        raise NotFound(
            f"Worker {worker.id} is of engine {pool.engine!r}; only bundled runners have {path}.",
            code="no_such_report",
        )
    try:
        response = await worker.upstream.request(
            method, path, [], first_byte_s=timeout_s, total_s=timeout_s
        )
        try:
            body = await response.read()
        finally:
            response.close()
    except UpstreamError as error:
        raise WorkerFailed(f"Worker {worker.id} did not answer {path}: {error}") from error
    document = _document(body)
    if response.status == 200:
        return document
    found = document.get("error")
    said = found.get("message") if isinstance(found, dict) else None
    raise WorkerFailed(
        f"Worker {worker.id} answered {path} with {response.status}: {said or 'no reason given'}"
    )


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}

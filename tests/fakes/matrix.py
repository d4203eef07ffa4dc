"""The fault matrix: every way a worker can fail, in every phase of its answer, streamed or not.

Each cell is played twice: with that worker alone, and with another one that is well beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from gateway.proxy.limits import Limits
from tests.fakes.engine import (
    DONE,
    FINISH,
    LAST_CHUNK,
    ROLE,
    End,
    RawEngine,
    Script,
    Seen,
    answer,
    broken,
    chunk,
    content,
    head,
)
from tests.fakes.gateway import Gateway, chat, gateway
from tests.support import free_port, poll_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.proxy.server import Front

FAULTS = ("refused", "reset", "hang", "slow", "garbage", "500", "503", "early close")
PHASES = ("before connect", "before head", "before first byte", "mid-stream", "at end")
# Only what hangs runs into a limit: the one of its phase, with time for what comes before. All
# others are far away, since a busy machine is none of these faults.
FIRST_BYTE_S, REQUEST_S, NEVER_S = 0.5, 1.5, 60.0
SLOW_S = 0.05

_EVENTS = [ROLE, content("some"), content("text"), FINISH, DONE]
_STREAM_HEAD = head(200, "content-type: text/event-stream", "transfer-encoding: chunked")
_STREAM = _STREAM_HEAD + b"".join(map(chunk, _EVENTS)) + LAST_CHUNK
_JSON_HEAD = head(200, "content-type: application/json", "transfer-encoding: chunked")
_PARTS = [b'{"choices":[{"message":', b'{"content":"some ', b'text"}}', b"]}"]
_JSON = _JSON_HEAD + b"".join(map(chunk, _PARTS)) + LAST_CHUNK


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to fail.

    ``alone`` and ``beside`` are what a client sees in the end, without and with a well worker;
    ``attempts`` are those of the latter.
    """

    fault: str
    phase: str
    is_stream: bool
    alone: str
    beside: str
    attempts: int

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {'stream' if self.is_stream else 'whole'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell."""

    alone: str
    beside: str
    attempts: int


def cells() -> Iterator[Cell]:
    """Yield every cell that there is, with what the design says of it."""
    for fault in FAULTS:
        for phase in PHASES:
            for is_stream in (True, False):
                cell = _designed(fault, phase, is_stream=is_stream)
                if cell is not None:
                    yield Cell(fault, phase, is_stream, *cell)


def _designed(fault: str, phase: str, *, is_stream: bool) -> tuple[str, str, int] | None:
    is_before = phase in ("before connect", "before head")
    if fault == "refused":
        return ("502", "200 whole", 2) if phase == "before connect" else None
    if fault == "slow":
        return "200 whole", "200 whole", 1
    if fault in ("500", "503"):
        if phase != "before head":
            return None
        # An overloaded worker's request goes elsewhere; a failed one may have been computed.
        return (fault, "200 whole", 2) if fault == "503" else (fault, fault, 1)
    if is_before:
        if fault == "hang":  # a long prefill is not a dead worker
            return "504", "504", 1
        if fault == "garbage":  # before a request was sent, nothing can have been computed
            return None if phase == "before connect" else ("502", "502", 1)
        return "502", "200 whole", 2
    if not is_stream:  # the client has got nothing, but the worker has done its work
        status = "504" if fault == "hang" else "502"
        return status, status, 1
    if phase == "at end":  # whatever follows the end marker is no loss
        return "200 whole", "200 whole", 1
    return "200 error event", "200 error event", 1


def _script(cell: Cell) -> Script:
    """Return what the worker does: its answer, cut where the phase says."""
    whole, begin, pieces = _STREAM, _STREAM_HEAD, _EVENTS
    if not cell.is_stream:
        whole, begin, pieces = _JSON, _JSON_HEAD, _PARTS
    at = {
        "before connect": 0,
        "before head": 0,
        "before first byte": len(begin),
        "mid-stream": len(begin) + sum(len(chunk(piece)) for piece in pieces[:2]),
        "at end": len(whole) - len(LAST_CHUNK),
    }[cell.phase]
    match cell.fault:
        case "reset":
            # What was sent before is delivered first.
            return broken(whole, at, SLOW_S, End.RST)
        case "early close":
            return broken(whole, at, End.FIN)
        case "hang":
            return broken(whole, at, End.HANG)
        case "slow":
            return [
                step for i in range(0, len(whole), 200) for step in (SLOW_S, whole[i : i + 200])
            ]
        case "garbage":
            return broken(whole, at, SLOW_S, b"\x00garbage\r\n\r\n", End.HANG)
        case _:
            return answer(b'{"error":{"message":"engine"}}', int(cell.fault))


async def play(cell: Cell, front: Front) -> Outcome:
    """Play a cell, and make sure that nothing of it is left.

    Raises:
        AssertionError: If a request, task, connection or socket is left.
    """
    tasks, sockets = len(asyncio.all_tasks()), _num_files()
    alone, _ = await _outcome(cell, front, is_alone=True)
    beside, attempts = await _outcome(cell, front, is_alone=False)
    await poll_until(lambda: len(asyncio.all_tasks()) <= tasks, what="no task is left")
    await poll_until(lambda: _num_files() <= sockets, what="no socket is left")
    return Outcome(alone, beside, attempts)


async def _outcome(cell: Cell, front: Front, *, is_alone: bool) -> tuple[str, int]:
    """What a client sees, and after how many attempts."""
    async with RawEngine(_well) as one, RawEngine(_well) as two:
        urls = [one.url] if is_alone else [one.url, two.url]
        if cell.fault == "refused":
            urls[0] = f"http://127.0.0.1:{free_port()}"
        elif cell.phase == "before connect":
            two.accepts = one.accepts
            one.accepts.append([SLOW_S] if cell.fault == "slow" else _script(cell)[1:-1])
        else:
            two.scripts = one.scripts
            one.scripts.append(_script(cell))
        async with gateway(*urls, limits=_limits(cell), front=front) as gw:
            # Who refuses is asked within a few requests that are at home in different places.
            for i in range(8):
                outcome = await _ask(gw, str(i), is_stream=cell.is_stream)
                record = await gw.record()
                if cell.fault != "refused" or record.attempts > 1 or is_alone:
                    break
            assert gw.num_in_flight == 0
            await poll_until(lambda: _num_busy(gw) == 0, what="no connection is busy")
    return outcome, record.attempts


async def _ask(gw: Gateway, text: str, *, is_stream: bool) -> str:
    try:
        async with asyncio.timeout(NEVER_S):
            status, body, _ = await gw.post(body=chat(text, stream=is_stream))
    except aiohttp.ClientError:
        return "broken off"
    if status != 200:
        assert json.loads(body)["error"]["message"]
        return str(status)
    if is_stream and b'data: {"error"' in body:
        return "200 error event"
    is_whole = body.endswith(DONE) if is_stream else bool(json.loads(body)["choices"])
    return "200 whole" if is_whole else "200 cut off"


def _limits(cell: Cell) -> Limits:
    hangs = cell.fault == "hang"
    is_begun = cell.phase not in ("before connect", "before head")
    return Limits(
        first_byte_s=FIRST_BYTE_S if hangs and not is_begun else NEVER_S,
        request_s=REQUEST_S if hangs and is_begun else NEVER_S,
    )


def _well(seen: Seen) -> Script:
    return [_STREAM if seen.json().get("stream") else _JSON]


def _num_busy(gw: Gateway) -> int:
    upstreams = [w.upstream for pool in gw.pools for w in pool.workers.values()]
    return sum(each.num_connections - each.num_idle for each in upstreams if each is not None)


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))

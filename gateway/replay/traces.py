"""Read request traces: Mooncake's, the compact format of our trace data, and our decision log.

A file holds one format, found out from its first line. Whatever cannot be meant is refused with
file and line: a replay of half a trace would look like a result.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from gateway.replay.engine import BLOCK_TOKENS
from prefix_index.blocks import BlockHash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_GZIP_MAGIC = b"\x1f\x8b"
# What a request whose completion length nobody reported is taken to produce, when no line of the
# log says one: the allowance that routing itself starts with.
DEFAULT_OUTPUT_TOKENS = 200
# Attempts that ended so were sent again elsewhere, as a line of their own.
_RETRIED = frozenset({"connect_failed", "upstream_reset", "upstream_error"})

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """A trace cannot be replayed; the message names file, line and what was expected."""


@dataclass(slots=True)
class Request:
    """One request of a trace.

    Attributes:
        row: Its place in the trace, from 0.
        line: Its line in the file, from 1.
        arrival_s: When it comes, from the trace's start; not read if it has a parent.
        prompt_tokens: Prompt length.
        output_tokens: Completion length.
        session: Who asks: equal for requests of one session.
        blocks: Hashes of the prompt's full blocks; equal hash = equal prefix.
        parent: Row after whose end it comes, ``think_s`` later; None = it comes at ``arrival_s``.
        think_s: Seconds between.
    """

    row: int
    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session: int
    blocks: list[BlockHash]
    parent: int | None = None
    think_s: float = 0.0


@dataclass(slots=True)
class Trace:
    """A trace as read.

    Attributes:
        name: File name without its ending.
        format: Which format it was in.
        requests: Its rows, in file order; those of a decision log in order of arrival.
        block_tokens: Tokens per block.
        notes: What was assumed or left out.
    """

    name: str
    format: Literal["mooncake", "compact", "decisions"]
    requests: list[Request]
    block_tokens: int
    notes: list[str]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Positive
    output_length: Natural
    hash_ids: list[Natural]


# [t_ms, prompt tokens, output tokens, session, parent row, think_ms, class, [start, length, ...]]
_CompactRow = tuple[
    Seconds,
    Positive,
    Natural,
    int,
    Annotated[int, msgspec.Meta(ge=-1)],
    Seconds,
    int,
    list[Natural],
]


class _DecisionRow(msgspec.Struct):
    """The part of a decision line that describes the traffic."""

    v: Literal[1]
    t_unix_s: Seconds
    pool: str
    session: str
    block_grain_tokens: Positive
    blocks: list[str]
    prompt_tokens: Positive
    output_tokens: Natural | None
    outcome: str


def read_trace(path: str, *, pool: str | None = None) -> Trace:
    """Read a trace file, plain or gzipped.

    Args:
        path: The file.
        pool: Which pool's lines of a decision log to take; None = the only one there is.

    Raises:
        TraceError: If it cannot be read, or a line is broken or of another format.
    """
    lines = list(lines_of(path))
    if not lines:
        raise TraceError(f"{path}: expected one request a line; the file is empty")
    name = Path(path).name.split(".")[0]
    first = _json(path, *lines[0])
    if isinstance(first, list):
        return Trace(name, "compact", _compact(path, lines), BLOCK_TOKENS, [])
    if isinstance(first, dict) and "hash_ids" in first:
        return Trace(name, "mooncake", _mooncake(path, lines), BLOCK_TOKENS, [])
    if isinstance(first, dict) and "rotation" in first:
        return _decisions(path, name, lines, pool)
    raise TraceError(
        f"{path}:{lines[0][0]}: expected a Mooncake row (timestamp, input_length, output_length, "
        "hash_ids), a compact row (a list of 8 values) or a line of a decision log"
    )


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines that are not blank, of a plain or gzipped file.

    Raises:
        TraceError: If it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _json(path: str, number: int, line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{number}: expected JSON: {error}") from error


def _row(path: str, number: int, decode: Callable[[bytes], Any], line: bytes, kind: str) -> Any:
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise TraceError(
            f"{path}:{number}: expected a {kind} row like the first: {error}"
        ) from error


def _compact(path: str, lines: Sequence[tuple[int, bytes]]) -> list[Request]:
    decode = msgspec.json.Decoder(_CompactRow).decode
    hashes = _Hashes()
    requests: list[Request] = []
    for number, line in lines:
        at_ms, prompt, output, session, parent, think_ms, _, runs = _row(
            path, number, decode, line, "compact"
        )
        row = len(requests)
        if parent >= row:
            raise TraceError(
                f"{path}:{number}: the parent row must be -1 or an earlier row (0 to {row - 1}), "
                f"not {parent}"
            )
        if len(runs) % 2:
            raise TraceError(f"{path}:{number}: block runs come in pairs of start and length")
        blocks: list[BlockHash] = []
        for start, length in zip(runs[::2], runs[1::2], strict=True):
            blocks += hashes.run(start, length)
        _check_blocks(path, number, prompt, len(blocks), extra=0)
        requests.append(
            Request(
                *(row, number, at_ms / 1e3, prompt, output, session, blocks),
                parent=None if parent < 0 else parent,
                think_s=think_ms / 1e3,
            )
        )
    return requests


def _mooncake(path: str, lines: Sequence[tuple[int, bytes]]) -> list[Request]:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    hashes = _Hashes()
    sessions = _Sessions()
    requests: list[Request] = []
    for number, line in lines:
        row = _row(path, number, decode, line, "Mooncake")
        # The last id names the partial block at the end, which no cache keeps.
        num_full = row.input_length // BLOCK_TOKENS
        _check_blocks(path, number, row.input_length, len(row.hash_ids), extra=1)
        blocks = [hashes.of(i) for i in row.hash_ids[:num_full]]
        if requests and row.timestamp / 1e3 < requests[-1].arrival_s:
            raise TraceError(f"{path}:{number}: timestamps must not go back")
        requests.append(
            Request(
                *(len(requests), number, row.timestamp / 1e3, row.input_length),
                *(row.output_length, sessions.of(blocks), blocks),
            )
        )
    _spread(requests)
    return requests


def _decisions(path: str, name: str, lines: Sequence[tuple[int, bytes]], pool: str | None) -> Trace:
    decode = msgspec.json.Decoder(_DecisionRow).decode
    rows = [(n, _row(path, n, decode, line, "decision log")) for n, line in lines]
    pools = sorted({row.pool for _, row in rows})
    if pool is None and len(pools) > 1:
        raise TraceError(f"{path}: has lines of the pools {', '.join(pools)}: say which (--pool)")
    if pool is not None and pool not in pools:
        raise TraceError(f"{path}: has no line of pool {pool!r}, only of {', '.join(pools)}")
    rows = [(n, row) for n, row in rows if pool in (None, row.pool)]
    kept = [(n, row) for n, row in rows if row.outcome not in _RETRIED]
    if not kept:
        raise TraceError(f"{path}: every attempt failed, there is no traffic to replay")
    grain = kept[0][1].block_grain_tokens
    known = [row.output_tokens for _, row in kept if row.output_tokens is not None]
    output = round(sum(known) / len(known)) if known else DEFAULT_OUTPUT_TOKENS
    notes = []
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} failed attempts left out: they were sent again")
    if len(known) < len(kept):
        notes.append(f"{len(kept) - len(known)} completions of unknown length taken as {output}")
    kept.sort(key=lambda item: item[1].t_unix_s)
    start_s = kept[0][1].t_unix_s
    requests: list[Request] = []
    for number, row in kept:
        if row.block_grain_tokens != grain:
            raise TraceError(
                f"{path}:{number}: blocks of {row.block_grain_tokens} tokens, others of {grain}"
            )
        requests.append(
            Request(
                *(len(requests), number, row.t_unix_s - start_s, row.prompt_tokens),
                output if row.output_tokens is None else row.output_tokens,
                _hex_number(path, number, row.session),
                _hex_blocks(path, number, row.blocks[: row.prompt_tokens // grain]),
            )
        )
    return Trace(name, "decisions", requests, grain, notes)


def _check_blocks(path: str, number: int, tokens: int, count: int, *, extra: int) -> None:
    full = tokens // BLOCK_TOKENS
    most = full if tokens % BLOCK_TOKENS == 0 else full + extra
    if not full <= count <= most:
        expected = str(full) if full == most else f"{full} or {most}"
        raise TraceError(
            f"{path}:{number}: a prompt of {tokens} tokens has {expected} blocks of "
            f"{BLOCK_TOKENS}, not {count}"
        )


def _hex_number(path: str, number: int, text: str) -> int:
    try:
        return int(text, 16)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: session: expected a hash in hex") from error


def _hex_blocks(path: str, number: int, blocks: Sequence[str]) -> list[BlockHash]:
    try:
        return [bytes.fromhex(block) for block in blocks]
    except ValueError as error:
        raise TraceError(f"{path}:{number}: blocks: expected hashes in hex") from error


def _spread(requests: Sequence[Request]) -> None:
    """Spread rows with one timestamp evenly up to the next: public traces round to 3 s."""
    starts = [i for i, r in enumerate(requests) if not i or requests[i - 1].arrival_s < r.arrival_s]
    for start, end in pairwise(starts):
        at_s, step_s = requests[start].arrival_s, requests[end].arrival_s
        step_s = (step_s - at_s) / (end - start)
        for i in range(start, end):
            requests[i].arrival_s = at_s + (i - start) * step_s


class _Hashes:
    """Block number -> its 16 bytes, one object for all uses: comparing them is comparing ids."""

    def __init__(self) -> None:
        self._known: dict[int, BlockHash] = {}

    def of(self, number: int) -> BlockHash:
        block = self._known.get(number)
        if block is None:
            block = self._known[number] = number.to_bytes(16, "big")
        return block

    def run(self, start: int, length: int) -> list[BlockHash]:
        return [self.of(number) for number in range(start, start + length)]


class _Sessions:
    """Whose prompt it is, by the last blocks it shares; the first block is everybody's template."""

    def __init__(self) -> None:
        self._owner: dict[BlockHash, int] = {}
        self._num_sessions = 0

    def of(self, blocks: Sequence[BlockHash]) -> int:
        owner = self._owner
        own = blocks[1:]
        session = next((owner[block] for block in reversed(own) if block in owner), None)
        if session is None:
            session = self._num_sessions
            self._num_sessions += 1
        for block in own:
            owner[block] = session
        return session

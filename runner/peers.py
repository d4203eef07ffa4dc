"""Handing KV blocks to other runners: ``POST /kv/blocks``.

The asking runner names its namespace and the keys it wants, first block first; the answer is the
leading blocks of them that are held here, each as it travels (``runner/tiers/record.py``). Blocks
are read under a loan of the engine's, so computing goes on, and bytes that were copied when the
loan was over are never sent. Keys are 256-bit hashes over a whole prompt and its salt: who can name
one has the prompt. Off unless ``--serve-peers`` is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from runner.errors import ApiError
from runner.fields import Fields, parse_object
from runner.responses import service_of
from runner.tiers.record import KEY_BYTES, encode_head, head_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from runner.kvkeys import KvKey
    from runner.leases import Loan, LoanedBlock
    from runner.tiers.peer import PeerStore

# Pulls answered at once; each takes a thread now and then and holds some megabytes. The asking
# side computes instead, which is what a runner that busy would advise.
MAX_PULLS = 4
# A prompt of 131,072 tokens in blocks of 16.
MAX_KEYS = 8192
# A pull takes as long as the asking runner wants to wait, but no lease longer: pinned blocks are
# room that requests here may need.
MAX_LOAN_S = 10.0
# Copied in one go of a thread: a hop costs as much as copying 500 KiB.
BATCH_BYTES = 2 * 1024 * 1024
# A pull's body is a megabyte at most.
BODY_S = 5.0
RETRY_AFTER_S = 1


class Lender(Protocol):
    """The engine, as far as peers are concerned; from any thread."""

    def lend(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> Future[Loan]:
        """Pin and return the leading blocks that are held, until the deadline at most."""
        ...

    def give_back(self, owner: str) -> None:
        """End an owner's loan."""
        ...


class BlockServer:
    """Answers pulls; used from one event loop.

    Attributes:
        served_blocks: Blocks sent, and their bytes likewise.
        served_bytes: Bytes of blocks sent.
        refused: Pulls turned away since enough others were under way.
        cut_short: Pulls ended before all was sent: the reader too slow or gone, the loan over, a
            block damaged.
    """

    def __init__(
        self,
        lender: Lender,
        *,
        namespace: KvKey,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve the blocks of one engine.

        Args:
            lender: Has the blocks.
            namespace: Of its KV; peers of another one are refused.
            block_bytes: Bytes of a block.
            clock: Of the loans' deadlines.
        """
        self.served_blocks = self.served_bytes = self.refused = self.cut_short = 0
        self._lender = lender
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._clock = clock
        self._num_pulls = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one pull.

        Raises:
            ApiError: 400 for a body that is no pull, 409 for another namespace, 503 while too many
                others are under way or the engine stops.
        """
        keys, wait_s = self._read(parse_object(await _body(request)))
        if self._num_pulls >= MAX_PULLS:
            self.refused += 1
            raise _busy(f"{MAX_PULLS} pulls are under way")
        self._num_pulls += 1
        owner = f"peer-{uuid.uuid4().hex}"
        try:
            loan = await self._borrow(keys, owner, self._clock() + min(wait_s, MAX_LOAN_S))
            return await self._send(request, loan)
        finally:
            self._num_pulls -= 1
            self._lender.give_back(owner)

    def _read(self, body: dict[str, Any]) -> tuple[list[KvKey], float]:
        fields = Fields(body)
        if fields.string("namespace", None) != self._namespace.hex():
            raise ApiError(
                409,
                "this runner's KV is of another model, precision or layout",
                param="namespace",
                code="other_namespace",
            )
        keys = [_key(text) for text in _listed(body.get("keys"))]
        if not keys or None in keys:
            expected = f"a list of 1 to {MAX_KEYS} keys of {2 * KEY_BYTES} hex digits"
            raise fields.refuse("keys", expected)
        wait_s = fields.number("deadline_s", MAX_LOAN_S, low=0.0)
        return [key for key in keys if key is not None], wait_s

    async def _borrow(self, keys: list[KvKey], owner: str, deadline_s: float) -> Loan:
        lent = asyncio.wrap_future(self._lender.lend(keys, owner, deadline_s))
        # Not cancelled at the deadline: the engine may be about to answer it.
        await asyncio.wait({lent}, timeout=max(0.0, deadline_s - self._clock()))
        if not lent.done():
            raise _busy("the engine did not lend in time")
        if (error := lent.exception()) is not None:
            raise _busy("the engine is stopping") from error
        return lent.result()

    async def _send(self, request: web.Request, loan: Loan) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        response.content_length = sum(self._record_bytes(block) for block in loan.blocks)
        num_sent, is_damaged = 0, False
        try:
            async with asyncio.timeout(max(0.0, loan.deadline_s - self._clock())):
                await response.prepare(request)
                for batch in self._batches(loan.blocks):
                    records, num_sound = await asyncio.to_thread(self._copy, batch)
                    if self._clock() >= loan.deadline_s:
                        break  # what was copied may be another block's by now
                    await response.write(records)
                    num_sent += num_sound
                    if is_damaged := num_sound < len(batch):
                        break
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._end(request, response, num_sent, len(loan.blocks), is_damaged)
        return response

    def _end(
        self,
        request: web.Request,
        response: web.StreamResponse,
        num_sent: int,
        num_lent: int,
        is_damaged: bool,
    ) -> None:
        """Count, and let the reader see whether it got all."""
        self.served_blocks += num_sent
        self.served_bytes += num_sent * self._block_bytes
        if num_sent == num_lent:
            return
        self.cut_short += 1
        # A short body, not a clean end.
        if is_damaged:
            response.force_close()  # in order: what was sound before it still arrives
        elif request.transport is not None:
            request.transport.abort()

    def _batches(self, blocks: Sequence[LoanedBlock]) -> Iterator[Sequence[LoanedBlock]]:
        size = max(1, BATCH_BYTES // self._block_bytes)
        for start in range(0, len(blocks), size):
            yield blocks[start : start + size]

    def _copy(self, blocks: Sequence[LoanedBlock]) -> tuple[memoryview, int]:
        """Return the records of the leading sound blocks and their number; runs in a thread."""
        records = bytearray(sum(self._record_bytes(block) for block in blocks))
        start = 0
        for at, block in enumerate(blocks):
            end = start + self._record_bytes(block)
            payload = memoryview(records)[end - self._block_bytes : end]
            if not block.read_into(payload):
                return memoryview(records)[:start], at
            head = encode_head(self._namespace, block.record, payload)
            records[start : start + len(head)] = head
            start = end
        return memoryview(records), len(blocks)

    def _record_bytes(self, block: LoanedBlock) -> int:
        return head_bytes(len(block.record.tokens)) + self._block_bytes


async def kv_blocks(request: web.Request) -> web.StreamResponse:
    """Handle ``POST /kv/blocks``.

    Raises:
        ApiError: 403 where blocks are not served; else as ``BlockServer.serve``.
    """
    server = service_of(request).peers
    if server is None:
        raise ApiError(
            403, "this runner does not serve its KV (--serve-peers)", code="peers_not_served"
        )
    return await server.serve(request)


def peers_document(server: BlockServer | None, puller: PeerStore | None) -> dict[str, Any]:
    """Return what ``GET /cache`` says about peers: whether they are served, and what was pulled.

    Args:
        server: None where blocks are not served.
        puller: None where no peer may be asked.
    """
    figures = {} if puller is None else puller.figures()
    pulls = {
        url: {
            "blocks": pulled.blocks,
            "bytes": pulled.bytes,
            "tokens": pulled.tokens,
            "seconds": pulled.seconds,
            "failed": pulled.failed,
        }
        for url, pulled in figures.items()
    }
    return {"serves": server is not None, "pulls": pulls}


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive in {BODY_S:g} s", code="timeout") from error


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) and len(value) <= MAX_KEYS else []


def _key(text: object) -> KvKey | None:
    if not isinstance(text, str) or len(text) != 2 * KEY_BYTES:
        return None
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(text)
        return key if len(key) == KEY_BYTES else None  # blanks are skipped
    return None


def _busy(message: str) -> ApiError:
    return ApiError(503, message, code="busy", retry_after_s=RETRY_AFTER_S)

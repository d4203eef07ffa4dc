"""The decision log: one JSON line per finished attempt, with ids and hashes only.

A line carries the whole input of its decision, so ``choose()`` takes it again from the line alone,
and enough of the request (when, how long, which blocks) to replay the traffic. It never carries
text, header values or raw keys. Lines are in the order in which attempts ended; ``t_unix_s`` says
when each was decided.

Lines are encoded and written by one thread. What it does not keep up with is dropped and counted: a
slow or full disk costs lines, never a request.
"""

from __future__ import annotations

import threading
import time
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec

from gateway.telemetry.append_file import AppendFile

VERSION: Literal[1] = 1
# Tokens between two block hashes of a line, where the block size divides it.
GRAIN_TOKENS = 512
# Nobody who watches the file notices; thousands of lines share one write.
FLUSH_S = 0.2
# Candidates of all waiting lines, about 0.7 KB each as objects: 45 MB, 4,096 lines of 16 workers.
MAX_WAITING_CANDIDATES = 65_536
# How long stopping waits for the disk.
CLOSE_S = 5.0

_encoder = msgspec.json.Encoder()


class DecisionLine(msgspec.Struct, kw_only=True):
    """One finished attempt.

    Attributes:
        v: Version of this format.
        t_unix_s: When it was decided, seconds since 1970.
        pool: Pool.
        model: Model name the client asked for.
        session: Hash of the affinity key, in hex: equal for requests of one session, document or
            prefix.
        block_grain_tokens: Tokens between two of ``blocks``: 512, or the nearest number of whole
            blocks.
        blocks: Chained hash of each block that ends a grain, from the prompt's start on, in hex.
        prompt_tokens: Prompt length that was decided with; estimated for prompts not read in time.
        output_tokens: Completion tokens; None if the worker did not say.
        rotation: Tie breaker of the decision.
        input: What was decided from: a ``RouteInput``, as plain values once read from a file.
        worker: Where it went.
        reason: Why.
        source: Where the hit tokens were to come from.
        hit_tokens: Prompt tokens expected to be cached there.
        predicted_ttft_s: Expected TTFT; None while the worker's speed is unknown.
        observed_ttft_s: Observed TTFT; None without a first token, or if not streamed.
        observed_hit_tokens: Cached tokens that the worker reported; None if it did not.
        outcome: How the attempt ended.
    """

    t_unix_s: float
    pool: str
    model: str
    session: str
    blocks: list[str]
    prompt_tokens: int
    rotation: int
    input: Any
    worker: str
    reason: str
    source: str
    hit_tokens: int
    outcome: str
    v: Literal[1] = VERSION
    block_grain_tokens: int = GRAIN_TOKENS
    output_tokens: int | None = None
    predicted_ttft_s: float | None = None
    observed_ttft_s: float | None = None
    observed_hit_tokens: int | None = None

    def to_json(self) -> bytes:
        """Return the line, without its line end."""
        return _encoder.encode(self)

    @staticmethod
    def from_json(data: bytes) -> DecisionLine:
        """Read a line; ``choose(msgspec.convert(it.input, RouteInput), rotation=it.rotation)``.

        Raises:
            ValueError: If it is no line of this version; the message says where it differs.
        """
        try:
            return msgspec.json.decode(data, type=DecisionLine)
        except msgspec.DecodeError as error:  # of JSON, of UTF-8 or of types
            raise ValueError(f"expected a decision line of version {VERSION}: {error}") from error


def hashed_key(ring_key: str, secret: bytes = b"") -> str:
    """Return what stands for an affinity key where raw keys may not: 16 hex digits.

    Args:
        ring_key: The key with its tenant.
        secret: Keeps short keys (user numbers) from being found by trying; the same on all
            gateways, or their lines do not match. At most 64 bytes count.
    """
    raw = ring_key.encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=8, key=secret[:64]).hexdigest()


class DecisionLog:
    """Appends lines to a file behind the requests; ``add`` is for one event loop only.

    Several processes may write to one file. A file that was moved away (log rotation) is left, and
    one of the configured name begun.

    Args:
        path: File to append to; created if it is not there.
        max_waiting: Candidates in waiting lines beyond which lines are dropped.

    Attributes:
        dropped: Lines that came while too many waited.

    Raises:
        OSError: If the file cannot be opened for appending.
    """

    def __init__(self, path: str, *, max_waiting: int = MAX_WAITING_CANDIDATES) -> None:
        self.dropped = 0
        self._file = AppendFile(path)
        self._max_waiting = max_waiting
        self._queue: SimpleQueue[tuple[DecisionLine, int] | None] = SimpleQueue()
        # Counted by one side each, so that neither needs a lock: ``add`` and the thread.
        self._added = 0
        self._taken = 0
        self._closing = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def written(self) -> int:
        """Lines written."""
        return self._file.written

    @property
    def failed(self) -> int:
        """Lines that the disk did not take."""
        return self._file.failed

    def add(self, line: DecisionLine, num_candidates: int) -> None:
        """Take a line; it must not change any more. Never raises and never waits.

        Args:
            line: The line.
            num_candidates: Candidates in its input, by which what waits is bounded.
        """
        if self._added - self._taken + num_candidates > self._max_waiting:
            self.dropped += 1
            return
        self._added += num_candidates
        self._queue.put((line, num_candidates))

    def close(self) -> None:
        """Write what waits and stop; blocks for at most ``CLOSE_S``. Nothing is added after it."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            first = self._queue.get()
            if first is None:
                return
            self._closing.wait(FLUSH_S)
            lines = [self._encode(*first)]
            try:
                while (entry := self._queue.get_nowait()) is not None:
                    lines.append(self._encode(*entry))
                is_over = True
            except Empty:
                pass
            self._file.write([line for line in lines if line])

    def _encode(self, line: DecisionLine, num_candidates: int) -> bytes:
        self._taken += num_candidates
        try:
            data = line.to_json()
        except (msgspec.MsgspecError, TypeError, ValueError):
            # Text that is no UTF-8; such a line has no JSON.
            self._file.failed += 1
            return b""
        # Lets the event loop have the interpreter between two lines.
        time.sleep(0)
        return data

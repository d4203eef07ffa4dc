"""When the next piece of a warm-up may go to a worker that has users, and how large it may be.

Users come first: nothing is sent while one of them waits, and while there are any, pieces go one
at a time and take their share of the worker's time and no more. A piece that is being computed
cannot be called back, so pieces are short.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.routing.cost import prefill_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.fleet.fleet import Fleet
    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.pool import Pool, Worker
    from gateway.warm.sending import Sender

# A user that comes while a piece is computed waits for the rest of it: beside users a step of the
# engine, as for any other user, and no more than this, so that no stream stutters; on a worker that
# has none a second.
BUSY_PIECE_S = 0.03
IDLE_PIECE_S = 1.0
# Shorter pieces cost more than they spare: on a CPU, 2,000 tokens in pieces of 1,024 take 1.04
# times what they take at once, in pieces of 256 1.4 times and of 128 1.6 times. Where there are no
# users that counts; 1,024 tokens are less than many a user's own prompt.
MIN_BUSY_TOKENS = 128
MIN_IDLE_TOKENS = 1024
# Likewise while the worker's speed is unknown.
BUSY_PIECE_TOKENS = 256
IDLE_PIECE_TOKENS = 2048
# A worker has users as long as one of them may still be reading the last answer.
RECENT_S = 20.0
# Requests that the engine itself queues, as its metrics say: others' traffic that passes us by.
MAX_ENGINE_QUEUE = 4
LOOK_S = 0.02
# Under users that never pause, one piece goes after so long, or nothing would ever be warm.
MAX_PAUSE_S = 10.0


class Manners:
    """Politeness towards one worker, of all that one run sends there; event loop only.

    Args:
        dispatcher: Its gate says who waits.
        fleet: Knows what the worker's metrics say.
        sender: Knows which requests are ours.
        pool: The worker's pool.
        worker: The worker.
        max_share: Share of its time that may be taken while it has users.
        yields: Whether users who wait for it come first. Those of a worker that is filled before
            it has its share of them would compute themselves what they have to wait for.
        user_seen_s: Worker id -> when a client's request ended there last; read and written.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        fleet: Fleet,
        sender: Sender,
        pool: Pool,
        worker: Worker,
        max_share: float,
        yields: bool,
        user_seen_s: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._gate = dispatcher.gate
        self._fleet = fleet
        self._sender = sender
        self._pool = pool
        self._worker = worker
        self._max_share = max_share
        self._yields = yields
        self._clock = clock
        self._user_seen_s = user_seen_s
        self._num_under_way = 0
        self._rests_until_s = float("-inf")

    def has_users(self) -> bool:
        """Whether clients' requests are there, or were a moment ago."""
        now_s = self._clock()
        num_ours = len(self._sender.in_flight.get(self._worker.id, ()))
        others = None if self._pool.others is None else self._pool.others.of(self._worker.id)
        num_others = 0 if others is None else others.in_flight
        if self._worker.books.in_flight + num_others > num_ours:
            self._user_seen_s[self._worker.id] = now_s
        return now_s - self._user_seen_s.get(self._worker.id, float("-inf")) < RECENT_S

    def is_waited_for(self) -> bool:
        """Whether a client waits for this worker, here, elsewhere or in its own queue."""
        ours = self._sender.in_flight.get(self._worker.id, ())
        our_tokens = sum(ticket.decision.estimate().uncached_tokens for ticket in ours)
        others = None if self._pool.others is None else self._pool.others.of(self._worker.id)
        queued = self._worker.books.queued_tokens + (0 if others is None else others.queued_tokens)
        watch = self._fleet.watches.get(self._worker.id)
        waiting = None if watch is None else watch.scrape.waiting
        return (
            self._pool.name in self._gate.lines
            or queued > our_tokens
            or (waiting or 0) - len(ours) > MAX_ENGINE_QUEUE
        )

    @asynccontextmanager
    async def turn(self, is_over: Callable[[], bool]) -> AsyncIterator[None]:
        """Have a turn to send a piece in; the time inside it counts as the worker's.

        It comes when no user waits and, beside users, when no other piece is under way and the
        worker has been left to them long enough; after ``MAX_PAUSE_S`` at the latest, and at once
        when ``is_over``.
        """
        await self._wait(self._must_wait, is_over)
        began_s = self._clock()
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._rest(began_s)

    async def users_first(self, is_over: Callable[[], bool]) -> None:
        """Wait until no user waits; for probes, whose one token goes along with other work."""
        await self._wait(self._yields_now, is_over)

    def _yields_now(self) -> bool:
        if not self._yields or not self.is_waited_for():
            return False
        self._user_seen_s[self._worker.id] = self._clock()
        return True

    def _must_wait(self) -> bool:
        if self._yields_now():
            return True
        if not self.has_users():
            return False
        is_taken = self._yields and self._num_under_way > 0
        return is_taken or self._clock() < self._rests_until_s

    async def _wait(self, must: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        until_s = self._clock() + MAX_PAUSE_S
        while must():
            if is_over() or self._clock() >= until_s:
                return
            await asyncio.sleep(LOOK_S)

    def _rest(self, began_s: float) -> None:
        """Leave the worker to its users for their share of the time after a piece."""
        now_s = self._clock()
        rest_s = (now_s - began_s) * (1.0 / self._max_share - 1.0)
        # Pieces that were under way together are paid for one after the other.
        self._rests_until_s = max(now_s, self._rests_until_s) + rest_s

    def piece_tokens(self, done_tokens: int, all_tokens: int) -> int:
        """Return up to which token to send next.

        Args:
            done_tokens: Tokens that are there already.
            all_tokens: The item's.
        """
        is_busy = self._yields and self.has_users()
        least = MIN_BUSY_TOKENS if is_busy else MIN_IDLE_TOKENS
        model = self._worker.learner.model
        if model is None:
            size = BUSY_PIECE_TOKENS if is_busy else IDLE_PIECE_TOKENS
        else:
            limit_s = min(BUSY_PIECE_S, model.step_s) if is_busy else IDLE_PIECE_S
            # What one more token costs here; later ones are a little dearer.
            per_token_s = prefill_s(model, 1, done_tokens + 1)
            size = int(limit_s / per_token_s) if per_token_s > 0.0 else all_tokens
        block_size = self._worker.block_size or self._pool.block_size
        size = max(least, block_size, size // block_size * block_size)
        end = done_tokens + size
        # A short rest goes along.
        return all_tokens if all_tokens - end < MIN_BUSY_TOKENS else end

"""Sends a manifest's items to the gateway in batches, and stays with each until it is settled.

What is warm is the gateway's knowledge and not a file's here: a run that was cut off is simply
started again, and what is held costs no prefill. Inside a run the book says what is still open
when a stream breaks; only that is sent again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from warmup.documents import Problem
from warmup.events import End
from warmup.gateway_client import AwayError, BodyRefusedError, RefusedError
from warmup.items import Item, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from random import Random

    from warmup.book import Book
    from warmup.gateway_client import Gateway
    from warmup.talk import Talk

Purpose = Literal["plan", "run", "verify"]
FIRST_WAIT_S = 0.5
# A gateway restarts in seconds: looking more rarely would waste what is left of the patience.
MAX_WAIT_S = 15.0

# So many single items refused, and none taken, is no matter of the items.
MAX_REFUSED = 8


class GaveUpError(Exception):
    """The gateway was away for longer than the operator wants to wait."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of the gateway for all items alike.

    Attributes:
        purpose: ``plan`` sends nothing to workers, ``verify`` only probes.
        model: Name clients ask for; None only for the gateway's own hot list.
        budget_tokens: Most tokens to compute; None for any number.
        concurrency: Documents at a time on each worker.
        max_share: Of the workers' prefill, beside live traffic.
        run_id: Begins the id of every request.
    """

    purpose: Purpose
    model: str | None
    run_id: str
    budget_tokens: int | None = None
    concurrency: int = 2
    max_share: float = 0.25


class Warming:
    """One run; used from one thread.

    Args:
        gateway: Does the work.
        ask: What is asked.
        book: Takes in what the gateway says; mutated.
        talk: Tells the operator.
        patience_s: How long the gateway may be away without anything becoming final.
        clock: Monotonic seconds.
        sleep: Waits for seconds.
        rng: Spreads the retries.

    Attributes:
        num_batches: Sent so far.
    """

    def __init__(
        self,
        gateway: Gateway,
        ask: Ask,
        book: Book,
        talk: Talk,
        *,
        patience_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        rng: Random,
    ) -> None:
        self._gateway = gateway
        self._ask = ask
        self._book = book
        self._talk = talk
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._rng = rng
        self._num_requests = 0
        self.num_batches = 0
        self._was_taken = False
        self._num_refused = 0

    @property
    def run_id(self) -> str:
        """The id of the latest request."""
        return f"{self._ask.run_id}-{self._num_requests}"

    def warm(self, found: Iterable[Item | Problem]) -> None:
        """Send all items, and note the problems among them.

        Raises:
            RefusedError: If the gateway refuses for good; what was not sent has no row's proof.
            GaveUpError: If it is away for too long.
        """
        for batch in batches(self._items(found)):
            self.num_batches += 1
            self._book.expect(item.id for item in batch)
            self._settle(batch)

    def warm_live(self, limit: int) -> None:
        """Let the gateway choose from its own hot list; errors as in :meth:`warm`."""
        fields = self._fields() | {"from_live": {"limit": limit}}
        self._until_answered(lambda: self._post(json.dumps(fields).encode(), expected=False))

    def _items(self, found: Iterable[Item | Problem]) -> Iterator[Item]:
        for item in found:
            if isinstance(item, Problem):
                self._book.problem(item)
                self._talk.problem(item)
            else:
                yield item

    def _settle(self, batch: list[Item]) -> None:
        """Have one batch settled, in parts if the gateway does not take it whole."""
        try:
            self._until_answered(lambda: self._send(batch))
        except BodyRefusedError as error:
            if len(batch) == 1:
                self._refused(batch[0], error)
                return
            middle = len(batch) // 2
            self._settle(batch[:middle])
            self._settle(batch[middle:])

    def _refused(self, item: Item, error: BodyRefusedError) -> None:
        """Blame one item, or the whole request after many if none was ever taken."""
        reason = str(error)
        self._num_refused += 1
        if self._num_refused >= MAX_REFUSED and not self._was_taken:
            raise RefusedError(reason) from error
        self._book.fail([item.id], reason)
        self._talk.problem(Problem(item.id, reason))

    def _send(self, batch: list[Item]) -> None:
        """Send what of a batch is still open, once."""
        waiting = set(self._unsettled(batch))
        items = [item for item in batch if item.id in waiting]
        if not items:
            return
        head = json.dumps(self._fields()).encode()
        self._post(head[:-1] + b', "items": [' + b", ".join(i.data for i in items) + b"]}")
        if left := self._unsettled(items):
            self._book.fail(left, "the gateway ended the run without a word about it")

    def _post(self, body: bytes, *, expected: bool = True) -> None:
        """Send one request and take in its events.

        Raises:
            AwayError: If there is no answer, or it breaks off.
        """
        with self._gateway.warm(body) as events:
            for event, line in events:
                self._was_taken = True
                self._book.apply(event, expected=expected)
                self._talk.event(event, line)
                if isinstance(event, End) and event.stopped:
                    raise AwayError(f"{self._gateway.base}: the gateway stopped the run")

    def _unsettled(self, items: list[Item]) -> list[str]:
        ids = [item.id for item in items]
        if self._ask.purpose == "plan":
            return self._book.unplanned(ids)
        return self._book.unsettled(ids)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the next request but for what is to be warmed."""
        self._num_requests += 1
        ask = self._ask
        budget = ask.budget_tokens if ask.purpose != "verify" else None
        if budget is not None:
            budget = max(0, budget - self._book.spent_tokens(ask.purpose))
        return {
            "run_id": self.run_id,
            "model": ask.model,
            "budget_tokens": budget,
            "concurrency": ask.concurrency,
            "max_share": ask.max_share,
            "dry_run": ask.purpose != "run",
            "verify": ask.purpose != "plan",
        }

    def _until_answered(self, send: Callable[[], None]) -> None:
        """Try until the gateway has answered to the end, while there is hope.

        Raises:
            RefusedError: If it refuses for good.
            GaveUpError: If nothing became final for longer than the patience.
        """
        away_since_s: float | None = None
        num_settled, num_tries = self._book.num_settled, 0
        while True:
            try:
                send()
                return
            except AwayError as error:
                now_s = self._clock()
                if away_since_s is None or self._book.num_settled > num_settled:
                    away_since_s, num_tries = now_s, 0
                num_settled = self._book.num_settled
                left_s = away_since_s + self._patience_s - now_s
                if left_s <= 0:
                    raise GaveUpError(f"{error}; given up after {self._patience_s:g} s") from error
                wait_s = min(self._wait_s(num_tries, error.retry_after_s), left_s)
                num_tries += 1
                self._talk.away(str(error), wait_s)
                self._sleep(wait_s)

    def _wait_s(self, num_tries: int, asked_s: float | None) -> float:
        longest_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0**num_tries)
        # Never sooner than asked, and never all at once.
        return max(asked_s or 0.0, self._rng.uniform(longest_s / 2, longest_s))

"""Routers that follow other routers' rules, on the same books and the same events as ours.

A rule (``rules.py``) is a function of what it sees of one request (``View``) that returns the tied
best workers, as positions among those that take requests; ties are drawn at random.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from gateway.replay.fleet import Placement
from gateway.replay.residency import NO_HIT, History, worker_id
from gateway.routing.books import Books, Charge
from gateway.routing.cost import prefill_s
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from gateway.replay.engine import Job
    from gateway.replay.fleet import Fleet
    from gateway.replay.shared_load import Hub
    from gateway.replay.traces import Request
    from gateway.routing.others import OthersLoad
    from prefix_index.index import Hit


class View:
    """What a rule may read about one request: lists have one value per worker that takes requests.

    Args:
        fleet: The fleet.
        request: The request.
        books: The gateway's own books.
        others: What the other gateways have.
        hits: Worker name -> matched tokens.
        rng: For rules that draw.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: Request,
        books: Mapping[str, Books],
        others: OthersLoad,
        hits: Mapping[str, Hit],
        rng: Random,
    ) -> None:
        self.fleet = fleet
        self.request = request
        self.rng = rng
        self.workers = fleet.routable
        self.books = [books[worker_id(w)] for w in self.workers]
        self.matched = [hits.get(worker_id(w), NO_HIT) for w in self.workers]
        self._others = [others.of(worker_id(w)) for w in self.workers]

    @cached_property
    def hits(self) -> list[int]:
        """Matched tokens in any tier."""
        return [hit.gpu + hit.cpu + hit.disk + hit.remote for hit in self.matched]

    @cached_property
    def in_flight(self) -> list[int]:
        """Requests in flight, own and others'."""
        return [
            b.in_flight + (o.in_flight if o else 0)
            for b, o in zip(self.books, self._others, strict=True)
        ]

    @cached_property
    def queued_tokens(self) -> list[int]:
        """Uncached tokens without a first token."""
        return [
            b.queued_tokens + (o.queued_tokens if o else 0)
            for b, o in zip(self.books, self._others, strict=True)
        ]

    @cached_property
    def queued_s(self) -> list[float]:
        """Their prefill seconds."""
        return [
            b.queued_s + (o.queued_s if o else 0.0)
            for b, o in zip(self.books, self._others, strict=True)
        ]

    @cached_property
    def active_tokens(self) -> list[int]:
        """KV demand of the requests in flight; others' without shared blocks."""
        return [
            b.active_tokens + (o.context_tokens if o else 0)
            for b, o in zip(self.books, self._others, strict=True)
        ]


class _Token(NamedTuple):
    """Where a request is booked."""

    books: Books
    charge: Charge


class PeerRouter:
    """One rule in one or several gateways.

    Args:
        fleet: The fleet.
        rule: The rule.
        hub: What the gateways tell each other.
        rng: Draws ties.
        sees: Where matched prefixes come from: ``events``, the gateway's own ``history``, or none.
        books_blocks: Whether the rule reads which blocks are active.

    Attributes:
        books: The books of each gateway by worker name.
    """

    def __init__(
        self,
        fleet: Fleet,
        rule: Callable[[View], list[int]],
        hub: Hub,
        rng: Random,
        *,
        sees: str = "",
        books_blocks: bool = False,
    ) -> None:
        self.wants_events = sees == "events"
        self._fleet = fleet
        self._rule = rule
        self._hub = hub
        self._rng = rng
        self._books_blocks = books_blocks
        num_gateways = len(hub.views)
        self.books: list[dict[str, Books]] = [{} for _ in range(num_gateways)]
        self._histories = [
            History(fleet.model.block_tokens)
            for _ in range(num_gateways if sees == "history" else 0)
        ]
        for worker in fleet.routable:
            self.up(worker, 0.0)

    def route(self, request: Request, gateway: int, now_s: float) -> Placement:
        """Choose by the rule and book the request."""
        fleet = self._fleet
        books = self.books[gateway]
        hits = self._hits(request, gateway, now_s)
        view = View(fleet, request, books, self._hub.views[gateway], hits, self._rng)
        tied = self._rule(view)
        at = tied[0] if len(tied) == 1 else self._rng.choice(tied)
        worker, hit = view.workers[at], view.matched[at]
        uncached = max(1, request.prompt_tokens - view.hits[at])
        book = books[worker_id(worker)]
        charge = book.charge(
            now_s,
            prompt_tokens=request.prompt_tokens,
            uncached_tokens=uncached,
            prefill_s=prefill_s(fleet.model.cost, uncached, request.prompt_tokens),
            hashes=request.blocks if self._books_blocks else (),
        )
        if self._histories:
            self._histories[gateway].routed(worker, request.blocks)
        predicted = hit.gpu + hit.cpu + hit.disk + hit.remote
        return Placement(worker, _Token(book, charge), predicted_hit_tokens=predicted)

    def _hits(self, request: Request, gateway: int, now_s: float) -> Mapping[str, Hit]:
        """Return what a gateway believes that the workers hold of a prompt."""
        if self._histories:
            return self._histories[gateway].index.match(request.blocks)
        if not self.wants_events:
            return {}
        events = self._fleet.events
        events.sync(now_s)
        num_usable = usable_blocks(request.prompt_tokens, self._fleet.model.block_tokens)
        blocks = request.blocks
        return events.index.match(blocks if len(blocks) <= num_usable else blocks[:num_usable])

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Note a first token."""
        books, charge = self._entry(placement)
        books.first_token(charge, now_s)

    def finished(self, placement: Placement, job: Job, now_s: float) -> None:
        """Note the end of a completion."""
        books, charge = self._entry(placement)
        books.finish(charge)

    def failed(self, placement: Placement, now_s: float) -> None:
        """Take a lost request out of the books."""
        books, charge = self._entry(placement)
        books.finish(charge)

    def pulled(self, placement: Placement, tokens: int, seconds: float) -> None:
        """No peer's rule asks for transfers."""

    def down(self, worker: int, now_s: float) -> None:
        """Forget what a worker held."""
        for history in self._histories:
            history.clear(worker)

    def up(self, worker: int, now_s: float) -> None:
        """Open books for a new worker."""
        for books in self.books:
            books.setdefault(worker_id(worker), Books(self._fleet.model.block_tokens))

    def draining(self, worker: int, now_s: float) -> None:
        """Nothing to do: the view has only workers that take requests."""

    def share(self, gateway: int, now_s: float) -> None:
        """Tell the others."""
        self._hub.say(gateway, self.books[gateway], now_s)

    def _entry(self, placement: Placement) -> _Token:
        assert isinstance(placement.token, _Token)
        return placement.token

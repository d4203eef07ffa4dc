"""What an operator wants warm: the body of ``POST /admin/v1/warm``, checked.

What is wrong with the whole is an error of the request. What is wrong with one item is that item's
refusal: the others are warmed all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.errors import BodyTooLarge, InvalidRequest
from gateway.warm.checks import count, is_flag, share, text

# As many documents as a plan is made for in two seconds; more belong in another run.
MAX_ITEMS = 10_000
# Names of documents and runs, as they stand in events.
MAX_NAME_CHARS = 256
# No fleet has more; a typing error is not to become a plan.
MAX_COPIES = 1024
# What one worker is asked for at a time: engines batch prefills, and queue what is more.
DEFAULT_CONCURRENCY = 2
MAX_CONCURRENCY = 64
# Three quarters of a worker's time for users while there are any: their p95 TTFT is 1.03 to 1.12
# times what it is alone, on engines of 25,000 to 1,250 tokens/s, and 1.2 times with half of it.
DEFAULT_MAX_SHARE = 0.25

Kind = Literal["document", "prefix"]
_KINDS = ("document", "prefix")
_RUN_FIELDS = frozenset(
    (
        *("model", "items", "budget_tokens", "concurrency", "max_share", "dry_run", "verify"),
        *("run_id", "from_live"),
    )
)
_ITEM_FIELDS = frozenset(
    (
        *("id", "version", "kind", "body", "marker", "token_ids", "copies", "pin", "priority"),
        *("tenant", "headers"),
    )
)


class Refused(Exception):
    """One item cannot be warmed; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class Item:
    """One document or prefix.

    Attributes:
        id: Its name, unique in a run.
        version: Of the document; another one takes the place of those before.
        kind: ``document`` (shared up to the question) or ``prefix`` (all of its tokens).
        model: Model, alias or adapter that requests will name.
        body: A request as clients will send it; empty where ``token_ids`` are given.
        marker: What stands in the body for the user's question; empty = nothing does.
        token_ids: The tokens themselves, for prefixes.
        copies: Workers that shall hold it.
        pin: Whether it may push out what is worth more.
        priority: Higher ones are placed and sent first.
        tenant: Whose it is; empty = nobody's.
        headers: Names in lower case: the affinity headers that its requests will carry.
        salt: Isolation key that the engine is given with the tenant's requests.
    """

    id: str
    version: str = ""
    kind: Kind = "document"
    model: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    marker: str = ""
    token_ids: tuple[int, ...] = ()
    copies: int = 1
    pin: bool = False
    priority: int = 0
    tenant: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    salt: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether its body is a chat's."""
        return "messages" in self.body


@dataclass(frozen=True, slots=True)
class Order:
    """One run as asked for.

    Attributes:
        items: Those that can be read.
        refused: Id and reason of the others.
        live_limit: Take so many of the gateway's own hot list instead; 0 = the items.
        budget_tokens: Most tokens to compute; None = no limit.
        concurrency: Requests at a time on each worker.
        max_share: Share of a worker's time that warm-up may take while it has users.
        dry_run: Only plan.
        verify: Prove it with a probe each.
        run_id: Names the run; empty = the gateway makes one up.
        yields: Whether it waits while users wait for a worker.
        model: Model of the run; of the hot list only what is of it is taken.
    """

    items: tuple[Item, ...]
    refused: tuple[tuple[str, str], ...] = ()
    live_limit: int = 0
    budget_tokens: int | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    max_share: float = DEFAULT_MAX_SHARE
    dry_run: bool = False
    verify: bool = True
    run_id: str = ""
    yields: bool = True
    model: str = ""


def read_order(document: object) -> Order:
    """Read the body of a warm request.

    Raises:
        InvalidRequest: If it is no order at all; what is wrong with one item is in ``refused``.
        BodyTooLarge: If it has too many items.
    """
    if not isinstance(document, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if unknown := sorted(set(document) - _RUN_FIELDS):
        raise InvalidRequest(
            f"Unknown field {unknown[0]!r}; expected {', '.join(sorted(_RUN_FIELDS))}.",
            param=unknown[0],
        )
    items, refused = _items(document)
    budget = document.get("budget_tokens")
    return Order(
        items,
        refused,
        live_limit=_live_limit(document),
        budget_tokens=None if budget is None else count(document, "budget_tokens", 0),
        concurrency=count(document, "concurrency", DEFAULT_CONCURRENCY, 1, MAX_CONCURRENCY),
        max_share=share(document, "max_share", DEFAULT_MAX_SHARE),
        dry_run=is_flag(document, "dry_run", default=False),
        verify=is_flag(document, "verify", default=True),
        run_id=text(document, "run_id", MAX_NAME_CHARS),
        model=text(document, "model", MAX_NAME_CHARS),
    )


def _live_limit(document: dict[str, Any]) -> int:
    live = document.get("from_live")
    if live is None:
        return 0
    if not isinstance(live, dict) or set(live) - {"limit"} or "items" in document:
        raise InvalidRequest(
            'Expected "from_live": {"limit": N} in place of items.', param="from_live"
        )
    return count(live, "limit", 100, 1, MAX_ITEMS)


def _items(document: dict[str, Any]) -> tuple[tuple[Item, ...], tuple[tuple[str, str], ...]]:
    if document.get("from_live") is not None:
        return (), ()
    given = document.get("items")
    if not isinstance(given, list):
        raise InvalidRequest("'items' is required and must be a list.", param="items")
    if len(given) > MAX_ITEMS:
        raise BodyTooLarge(
            f"{len(given)} items, expected at most {MAX_ITEMS} in one run; send them in several.",
            param="items",
            code="too_many_items",
        )
    model = text(document, "model", MAX_NAME_CHARS)
    items: dict[str, Item] = {}
    refused = []
    for number, raw in enumerate(given):
        name = f"items[{number}]"
        try:
            if isinstance(raw, dict) and isinstance(raw.get("id"), str) and raw["id"]:
                name = raw["id"][:MAX_NAME_CHARS]
            item = read_item(raw, model)
            if item.id in items:
                raise Refused("its id stands twice in this run; expected each once")
            items[item.id] = item
        except (Refused, InvalidRequest) as error:
            refused.append((name, str(error)))
    return tuple(items.values()), tuple(refused)


def read_item(raw: object, model: str) -> Item:
    """Read one item.

    Args:
        raw: As parsed.
        model: The run's model, for bodies that name none.

    Raises:
        Refused: If it is none; ``InvalidRequest`` likewise, for a field of the wrong type.
    """
    if not isinstance(raw, dict):
        raise Refused("expected an object with id and body")
    if unknown := sorted(set(raw) - _ITEM_FIELDS):
        raise Refused(f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_ITEM_FIELDS))}")
    name = text(raw, "id", MAX_NAME_CHARS)
    if not name:
        raise Refused("expected an id, a text that is not empty")
    kind = raw.get("kind", "document")
    if kind not in _KINDS:
        raise Refused(f"kind {kind!r}: expected document or prefix")
    body, ids = _content(raw, kind)
    copies = raw.get("copies")
    return Item(
        id=name,
        version=text(raw, "version", MAX_NAME_CHARS),
        kind=kind,
        model=str(body.get("model") or model),
        body=body,
        marker=text(raw, "marker", MAX_NAME_CHARS),
        token_ids=ids,
        copies=1 if copies is None else count(raw, "copies", 1, 1, MAX_COPIES),
        pin=is_flag(raw, "pin", default=False),
        priority=_priority(raw),
        tenant=text(raw, "tenant", MAX_NAME_CHARS),
        headers=_headers(raw, kind, name),
    )


def _content(raw: dict[str, Any], kind: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    body, ids = raw.get("body"), raw.get("token_ids")
    if ids is not None:
        if kind != "prefix" or body is not None:
            raise Refused("token_ids are for items of the kind prefix, in place of a body")
        if not isinstance(ids, list) or not ids or not all(map(_is_token, ids)):
            raise Refused("token_ids: expected a list of token ids, whole numbers from 0 on")
        return {}, tuple(ids)
    if not isinstance(body, dict):
        raise Refused("expected a body: a chat or completions request as clients will send it")
    if not isinstance(body.get("model", ""), str):
        raise Refused("body.model: expected a text")
    if isinstance(body.get("messages"), list) == isinstance(body.get("prompt"), str | list):
        raise Refused("body: expected either messages (a list) or a prompt")
    return body, ()


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _headers(raw: dict[str, Any], kind: Any, name: str) -> dict[str, str]:
    """Return the affinity headers of the requests to come; a document's own id if none are told."""
    given = raw.get("headers")
    if given is None:
        return {"x-document-id": name} if kind == "document" else {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise Refused("headers: expected an object of texts")
    return {key.lower(): value for key, value in given.items()}


def _priority(raw: dict[str, Any]) -> int:
    value = raw.get("priority", 0)
    if value is None:
        return 0
    if type(value) is not int or abs(value) > 1 << 31:
        raise Refused("priority: expected a whole number")
    return value

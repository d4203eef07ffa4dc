"""What is known about a request before a worker is chosen, and what comes to be known later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gateway.routing.affinity import AffinityKey, affinity_key
from gateway.routing.bodies import KnownBody
from gateway.routing.outcome import is_comparable

if TYPE_CHECKING:
    from gateway.routing.pool import Pool
    from gateway.routing.rollout import Rule
    from gateway.routing.routes import Route
    from prefix_index.blocks import BlockHash
    from prefix_index.draft import Prompt


Surface = Literal["chat", "completions", "text", "none"]


# Its constructor is written out, since one that a dataclass makes itself is not compiled.
@dataclass(slots=True, init=False)
class Inbound:
    """A client's request, as far as routing reads it.

    Attributes:
        surface: How its prompt is read: a chat's, a completion's, not at all but routed by its
            ``text`` (the body's ``prompt``), or ``none`` where no KV can be reused.
        body: Parsed body, as it will be forwarded.
        headers: Header names in lower case -> values.
        model: Model name the client asked for.
        tenant: Tenant name; empty when there are none.
        request_id: For logs and explain.
        known: The body with what was read of it before, if it is kept; not after a rewrite.
        salt: Cache salt with which it is forwarded: None = as in the body; empty = without the
            body's.
        deadline_s: When its client gives up (monotonic); None = not told.
        pinned: Worker that alone has what the request builds on; empty = any may serve it.
        is_fixed: Whether it goes on as it came, since ``body`` only stands for it.
    """

    surface: Surface
    body: dict[str, Any]
    headers: Mapping[str, str]
    model: str
    tenant: str
    request_id: str
    known: KnownBody | None
    salt: str | None
    deadline_s: float | None
    pinned: str
    is_fixed: bool

    def __init__(
        self,
        surface: Surface,
        body: dict[str, Any],
        headers: Mapping[str, str],
        model: str,
        tenant: str = "",
        request_id: str = "",
        known: KnownBody | None = None,
        salt: str | None = None,
        deadline_s: float | None = None,
        pinned: str = "",
        is_fixed: bool = False,
    ) -> None:
        self.surface = surface
        self.body = body
        self.headers = headers
        self.model = model
        self.tenant = tenant
        self.request_id = request_id
        self.known = known
        self.salt = salt
        self.deadline_s = deadline_s
        self.pinned = pinned
        self.is_fixed = is_fixed

    @property
    def cache_salt(self) -> str:
        """What keeps its blocks apart from equal ones, in the engine as here; empty = nothing."""
        if self.salt is not None:
            return self.salt
        salt = self.body.get("cache_salt")
        return salt if isinstance(salt, str) else ""


class Plan:
    """A request as read.

    Attributes:
        pool: Where it may go.
        inbound: The request.
        num_tokens: Prompt tokens, exact if ``prompt`` is there, else estimated.
        prompt: The prompt as the engine will see it; None when it could not be read, or not yet.
        hashes: Block hashes of the part that can be a hit, as far as they are known; None when the
            prompt could not be read.
        unread: Why the prompt could not be read; empty when it was, or still may be.
        text_chain: Chained hashes of the text of a prompt with much unknown text.
        is_behind: Whether the tokens are still on their way.
        attempts: How often it was admitted to a worker.
        adapter: LoRA adapter it runs on; empty = the base model.
        route: Configured route that sent it to this pool; None = none did.
        rule: What the routing rule would have done, where it was served by least load instead.
        queued: Whether it had to wait in the gateway for a worker.
        queued_s: How long it did.
    """

    __slots__ = (
        *("_is_comparable", "_key", "_on_settled", "adapter", "attempts", "hashes", "inbound"),
        *("is_behind", "num_tokens", "pool", "prompt", "queued", "queued_s", "route", "rule"),
        *("text_chain", "unread"),
    )

    def __init__(
        self,
        pool: Pool,
        inbound: Inbound,
        num_tokens: int,
        prompt: Prompt | None = None,
        hashes: Sequence[BlockHash] | None = None,
        *,
        unread: str = "",
        adapter: str = "",
    ) -> None:
        self.pool = pool
        self.inbound = inbound
        self.num_tokens = num_tokens
        self.prompt = prompt
        self.hashes = hashes
        self.unread = unread
        self.adapter = adapter
        self.text_chain: Sequence[bytes] = ()
        self.is_behind = False
        self.attempts = 0
        self.route: Route | None = None
        self.rule: Rule | None = None
        self.queued = False
        self.queued_s = 0.0
        self._key: AffinityKey | None = None
        self._is_comparable: bool | None = None
        self._on_settled: list[Callable[[], None]] | None = None

    @property
    def tokens(self) -> Literal["exact", "estimated"]:
        """Whether ``num_tokens`` is the engine's count."""
        return "estimated" if self.prompt is None else "exact"

    @property
    def is_comparable(self) -> bool:
        """Whether reported token counts are those of one prompt and one completion."""
        if self._is_comparable is None:
            self._is_comparable = is_comparable(self.inbound.body)
        return self._is_comparable

    @property
    def key(self) -> AffinityKey:
        """The request's affinity key; found when first asked for, since warm prompts need none."""
        if self._key is None:
            inbound = self.inbound
            self._key = affinity_key(
                inbound.body,
                inbound.headers,
                tenant=inbound.tenant,
                kinds=self.pool.affinity_keys,
            )
        return self._key

    @property
    def home(self) -> list[str]:
        """The key's home workers."""
        return self.pool.ring.home(self.key.ring_key, self.pool.set_size)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once the tokens are there, or will never be."""
        if self._on_settled is None:
            self._on_settled = []
        self._on_settled.append(call)

    def settle(self, prompt: Prompt | None, unread: str = "") -> None:
        """Take the tokens that came behind the request; None if they cannot be had."""
        self.is_behind = False
        if prompt is None:
            self.unread = unread
        else:
            self.take(prompt)
        for call in self._on_settled or ():
            call()
        self._on_settled = None

    def take(self, prompt: Prompt) -> None:
        """Write down the tokens."""
        self.prompt = prompt
        self.num_tokens = prompt.num_tokens
        self.hashes = prompt.usable_hashes

"""The tokens that requests about one document will share, found by reading two such requests.

The body is read twice by the pipeline that reads clients' requests, with two different questions in
place of the marker. What both prompts begin with is what any question shares; whole blocks of it
can be cached.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from gateway.proxy.rewrite import Rewrite
from gateway.routing.dispatch import Inbound
from gateway.routing.pool import Pool
from gateway.routing.segments import layout_reader
from gateway.warm.items import Item, Refused
from prefix_index.blocks import BlockHash
from prefix_index.segments import stable_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Dispatcher, Plan

# Two questions that part in their first character, of two kinds: tokenizers cut text between
# letters, digits and blanks, and may join the last character before with the first one of a kind.
QUESTIONS = ("What does it say?", "7 + 5")


@dataclass(frozen=True, slots=True)
class Shareable:
    """What can be warmed of an item.

    Attributes:
        item: The item.
        pool: Whose workers serve it.
        token_ids: Its shareable tokens and one more: engines keep a block of k tokens of a prompt
            that has k + 1.
        num_tokens: Shareable tokens, whole blocks of the pool.
        hashes: Their blocks.
        ring_key: Key by which its requests find their home.
        prompt_tokens: Length of the whole prompt with a short question.
        body: Request to send where token ids cannot be sent.
    """

    item: Item
    pool: Pool
    token_ids: array[int]
    num_tokens: int
    hashes: Sequence[BlockHash]
    ring_key: str
    prompt_tokens: int
    body: dict[str, Any]


class Finder:
    """Finds what items share; event loop only.

    Args:
        dispatcher: Reads prompts and knows the pools.
        rewriters: Pool name -> its canonicalisation: what is warmed is what will be sent.
    """

    def __init__(self, dispatcher: Dispatcher, rewriters: Mapping[str, Rewriter]) -> None:
        self._dispatcher = dispatcher
        self._rewriters = rewriters

    async def find(self, item: Item) -> Shareable:
        """Read an item.

        Raises:
            Refused: If it has nothing to share, or cannot be read.
        """
        if not item.model:
            raise Refused("expected a model, in the run or in the item's body")
        if self._dispatcher.pool_for(item.model) is None:
            known = sorted(
                {name for pool in self._dispatcher.pools.values() for name in pool.models}
            )
            raise Refused(f"no pool serves the model {item.model!r}; expected {', '.join(known)}")
        if item.token_ids:
            plan = await self._plan(item, {"prompt": list(item.token_ids)})
            return self._whole(item, plan)
        if not item.marker:
            plan = await self._plan(item, item.body)
            if item.kind == "prefix" or not item.is_chat:
                return self._whole(item, plan)
            return self._cut(item, plan, await _stable_tokens(plan))
        first, second = (fill(item.body, item.marker, question) for question in QUESTIONS)
        if first == item.body:
            raise Refused(
                f"the marker {item.marker!r} is not in the body; expected it in place of the "
                "user's question"
            )
        plan, other = await self._plan(item, first), await self._plan(item, second)
        return self._cut(item, plan, _common(plan, other))

    async def _plan(self, item: Item, body: Mapping[str, Any]) -> Plan:
        document = {**body, "model": item.model}
        if item.salt:
            document["cache_salt"] = item.salt
        inbound = Inbound(
            "chat" if "messages" in body else "completions",
            document,
            item.headers,
            item.model,
            tenant=item.tenant,
        )
        target = self._dispatcher.target(inbound)
        assert target is not None, "a default pool serves the model"
        plan = (await self._read(target.pool, inbound)).plan
        pool = self._dispatcher.redirected(plan, target).pool
        if pool is not target.pool:
            plan = (await self._read(pool, inbound)).plan
        if plan.prompt is None:
            raise Refused(_why_unread(plan))
        return plan

    async def _read(self, pool: Pool, inbound: Inbound) -> Rewrite:
        rewriter = self._rewriters.get(pool.name)
        if rewriter is None or rewriter.mode != "rewrite" or inbound.surface != "chat":
            return Rewrite(await self._dispatcher.plan(pool, inbound, in_full=True), b"")
        try:
            raw = orjson.dumps(inbound.body)
        except TypeError as error:  # integers that only Python can hold
            raise Refused(f"the body cannot be written as JSON: {error}") from error
        return await rewriter.explain(self._dispatcher, pool, inbound, raw)

    def _whole(self, item: Item, plan: Plan) -> Shareable:
        return self._cut(item, plan, plan.num_tokens)

    def _cut(self, item: Item, plan: Plan, num_tokens: int) -> Shareable:
        """Keep the whole blocks among the first ``num_tokens``."""
        prompt = plan.prompt
        assert prompt is not None, "only prompts that were read come here"
        num_blocks = num_tokens // prompt.block_size
        if not num_blocks:
            raise Refused(
                f"no shareable block: its requests have {num_tokens} tokens in common, expected at "
                f"least one block of {prompt.block_size}"
            )
        num_tokens = num_blocks * prompt.block_size
        ids = prompt.token_ids
        # Where nothing follows, any token will do: no block depends on it.
        tail = ids[num_tokens] if len(ids) > num_tokens else ids[-1]
        ids = ids[:num_tokens]
        ids.append(tail)
        return Shareable(
            item,
            plan.pool,
            ids,
            num_tokens,
            prompt.block_hashes[:num_blocks],
            plan.key.ring_key,
            max(prompt.num_tokens, num_tokens + 1),
            plan.inbound.body,
        )


def fill(value: Any, marker: str, question: str) -> Any:
    """Return a JSON value with ``question`` in place of the marker in every text. Pure."""
    if isinstance(value, str):
        return value.replace(marker, question)
    if isinstance(value, list):
        return [fill(part, marker, question) for part in value]
    if isinstance(value, dict):
        return {name: fill(part, marker, question) for name, part in value.items()}
    return value


def _common(plan: Plan, other: Plan) -> int:
    """Return how many tokens two prompts begin with together."""
    assert plan.prompt is not None
    assert other.prompt is not None
    if plan.pool is not other.pool:
        return 0
    ours, theirs = plan.prompt.token_ids, other.prompt.token_ids
    low, high = 0, min(len(ours), len(theirs))
    # Equal slices are compared in C: bisection beats a loop over 30,000 tokens.
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


async def _stable_tokens(plan: Plan) -> int:
    """Return where what changes from request to request begins."""
    try:
        layout = await asyncio.to_thread(layout_reader(plan))
    except Exception as error:  # templates raise what they like
        raise Refused(f"its parts cannot be told apart: {type(error).__name__}") from error
    return stable_end(layout.segments)


def _why_unread(plan: Plan) -> str:
    if plan.unread == "no_tokenizer":
        return (
            f"pool {plan.pool.name!r} reads no prompts yet; expected pools[].tokenizer (or a "
            "worker that hands its own out), and a worker that answers and tells its block size"
        )
    return f"the prompt cannot be read ({plan.unread}): the chat template or tokenizer refuses it"

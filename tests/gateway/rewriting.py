"""A rewriter at work, and bodies that differ where clients differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gateway.proxy.body import parse_body
from gateway.proxy.rewrite import Mode, Rewrite, Rewriter
from gateway.routing.dispatch import Dispatcher, Inbound, Plan
from gateway.routing.pool import Pool
from prefix_index.canonical import RULES, FirstSeenMemory
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.gateway.routing_parts import (
    BLOCK,
    CHATML,
    Clock,
    byte_tokenizer,
    dispatcher,
    hold,
    make_pool,
)

HANDBOOK = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 60
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("search_docs", "read_file", "create_ticket")
]


def billing(cch: str, text: str = HANDBOOK) -> bytes:
    line = f"x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch={cch};"
    parts = [{"type": "text", "text": line}, {"type": "text", "text": text}]
    return body([{"role": "system", "content": parts}, {"role": "user", "content": "list files"}])


def clock_line(time: str) -> bytes:
    text = f"Current time: 2026-11-30 {time}\n{HANDBOOK}"
    return body([{"role": "system", "content": text}, {"role": "user", "content": "q"}])


def body(messages: list[Any], **members: Any) -> bytes:
    return json.dumps(
        {"model": "m", "seed": 9007199254740993, "messages": messages, **members}
    ).encode()


def inbound(raw: bytes, tenant: str = "", surface: Any = "chat") -> Inbound:
    return Inbound(surface, parse_body(raw, surface), {}, "m", tenant, "r1")


@dataclass
class Desk:
    """A rewriter with the pool and dispatcher it works for."""

    mode: Mode
    rules: tuple[str, ...] = RULES
    pool: Pool = field(default_factory=make_pool)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.dispatcher: Dispatcher = dispatcher(self.pool, self.clock)
        memory = FirstSeenMemory(self.clock)
        self.rewriter = Rewriter(self.mode, self.rules, memory, clock=self.clock)

    async def send(self, raw: bytes, tenant: str = "") -> Rewrite:
        """Plan a request that is sent to w0, which then holds its prompt."""
        self.clock.now_s += 1
        rewrite = await self.rewriter.plan(self.dispatcher, self.pool, inbound(raw, tenant), raw)
        await self.rewriter.settle()
        sent = await self.dispatcher.plan(self.pool, rewrite.plan.inbound, in_full=True)
        if self.pool.index is not None:
            hold(self.pool, "w0", sent.prompt)
        return rewrite

    async def explain(self, raw: bytes) -> Rewrite:
        return await self.rewriter.explain(self.dispatcher, self.pool, inbound(raw), raw)


def report_of(rewrite: Rewrite, rule: str) -> dict[str, Any]:
    return next(entry for entry in rewrite.report if entry["rule"] == rule)


def pool_that_prints_tools() -> Pool:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(
        "{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}" + CHATML, special_tokens={}
    )
    reader = PromptReader(tokenizer, template, model="m", block_size=BLOCK)
    return make_pool(reads=False, reader=reader, index=Index(BLOCK))


def hold_share(pool: Pool, worker: str, plan: Plan, share: float) -> None:
    assert pool.index is not None
    assert plan.prompt is not None
    hashes = plan.prompt.block_hashes
    pool.index.store(worker, hashes[: int(len(hashes) * share)], plan.prompt.root)


def held_tokens(pool: Pool, plan: Plan) -> int:
    assert pool.index is not None
    return max((hit.total for hit in pool.index.match(plan.hashes or ()).values()), default=0)

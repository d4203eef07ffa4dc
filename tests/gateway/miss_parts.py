"""Clients whose prompts break in known ways, and a pool of engines that cache as they should."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.misses.report import MissReport
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool, Worker
from prefix_index.blocks import usable_blocks
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.gateway.routing_parts import BLOCK, Clock, byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.blocks import BlockHash
    from prefix_index.engines import EngineKind

# Tools are printed first, as the engines' own templates do, and tool calls as they come.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% if style %}{{ style }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HANDBOOK = " ".join(
    f"Rule {n}: refunds of class {n * 7} are accepted within {n + 3} days of delivery."
    for n in range(40)
)


def reader(template: str = TEMPLATE, engine: EngineKind = "runner") -> PromptReader:
    tokenizer = byte_tokenizer()
    chat_template = ChatTemplate(template, special_tokens=tokenizer.special_tokens)
    return PromptReader(tokenizer, chat_template, model="m", block_size=BLOCK, engine=engine)


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    words = f"The tool {name} does what the name {name} says, with care and within limits."
    function = {"name": name, "description": words, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


@dataclass
class Served:
    """One request that was served."""

    plan: Plan
    ticket: Ticket

    @property
    def usable_tokens(self) -> int:
        return usable_blocks(self.plan.num_tokens, BLOCK) * BLOCK

    @property
    def missed_tokens(self) -> int:
        """Tokens that could have been hits and were not."""
        assert self.ticket.observed_hit_tokens is not None
        return self.usable_tokens - self.ticket.observed_hit_tokens


@dataclass
class Shop:
    """A pool of engines with endless caches, and the report that watches it."""

    num_workers: int = 1
    report: MissReport = field(init=False)
    clock: Clock = field(default_factory=Clock)
    options: dict[str, Any] = field(default_factory=dict)
    read: Callable[[], PromptReader] = reader

    def __post_init__(self) -> None:
        # CPU is for free: what is compared does not hang on how fast this machine is.
        options = {"cpu_clock": lambda: 0.0} | self.options
        self.report = MissReport(clock=self.clock, **options)
        workers = [Worker(f"w{k}", f"http://h:{k}") for k in range(self.num_workers)]
        self.pool = Pool(
            "chat", models=["m"], workers=workers, reader=self.read(), index=Index(BLOCK)
        )
        self.routes = Dispatcher(
            [self.pool], clock=self.clock, seed=0, on_finish=self.report.observe
        )
        self.held: dict[str, set[BlockHash]] = {worker.id: set() for worker in workers}

    async def serve(
        self,
        messages: list[dict[str, Any]] | None = None,
        *,
        tenant: str = "",
        headers: dict[str, str] | None = None,
        request_id: str = "",
        salt: str | None = None,
        **body: Any,
    ) -> Served:
        """Serve one request as an engine with a prefix cache would."""
        self.clock.now_s += 1.0
        surface = "completions" if messages is None else "chat"
        if messages is not None:
            body["messages"] = messages
        inbound = Inbound(
            surface,  # type: ignore[arg-type]
            json.loads(json.dumps({"model": "m", **body})),
            headers or {},
            "m",
            tenant=tenant,
            request_id=request_id,
            salt=salt,
        )
        plan = await self.routes.plan(self.pool, inbound, in_full=True)
        assert plan.prompt is not None, plan.unread
        ticket = self.routes.admit(plan, self.routes.choose(plan))
        held, cached = self.held[ticket.worker.id], 0
        hashes = plan.prompt.block_hashes
        while cached < usable_blocks(plan.num_tokens, BLOCK) and hashes[cached] in held:
            cached += 1
        held.update(hashes)
        self.clock.now_s += 1.0
        ticket.first_token()
        ticket.finish(Outcome.OK, Usage(plan.num_tokens, 1, cached * BLOCK))
        return Served(plan, ticket)

    async def causes(self) -> dict[str, dict[str, Any]]:
        """The report's rows by cause, once all is compared."""
        await self.report.settled()
        return {row["cause"]: row for row in self.report.report()["causes"]}

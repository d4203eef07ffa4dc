"""A finished request as the miss report keeps it: its prompt's blocks and the body they came from.

Nothing here is copied: blocks, tokens and body are shared with the request. A ``Known`` is never
changed, so that a thread may read it while the event loop goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.routing.affinity import text_of
from prefix_index.blocks import usable_blocks
from prefix_index.prompts import Prompt, PromptReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.routing.dispatch import Plan

Scope = tuple[str, str]

INSTRUCTION_ROLES = ("system", "developer")
# Kinds of content part that are text; bodies with others (images) are not kept, they are large.
_TEXT_PARTS = ("text", "input_text", "output_text", "thinking", None)


@dataclass(frozen=True, slots=True)
class Known:
    """One request's prompt.

    Attributes:
        scope: Pool and tenant; prompts of different scopes are never compared.
        prompt: Tokens and block hashes.
        body: The request's body as forwarded.
        num_blocks: Leading blocks that can be a hit.
        num_messages: Messages in the body; 0 for completions.
        reader: What read it.
        finished_s: When its answer was complete (monotonic): from then on it can be hit.
        salt: Cache salt with which it was forwarded, which the body need not have.
    """

    scope: Scope
    prompt: Prompt
    body: Mapping[str, Any]
    num_blocks: int
    num_messages: int
    reader: PromptReader | None
    finished_s: float
    salt: str = ""

    @classmethod
    def from_plan(cls, plan: Plan, prompt: Prompt, finished_s: float) -> Known:
        """Take over what a plan read; O(1)."""
        body = plan.inbound.body
        return cls(
            (plan.pool.name, plan.inbound.tenant),
            prompt,
            body,
            usable_blocks(prompt.num_tokens, prompt.block_size),
            num_messages(body),
            plan.pool.reader,
            finished_s,
            plan.inbound.cache_salt,
        )

    @property
    def usable_tokens(self) -> int:
        """Tokens that can be a hit at most."""
        return self.num_blocks * self.prompt.block_size

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages; what is none is an empty object."""
        messages = self.body.get("messages")
        if not isinstance(messages, list):
            return []
        return [m if isinstance(m, dict) else {} for m in messages]

    @property
    def tools(self) -> list[Any]:
        """The tools."""
        tools = self.body.get("tools")
        return tools if isinstance(tools, list) else []

    def has_text_only(self, *, since: int = 0) -> bool:
        """Whether the messages from ``since`` on carry nothing but text."""
        messages = self.body.get("messages")
        if not isinstance(messages, list):
            return True
        for message in messages[since:]:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and not all(map(_is_text, content)):
                return False
        return True


def num_messages(body: Mapping[str, Any]) -> int:
    """Return how many messages a body has; 0 for completions."""
    messages = body.get("messages")
    return len(messages) if isinstance(messages, list) else 0


def message_text(message: Mapping[str, Any]) -> str:
    """Return a message's text."""
    return text_of(message.get("content"))


def prompt_text(body: Mapping[str, Any]) -> str | None:
    """Return the text of a completion request's (first) prompt, None if it is token ids."""
    prompt = body.get("prompt")
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


def instructions(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of the system and developer messages."""
    for message in messages:
        if message.get("role") in INSTRUCTION_ROLES:
            yield message_text(message)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _TEXT_PARTS

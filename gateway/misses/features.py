"""What two near-duplicate prompts have in common, as a few numbers: how the one finds the other.

A prefix that breaks at its first token shares no block with its twin, so blocks alone do not find
it. A feature is the hash of something that survives such a break: a sentence of the instructions, a
tool, an earlier message, an identity the client gave. Requests are then matched by the number of
features they share; the comparison of their tokens decides.
"""

from __future__ import annotations

import re
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from gateway.misses.known import INSTRUCTION_ROLES, instructions, message_text, prompt_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.misses.known import Known, Scope

# Enough sentences that a changed one does not matter, few enough to look up quickly.
NUM_SENTENCES = 12
# Shorter sentences and messages ("ok", "Thanks.") are in every conversation.
MIN_SENTENCE_CHARS = 16
MIN_MESSAGE_CHARS = 6
# A document's first pages identify it.
MAX_SKETCH_CHARS = 32_768
# Messages this close to the end survive a trimmed history.
NUM_MESSAGES = 6
NUM_TOOLS = 8
# User text this long is a document rather than a question.
MIN_DOCUMENT_CHARS = 400

_SENTENCE_END = re.compile(r"[.!?;\n{}]+\s*")


def features(known: Known, identity: str) -> list[int]:
    """Return the features of a prompt; O(its text), for a thread.

    Args:
        known: The prompt.
        identity: Document, knowledge base, session or cache key that the client named, or empty.
    """
    found: set[int] = set()
    scope = known.scope
    if identity:
        found.add(hash((scope, "identity", identity)))
    messages = known.messages
    for text in instructions(messages):
        found.update(_sketch(scope, text))
    found.update(_sketch(scope, prompt_text(known.body) or ""))
    for message in messages:
        text = message_text(message)
        if message.get("role") == "user" and len(text) >= MIN_DOCUMENT_CHARS:
            found.update(_sketch(scope, text))
    found.update(message_features(known, max(0, len(messages) - NUM_MESSAGES)))
    found.update(hash((scope, "tool", name)) for name in _tool_names(known.tools))
    found.update(_block_features(known))
    return list(found)


def message_features(known: Known, since: int) -> list[int]:
    """Return the features of the messages from ``since`` on, instructions left out."""
    scope = known.scope
    found = []
    for message in known.messages[since:]:
        text = message_text(message)
        # Clients send what they like: a role may be a list, which has no hash.
        role = str(message.get("role"))
        if len(text) >= MIN_MESSAGE_CHARS and role not in INSTRUCTION_ROLES:
            found.append(hash((scope, "message", role, text)))
    return found


def _sketch(scope: Scope, text: str) -> list[int]:
    """Return the smallest hashes of the text's sentences: similar texts agree in most of them."""
    sentences = {
        sentence
        for sentence in _SENTENCE_END.split(text[:MAX_SKETCH_CHARS])
        if len(sentence) >= MIN_SENTENCE_CHARS
    }
    return nsmallest(NUM_SENTENCES, (hash((scope, "sentence", s)) for s in sentences))


def _tool_names(tools: list[Any]) -> Iterator[str]:
    for tool in tools[:NUM_TOOLS]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            yield name


def _block_features(known: Known) -> Iterator[int]:
    """Blocks 0, 1, 3, 7, ...: prompts of token ids have nothing else."""
    hashes = known.prompt.block_hashes
    at = 0
    while at < known.num_blocks:
        yield hash((known.scope, hashes[at]))
        at = 2 * at + 1

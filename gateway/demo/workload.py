"""The short real workload of ``warmlane demo``: two documents, questions about them, one chat.

No session or document hint is sent: whatever is found warm was found by the prompt's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Long enough that prefill dominates TTFT on one CPU core (about 1,200 tokens), short enough that
# the whole demo stays under a minute.
RULES_PER_DOCUMENT = 48
MAX_TOKENS = 12

PLACES = ("harbour", "museum", "garden", "station", "market", "school", "library", "theatre")
DEEDS = ("closes", "opens", "repairs", "lends", "records", "sells", "teaches", "measures")
COLOURS = ("green", "amber", "violet", "silver")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the workload.

    Attributes:
        label: What the table calls it.
        document: Which document's prefix it carries.
        is_warm: Whether an earlier request has left its prefix on some worker.
        question: The user's message.
    """

    label: str
    document: str
    is_warm: bool
    question: str


WORKLOAD = (
    Ask("town rules, first question", "town", False, "When does the harbour close?"),
    Ask("island rules, first question", "island", False, "Which place keeps amber tickets?"),
    Ask("town rules, second question", "town", True, "Who records at noon?"),
    Ask("island rules, second question", "island", True, "What does the market do?"),
    Ask("town rules, third question", "town", True, "How many tickets does the museum keep?"),
    Ask("island rules, third question", "island", True, "When does the school open?"),
)
FOLLOW_UP = Ask("town rules, chat goes on", "town", True, "Thank you. And on Sundays?")


def document(name: str) -> str:
    """Return the text of one document, the same at every call."""
    shift = sum(name.encode())
    lines = [f"You are the clerk of the {name}. Answer from these rules only."]
    for rule in range(1, RULES_PER_DOCUMENT + 1):
        at = rule + shift
        place, deed = PLACES[at % len(PLACES)], DEEDS[at * 3 % len(DEEDS)]
        lines.append(
            f"Rule {rule}: the {place} {deed} at {at % 12 + 8} o'clock and keeps "
            f"{at * 7 % 90 + 3} {COLOURS[at % len(COLOURS)]} tickets for visitors."
        )
    return "\n".join(lines)


def messages(ask: Ask, answered: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the chat of one request, earlier (question, answer) pairs included."""
    chat = [{"role": "system", "content": document(ask.document)}]
    for question, answer in answered:
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": answer})
    chat.append({"role": "user", "content": ask.question})
    return chat

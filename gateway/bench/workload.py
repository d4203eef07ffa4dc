"""The requests of ``warmlane bench``: questions about documents, popular ones more often.

No hint is sent: whatever is found warm is found by the prompt's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

# Common enough to be one token each in most vocabularies, so that words are about tokens.
_WORDS = (
    *("the", "water", "house", "light", "river", "stone", "market", "garden", "winter", "summer"),
    *("paper", "letter", "number", "station", "window", "table", "music", "story", "north"),
    *("south", "open", "close", "early", "late", "small", "large", "green", "white", "black"),
    *("road", "bridge", "ship", "train", "field", "forest", "school", "doctor", "teacher"),
    *("money", "price", "order", "record", "answer", "question", "reason", "month", "year"),
)
_SENTENCE_WORDS = 12


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        is_first: Whether it is the first about its document.
        messages: Its chat.
    """

    is_first: bool
    messages: list[dict[str, Any]]


def workload(seed: int, *, num_requests: int, num_documents: int, num_words: int) -> list[Ask]:
    """Return the requests in the order in which they are sent, the same for the same arguments.

    The document at rank ``r`` is asked about ``1 / r`` times as often as the first one, as
    documents are in retrieval.

    Args:
        seed: Another one gives other documents, which no cache has seen.
        num_requests: How many.
        num_documents: Documents to ask about; not all may come up.
        num_words: Words of a document.
    """
    rng = Random(seed)
    documents = [_document(rng, seed, number, num_words) for number in range(num_documents)]
    weights = [1 / (rank + 1) for rank in range(num_documents)]
    asks: list[Ask] = []
    asked: set[int] = set()
    for number in range(num_requests):
        (at,) = rng.choices(range(num_documents), weights)
        question = f"Question {number + 1}: what is said of the {rng.choice(_WORDS)}?"
        messages = [
            {"role": "system", "content": documents[at]},
            {"role": "user", "content": question},
        ]
        asks.append(Ask(at not in asked, messages))
        asked.add(at)
    return asks


def _document(rng: Random, seed: int, number: int, num_words: int) -> str:
    words = rng.choices(_WORDS, k=num_words)
    sentences = [
        " ".join(words[at : at + _SENTENCE_WORDS]) for at in range(0, num_words, _SENTENCE_WORDS)
    ]
    # What tells documents apart stands first: no two share a prefix.
    return f"Document {seed}-{number}. Answer from it alone.\n" + ". ".join(sentences)

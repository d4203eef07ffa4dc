"""A closed-loop workload of several tenants, made of text: the same for every router under test.

Five kinds of clients, each waiting for its answer before it asks again: questions about shared
documents, conversations that grow, agents with long tool descriptions, unique one-shot prompts,
and a batch of few-shot questions with low priority. Everything follows from the seed, except the
answers, which become part of a conversation's history as the engine gave them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Message = dict[str, Any]

# Common words are one token each in most vocabularies, so words count as tokens here.
_WORD_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man even most made after also did many "
    "off before must well back through years much where your way down should because long each "
    "just state those people too mr how little good world make very year still see own work men "
    "day get"
)
_WORDS = _WORD_TEXT.split()


@dataclass(slots=True)
class Ask:
    """One request: who asks, what, and how many tokens are to come back."""

    kind: str
    messages: list[Message]
    output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the workload, in words (about tokens) and counts.

    Prompts are 30 to 150 times as long as completions, as in recorded chat, tool and agent traffic.
    """

    documents: int = 40
    document_words: int = 7000
    tools_words: int = 5000
    num_toolsets: int = 6
    chat_system_words: int = 1200
    turn_words: int = 800
    observation_words: int = 1200
    few_shot_words: int = 1500
    few_shot_questions: int = 200
    one_shot_words: int = 8000
    output_tokens: int = 50


def text(rng: Random, words: int) -> str:
    """Return so many random words."""
    return " ".join(rng.choices(_WORDS, k=words))


class Workload:
    """Makes clients; each client is an endless (or, for the batch, finite) stream of asks.

    Args:
        seed: Everything follows from it.
        shape: Sizes.
    """

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self._seed = seed
        rng = Random(seed)
        s = self.shape
        self._documents = [text(rng, s.document_words) for _ in range(s.documents)]
        # A few documents get most of the questions, as knowledge bases have it.
        self._weights = [1 / (rank + 1) for rank in range(s.documents)]
        self._tools = [text(rng, s.tools_words) for _ in range(s.num_toolsets)]
        self._systems = [text(rng, s.chat_system_words) for _ in range(3)]
        self._examples = text(rng, s.few_shot_words)
        self._few_shot = count()

    def client(self, kind: str, number: int) -> Conversation:
        """Return client ``number`` of one kind."""
        rng = Random(f"{self._seed}/{kind}/{number}")
        return Conversation(self, kind, rng)

    def document_question(self, rng: Random) -> Iterator[Ask]:
        """One question about a shared document."""
        document = rng.choices(self._documents, self._weights)[0]
        system = f"Answer from the document.\n\n{document}"
        yield Ask("document", _dialogue(system, text(rng, 30)), self.shape.output_tokens)

    def chat(self, rng: Random) -> Iterator[Ask]:
        """Four to eight turns of one conversation."""
        most = self.shape.turn_words
        messages = _dialogue(rng.choice(self._systems), text(rng, rng.randint(most // 4, most)))
        for _ in range(rng.randint(4, 8)):
            yield Ask("chat", messages, self.shape.output_tokens)
            words = rng.randint(most // 4, most)
            messages.append({"role": "user", "content": text(rng, words)})

    def agent(self, rng: Random) -> Iterator[Ask]:
        """Six to twelve steps of one agent, whose observations grow the context."""
        messages = _dialogue(rng.choice(self._tools), text(rng, 80))
        for _ in range(rng.randint(6, 12)):
            yield Ask("agent", messages, self.shape.output_tokens)
            result = text(rng, self.shape.observation_words)
            messages.append({"role": "user", "content": f"Result: {result}"})

    def one_shot(self, rng: Random) -> Iterator[Ask]:
        """A long prompt that nobody asks again."""
        words = rng.randint(self.shape.one_shot_words // 2, self.shape.one_shot_words)
        yield Ask("one_shot", _dialogue("Summarise.", text(rng, words)), self.shape.output_tokens)

    def few_shot(self, rng: Random) -> Iterator[Ask]:
        """One question of the batch, until all are asked."""
        if next(self._few_shot) < self.shape.few_shot_questions:
            messages = _dialogue(self._examples, text(rng, 40))
            yield Ask("few_shot", messages, 8, priority=10)


class Conversation:
    """One client: ask, take the answer, ask again."""

    def __init__(self, workload: Workload, kind: str, rng: Random) -> None:
        self.rng = rng
        self._make = getattr(workload, "document_question" if kind == "document" else kind)
        self._turns: Iterator[Ask] = iter(())
        self._ask: Ask | None = None

    def next(self) -> Ask | None:
        """Return the next request; None when there is nothing left to ask."""
        self._ask = next(self._turns, None)
        if self._ask is None:
            self._turns = self._make(self.rng)
            self._ask = next(self._turns, None)
        return self._ask

    def answered(self, answer: str) -> None:
        """Take the answer into the conversation's history."""
        if self._ask is not None:
            self._ask.messages.append({"role": "assistant", "content": answer})


def _dialogue(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]

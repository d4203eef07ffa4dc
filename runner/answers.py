"""The JSON shapes of both surfaces, whole and as stream chunks.

Source: OpenAI API reference (chat.completion, chat.completion.chunk, text_completion), with
``stop_reason``, ``prompt_token_ids`` and ``token_ids`` as vLLM 0.32 writes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.detokenizer import TokenTexts
    from runner.streams import Piece, TokenLogprob, Usage

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """The pieces of one choice, joined."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        """Append one piece."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason


@dataclass(slots=True, kw_only=True)
class AnswerShape(ABC):
    """Writes one answer.

    Attributes:
        id: The answer's id.
        created: Unix seconds.
        model: The served model name.
        wants_logprobs: Whether ``logprobs`` are filled.
        prompt_ids: Token ids of each prompt, if the client asked for token ids, else None.
        n: Samples of each prompt.
    """

    id: str
    created: int
    model: str
    texts: TokenTexts
    wants_logprobs: bool
    prompt_ids: list[list[int]] | None
    n: int

    @abstractmethod
    def full(self, choices: list[Choice], usage: Usage) -> Json:
        """Return the whole answer."""

    @abstractmethod
    def opening(self, num_choices: int) -> list[Json]:
        """Return the chunks that come before any text."""

    @abstractmethod
    def chunk(self, piece: Piece) -> Json:
        """Return the chunk of one piece."""

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the chunk after the last choice: usage and no choices."""
        return {**self.head(is_chunk=True), "choices": [], "usage": usage_json(usage)}

    @abstractmethod
    def head(self, *, is_chunk: bool) -> Json:
        """Return the members all answers and chunks of this surface share."""

    def ending(self, part: Choice | Piece) -> Json:
        """Return the members that say how a choice ended, and its token ids if asked for."""
        ending: Json = {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.prompt_ids is not None:
            ending["token_ids"] = part.token_ids
        return ending


class ChatShape(AnswerShape):
    """``/v1/chat/completions``."""

    def head(self, *, is_chunk: bool) -> Json:
        """Return id, object, created and model."""
        kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def full(self, choices: list[Choice], usage: Usage) -> Json:
        """Return a ``chat.completion``."""
        answer = {
            **self.head(is_chunk=False),
            "choices": [
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": "".join(choice.texts),
                        "refusal": None,
                    },
                    "logprobs": self._logprobs(choice.logprobs),
                    **self.ending(choice),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage_json(usage),
        }
        if self.prompt_ids is not None:
            answer["prompt_token_ids"] = self.prompt_ids[0]
        return answer

    def opening(self, num_choices: int) -> list[Json]:
        """Return the role chunk of every choice."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": ""}, None, {"finish_reason": None})
            for index in range(num_choices)
        ]
        if self.prompt_ids is not None:
            chunks[0]["prompt_token_ids"] = self.prompt_ids[0]
        return chunks

    def chunk(self, piece: Piece) -> Json:
        """Return a ``chat.completion.chunk``."""
        delta = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        logprobs = [] if piece.logprob is None else [piece.logprob]
        return self._chunk(piece.index, delta, self._logprobs(logprobs), self.ending(piece))

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, ending: Json) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **ending}
        return {**self.head(is_chunk=True), "choices": [choice]}

    def _logprobs(self, logprobs: list[TokenLogprob]) -> Json | None:
        if not self.wants_logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(*alternative) for alternative in entry.top],
                }
                for entry in logprobs
            ]
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self.texts.bytes_of(token_id)
        return {"token": self.texts.text_of(token_id), "logprob": logprob, "bytes": list(raw)}


@dataclass(slots=True, kw_only=True)
class CompletionShape(AnswerShape):
    """``/v1/completions``."""

    # Characters of the tokens so far of each choice, for `text_offset` in a stream.
    offsets: dict[int, int] = field(default_factory=dict)

    def head(self, *, is_chunk: bool) -> Json:
        """Return id, object, created and model; chunks look alike."""
        kind = "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def full(self, choices: list[Choice], usage: Usage) -> Json:
        """Return a ``text_completion``."""
        return {
            **self.head(is_chunk=False),
            "choices": [
                self._choice(index, "".join(choice.texts), choice.logprobs, choice)
                for index, choice in enumerate(choices)
            ],
            "usage": usage_json(usage),
        }

    def opening(self, num_choices: int) -> list[Json]:
        """Return nothing: this surface has no role."""
        return []

    def chunk(self, piece: Piece) -> Json:
        """Return a chunk; the prompt's ids come with the first one of a choice."""
        logprobs = [] if piece.logprob is None else [piece.logprob]
        choice = self._choice(piece.index, piece.text, logprobs, piece)
        return {**self.head(is_chunk=True), "choices": [choice]}

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], part: Choice | Piece
    ) -> Json:
        choice = {"index": index, "text": text, **self.ending(part)}
        if self.prompt_ids is not None and index not in self.offsets:
            choice["prompt_token_ids"] = self.prompt_ids[index // self.n]
        offset = self.offsets.setdefault(index, 0)
        choice["logprobs"] = self._logprobs(index, offset, logprobs)
        return choice

    def _logprobs(self, index: int, offset: int, logprobs: list[TokenLogprob]) -> Json | None:
        if not self.wants_logprobs:
            return None
        tokens, offsets, tops = [], [], []
        for entry in logprobs:
            key = self.texts.key_of(entry.token_id)
            tokens.append(key)
            offsets.append(offset)
            offset += len(self.texts.text_of(entry.token_id))
            tops.append(
                {self.texts.key_of(token_id): value for token_id, value in entry.top}
                | {key: entry.logprob}
            )
        self.offsets[index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": tops,
        }


def usage_json(usage: Usage) -> Json:
    """Return the ``usage`` object; ``cached_tokens`` is always there, 0 included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

"""Request bodies of ``/v1/chat/completions`` and ``/v1/completions``, checked and typed.

Fields follow the OpenAI API, with vLLM's additions by vLLM's names. Unknown fields are ignored, as
vLLM does; fields that would change the answer and that this runner cannot honour are refused,
since an answer that silently ignores them would be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from runner.constraints import refuse_constraints
from runner.errors import invalid
from runner.fields import Fields
from runner.kv_transfer import OffloadCaps, parse_kv_transfer
from runner.types import MAX_SAMPLES, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

Surface = Literal["chat", "completions"]
TextOrIds = str | list[int]

# OpenAI's default length of a legacy completion.
DEFAULT_COMPLETION_TOKENS = 16

# vLLM's default `max_logprobs`; more would make every token's answer several kilobytes.
MAX_LOGPROBS = 20

# OpenAI's limit.
MAX_STOP_STRINGS = 4

# OpenAI's longest `input` array; one body must not become any number of engine requests.
MAX_PROMPTS = 2048

# Token ids are 32-bit wherever they are hashed; the vocabulary is checked against the model.
MAX_TOKEN_ID = 2**32 - 1

# 64-bit seeds, as vLLM and torch take them.
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1

# Fields this runner cannot honour -> the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request for completions, whichever surface it came by.

    Attributes:
        model: The name asked for; None leaves it to the server.
        body: The object as parsed; prompt rendering reads its own fields from it.
        prompts: Texts or token ids of a legacy completion; empty for chat.
        max_tokens: None takes what the context leaves (chat).
        logprobs: As in ``SamplingParams``.
        stop: Stop strings, not shown in the answer.
    """

    surface: Surface
    model: str | None
    body: dict[str, Any]
    prompts: list[TextOrIds]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    n: int
    logprobs: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    cache_salt: str
    offload: OffloadCaps

    def sampling(self, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """Return the engine's parameters for a prompt of this length.

        Raises:
            ApiError: 400 if prompt and completion cannot fit the context; both numbers are named.
        """
        prompt_field = "messages" if self.surface == "chat" else "prompt"
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise invalid(
                f"This model's maximum context length is {max_model_len} tokens, but the prompt "
                f"has {num_prompt_tokens} tokens and needs room for at least one more.",
                prompt_field,
                "context_length_exceeded",
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise invalid(
                f"This model's maximum context length is {max_model_len} tokens. However, you "
                f"requested {num_prompt_tokens + self.max_tokens} tokens ({num_prompt_tokens} in "
                f"the prompt, {self.max_tokens} in the completion).",
                "max_tokens",
                "context_length_exceeded",
            )
        return SamplingParams(
            max_tokens=room if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            n=self.n,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


def parse_generation(surface: Surface, body: dict[str, Any]) -> GenerationRequest:
    """Check a request body.

    Raises:
        ApiError: 400 naming the first field at fault.
    """
    fields = Fields(body)
    _refuse_unsupported(body)
    if surface == "chat":
        check_chat(fields)
    refuse_constraints(fields)
    stream, include_usage = _stream(fields)
    n = fields.integer("n", 1, low=1, high=MAX_SAMPLES)
    if fields.integer("best_of", n, low=1) != n:
        raise fields.refuse("best_of", f"equal to `n` ({n})")
    return GenerationRequest(
        surface=surface,
        model=fields.string("model", None),
        body=body,
        prompts=parse_prompts(fields) if surface == "completions" else [],
        max_tokens=_max_tokens(surface, fields),
        temperature=fields.number("temperature", 1.0, low=0),
        top_p=_top_p(fields),
        # -1 is vLLM's other way to say "all".
        top_k=max(0, fields.integer("top_k", 0, low=-1)),
        seed=fields.integer("seed", None, low=MIN_SEED, high=MAX_SEED),
        n=n,
        logprobs=_logprobs(surface, fields),
        ignore_eos=fields.boolean("ignore_eos"),
        stop=_stop(fields),
        stop_token_ids=fields.integers("stop_token_ids", low=0, high=MAX_TOKEN_ID),
        stream=stream,
        include_usage=include_usage,
        return_token_ids=fields.boolean("return_token_ids"),
        cache_salt=fields.string("cache_salt", ""),
        offload=parse_kv_transfer(fields),
    )


def check_chat(fields: Fields) -> None:
    """Check what prompt rendering reads: messages, tools and the template's options.

    Raises:
        ApiError: 400 naming the field.
    """
    messages = fields.objects("messages")
    if not messages:
        raise fields.refuse("messages", "a list with at least one message")
    for message in messages:
        if not isinstance(message.values.get("role"), str):
            raise message.refuse("role", "a string")
        if not isinstance(message.values.get("content"), str | list | None):
            raise message.refuse("content", "a string, a list of parts or null")
        message.objects("tool_calls")
        if isinstance(message.values.get("content"), list):
            message.objects("content")
    fields.objects("tools")
    fields.objects("documents")
    fields.object("chat_template_kwargs")
    continues = fields.boolean("continue_final_message")
    if fields.boolean("add_generation_prompt", not continues) and continues:
        raise invalid(
            "`add_generation_prompt` must be false when `continue_final_message` is true",
            "add_generation_prompt",
        )


def parse_prompts(fields: Fields) -> list[TextOrIds]:
    """Read ``prompt``: a text, token ids, or a list of either.

    Raises:
        ApiError: 400 if it is anything else or empty.
    """
    value: Any = fields.values.get("prompt")
    if isinstance(value, str):
        return [value]
    if _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value and len(value) <= MAX_PROMPTS:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_token_ids(item) for item in value):
            return list(value)
    raise fields.refuse(
        "prompt",
        f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of one of them, "
        "none of them empty",
    )


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value)
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, neutral in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise invalid(
                f"`{name}` is not supported by this runner", name, "unsupported_parameter"
            )


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise invalid("`stream_options` needs `stream` to be true", "stream_options")
    return stream, options.boolean("include_usage")


def _max_tokens(surface: Surface, fields: Fields) -> int | None:
    if surface == "completions":
        return fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, low=1)
    # The older name counts only without the newer one.
    older = fields.integer("max_tokens", None, low=1)
    return fields.integer("max_completion_tokens", older, low=1)


def _top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, low=0, high=1)
    if top_p == 0:
        raise fields.refuse("top_p", "a number above 0 and at most 1")
    return top_p


def _logprobs(surface: Surface, fields: Fields) -> int | None:
    if surface == "completions":
        return fields.integer("logprobs", None, low=0, high=MAX_LOGPROBS)
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if fields.boolean("logprobs"):
        return top
    if top:
        raise invalid("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    return None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOP_STRINGS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise fields.refuse("stop", f"a non-empty string or up to {MAX_STOP_STRINGS} of them")
    return tuple(stops)

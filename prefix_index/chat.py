"""Messages -> prompt text, by the model's own chat template.

The settings are those of transformers, which engines use: a template must print here, byte for
byte, what it prints there, or no predicted prefix is worth anything. Templates are code from model
hubs: they run guarded, and whatever goes wrong in them becomes ``TemplateRefusedError``.

Source: transformers 5.24 ``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols

from prefix_index.content_format import sglang_content_format, vllm_content_format
from prefix_index.template_guard import GuardedEnvironment, GuardedTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Macro

# Appended to the final message and looked for afterwards, as transformers does it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRefusedError(ValueError):
    """The prompt text of a request cannot be known here; route it by other means."""


class ChatTemplate:
    """A compiled chat template. Rendering is reentrant and may run in any thread.

    Args:
        source: Template text.
        special_tokens: Variables of every rendering: ``bos_token``, ``eos_token``, ...
        timezone: Zone of the engine's clock, for templates that print the date.
        clock: Unix time in seconds.

    Attributes:
        source: Template text.
        timezone: Zone of the engine's clock.
        prints_date: Whether what it prints depends on the day.
        content_format: How vLLM hands it a message's content.
        sglang_content_format: How SGLang does.

    Raises:
        TemplateRefusedError: If the template does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any],
        timezone: str = "UTC",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self.timezone = timezone
        self.prints_date = "strftime_now" in source
        zone = ZoneInfo(timezone)
        environment = _environment(lambda: datetime.fromtimestamp(clock(), zone))
        try:
            tree = environment.parse(source)
            self.content_format = vllm_content_format(tree)
            self.sglang_content_format = sglang_content_format(source, tree)
            self._print = GuardedTemplate(environment, tree, special_tokens)
        except Exception as error:
            raise TemplateRefusedError(f"chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: As the engine hands them to the template; not changed.
            tools: As the engine hands them to the template.
            add_generation_prompt: End with the start of the assistant's turn.
            continue_final_message: End inside the last message, without its end mark.
            documents: For templates with retrieval; passed through.
            kwargs: Further variables (``chat_template_kwargs``); they win over the others.

        Raises:
            TemplateRefusedError: If the template raises, takes too long, prints too much or text
                that is not valid Unicode, or if the flags exclude each other.
        """
        try:
            if continue_final_message:
                messages, final_text = _tag_final_message(messages, add_generation_prompt)
            variables = {
                "messages": messages,
                "tools": tools or None,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **(kwargs or {}),
            }
            text = self._print(variables)
            if continue_final_message:
                text = _cut_at_tag(text, final_text)
            text.encode()  # a lone half of a surrogate pair has no bytes, and no tokens
        except Exception as error:
            # A template can raise whatever its expressions raise, RecursionError included.
            raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error
        return text


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; it prints its body unchanged."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare body: it has a scope of its own.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Macro) -> str:
        return str(caller())


def _environment(now: Callable[[], datetime]) -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Print JSON without jinja2's key sorting and HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tag_final_message(
    messages: Sequence[dict[str, Any]], add_generation_prompt: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return new messages with the tag behind the last text, and that text."""
    if add_generation_prompt:
        raise ValueError("continue_final_message excludes add_generation_prompt")
    if not messages:
        raise ValueError("there is no final message to continue")
    *before, final = messages
    content = final["content"]
    if isinstance(content, str):
        return [*before, {**final, "content": content + _CONTINUE_TAG}], content
    for p, part in reversed(list(enumerate(content or ()))):
        if "text" in part:
            tagged = {**part, "text": part["text"] + _CONTINUE_TAG}
            parts = [*content[:p], tagged, *content[p + 1 :]]
            return [*before, {**final, "content": parts}], part["text"]
    raise ValueError("the final message has no text to continue")


def _cut_at_tag(text: str, final_text: str) -> str:
    at = text.rindex(_CONTINUE_TAG.strip())
    if final_text.strip() not in text:
        raise ValueError("the template does not print the final message")
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    # The template trimmed the message, so the blanks before the tag would not be there either.
    return text[:at].rstrip()

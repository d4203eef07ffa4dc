"""Chat request -> prompt text, by the model's own chat template.

The settings are those of transformers, which engines use: a template must print here, byte for
byte, what it prints there, or no predicted prefix is worth anything. Templates are code from model
hubs, so they run in jinja2's immutable sandbox; what they throw becomes ``TemplateRefusedError``.

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

from prefix_index.messages import content_format, conversation
from prefix_index.sandbox import Renderer, Sandbox

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
        zone = ZoneInfo(timezone)
        environment = _environment(lambda: datetime.fromtimestamp(clock(), zone))
        try:
            self.content_format = content_format(environment.parse(source))
            self._print = Renderer(environment.from_string(source), special_tokens)
        except Exception as error:
            raise TemplateRefusedError(f"chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: As the client sent them; not changed.
            tools: As the client sent them.
            add_generation_prompt: End with the start of the assistant's turn.
            continue_final_message: End inside the last message, without its end mark.
            documents: For templates with retrieval; passed through.
            kwargs: Further variables (``chat_template_kwargs``); they win over the others.

        Raises:
            TemplateRefusedError: If a part is not text, the template raises, or the flags exclude
                each other.
        """
        try:
            chat = conversation(messages, self.content_format)
            if continue_final_message:
                _tag_final_message(chat, add_generation_prompt)
            variables = {
                "messages": chat,
                "tools": tools or None,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **(kwargs or {}),
            }
            text = self._print(variables)
            return _cut_at_tag(text) if continue_final_message else text
        except Exception as error:
            # A template can raise whatever its expressions raise, RecursionError included.
            raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error


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


def _environment(now: Callable[[], datetime]) -> Sandbox:
    environment = Sandbox(
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


def _tag_final_message(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise ValueError("continue_final_message excludes add_generation_prompt")
    if not chat:
        raise ValueError("there is no final message to continue")
    content = chat[-1]["content"]
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return
    if not content:
        raise ValueError("the final message has no text to continue")
    content[-1]["text"] += _CONTINUE_TAG


def _cut_at_tag(text: str) -> str:
    at = text.rindex(_CONTINUE_TAG.strip())
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    # The template trimmed the message, so the blanks before the tag would not be there either.
    return text[:at].rstrip()

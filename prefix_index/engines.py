"""Chat body -> prompt text, for each kind of engine.

Engines rewrite a body before they render it, each in its own way: the same tools are two prompts on
vLLM and on SGLang. What is predicted for a worker must be rendered as that worker does it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from prefix_index.chat import TemplateRefusedError
from prefix_index.messages import NotTextError, message_as_sent, messages_of, runner_message
from prefix_index.sglang import SglangRenderer
from prefix_index.vllm import VllmRenderer

if TYPE_CHECKING:
    from prefix_index.chat import ChatTemplate

EngineKind: TypeAlias = Literal["runner", "vllm", "sglang", "openai"]


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What operators set on an engine and what changes its prompts.

    Attributes:
        default_kwargs: Template variables of requests that do not set them.
        drops_unused_tools: Whether vLLM leaves tools out when ``tool_choice`` is "none".
        keeps_tool_order: Whether SGLang is a release that prints tools in the order sent.
    """

    default_kwargs: Mapping[str, Any] = field(default_factory=dict)
    drops_unused_tools: bool = False
    keeps_tool_order: bool = False


class Renderer(Protocol):
    """Renders chat bodies as one kind of engine does; may be called from any thread."""

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text.

        Raises:
            NotTextError: If it cannot be known here.
            TemplateRefusedError: If the template refuses.
        """


class BodyRenderer:
    """Renders chat bodies nearly as sent: the bundled runner and engines of no known kind.

    Both flatten content. The runner parses the arguments of tool calls, as vLLM does; an unknown
    engine is taken to hand them to the template as the text they are.
    """

    def __init__(
        self, template: ChatTemplate, *, kind: EngineKind, default_kwargs: Mapping[str, Any]
    ) -> None:
        self._template = template
        self._shape = runner_message if kind == "runner" else message_as_sent
        self._default_kwargs = default_kwargs

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text.

        Raises:
            NotTextError: If it cannot be known here.
            TemplateRefusedError: If the template refuses.
        """
        form = self._template.content_format
        asked = body.get("chat_template_kwargs") or {}
        if not isinstance(asked, dict):
            raise NotTextError("chat_template_kwargs must be an object")
        if body.get("reasoning_effort") is not None:
            asked = {"reasoning_effort": body["reasoning_effort"], **asked}
        shape = self._shape
        return self._template.render(
            [shape(message, form) for message in messages_of(body)],
            tools=body.get("tools"),
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            continue_final_message=bool(body.get("continue_final_message", False)),
            documents=body.get("documents"),
            kwargs={**self._default_kwargs, **asked},
        )


def build_renderer(
    kind: EngineKind, template: ChatTemplate, options: RenderOptions | None = None
) -> Renderer:
    """Return what renders as engines of a kind do.

    Raises:
        ValueError: If there is no such kind.
    """
    options = options or RenderOptions()
    defaults = options.default_kwargs
    if kind == "vllm":
        return VllmRenderer(
            template, default_kwargs=defaults, drops_unused_tools=options.drops_unused_tools
        )
    if kind == "sglang":
        return SglangRenderer(
            template, default_kwargs=defaults, keeps_tool_order=options.keeps_tool_order
        )
    if kind in ("runner", "openai"):
        return BodyRenderer(template, kind=kind, default_kwargs=defaults)
    raise ValueError(f"no such kind of engine: {kind}")


def render(renderer: Renderer | None, body: Mapping[str, Any]) -> str:
    """Return the prompt text of a chat body.

    Raises:
        TemplateRefusedError: Whatever stands in the way of knowing it.
    """
    if renderer is None:
        raise TemplateRefusedError("the model has no chat template")
    if body.get("chat_template"):
        raise TemplateRefusedError("the request brings its own chat template")
    if body.get("truncate_prompt_tokens") is not None:
        raise TemplateRefusedError("the request has its prompt truncated")
    try:
        return renderer.render(body)
    except TemplateRefusedError:
        raise
    except NotTextError as error:
        raise TemplateRefusedError(str(error)) from error
    except Exception as error:
        # Bodies come from clients: deep nesting, odd types and huge numbers end up here.
        raise TemplateRefusedError(f"{type(error).__name__}: {error}") from error


def given_token_ids(kind: EngineKind, body: Mapping[str, Any]) -> Any:
    """Return the prompt's token ids where a chat body brings them, None where it does not.

    They are not checked.
    """
    if kind == "sglang":
        return body.get("input_ids")
    params = body.get("kv_transfer_params") if kind == "vllm" else None
    return params.get("prompt_token_ids") if isinstance(params, dict) else None


def fingerprint(
    kind: EngineKind, tokenizer: str, template: ChatTemplate | None, options: RenderOptions
) -> str:
    """Return the hex identity of all that turns a body into tokens: equal means equal prompts."""
    identity = [
        kind,
        tokenizer,
        template.source if template else None,
        template.timezone if template else None,
        dict(options.default_kwargs),
        options.drops_unused_tools,
        options.keeps_tool_order,
    ]
    text = json.dumps(identity, sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

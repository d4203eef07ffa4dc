"""How a template wants a message's content: as text, or as a list of parts it loops over.

Engines read that off the template's syntax tree, each by rules of its own; what they conclude
decides how content is handed to the template, so the same is concluded here.

Source: vLLM 0.32 ``renderers/hf.py``; SGLang ``srt/parser/jinja_template_utils.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

ContentFormat: TypeAlias = Literal["string", "openai"]

# Any of these words in a template makes SGLang take it for a multimodal one.
_SGLANG_MEDIA_WORDS = ("image", "audio", "video", "vision")
# SGLang looks at loops over the content of variables with these names only.
_SGLANG_MESSAGE_NAMES = ("message", "msg", "m")


class _UnclearError(Exception):
    """vLLM gives up on a tree of this shape and takes the content for text."""


def vllm_content_format(tree: nodes.Template) -> ContentFormat:
    """Say what vLLM concludes from a parsed template."""
    try:
        loops_over_content = next(_loops_over_content(tree), None) is not None
    except _UnclearError:
        return "string"
    return "openai" if loops_over_content else "string"


def sglang_content_format(source: str, tree: nodes.Template) -> ContentFormat:
    """Say what SGLang concludes from a template's text and tree."""
    if any(word in source for word in _SGLANG_MEDIA_WORDS):
        return "openai"
    for loop in tree.find_all(nodes.For):
        if any(_is_access(loop.iter, name, "content") for name in _SGLANG_MESSAGE_NAMES):
            return "openai"
    return "string"


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    items = _message_names(tree)
    macro_names = _macro_content_names(tree, items)
    for loop in tree.find_all(nodes.For):
        over = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if any(_is_access(loop.iter, item, "content") for item in items):
            found = True
        elif id(loop) in macro_names:
            found = over in macro_names[id(loop)]
        else:
            found = over == "content"
        if found:
            _target_name(loop.target)
            yield loop


def _message_names(tree: nodes.Template) -> list[str]:
    """Return the variables that stand for one message."""
    names = _aliases(tree, "messages")
    return [
        _target_name(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_is_access(loop.iter, name) for name in names)
    ]


def _macro_content_names(tree: nodes.Template, items: list[str]) -> dict[int, set[str]]:
    """Return, for each loop in a macro, the macro's parameters that are given a content."""
    found: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = {argument.name for argument in macro.args}
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            by_position = zip((a.name for a in macro.args), call.args, strict=False)
            by_name = ((k.key, k.value) for k in call.kwargs if k.key in names)
            given |= {
                name
                for name, value in (*by_position, *by_name)
                if any(_is_access(value, item, "content") for item in items)
            }
        for loop in macro.find_all(nodes.For):
            # A macro within a macro: the later one decides, unless it is given nothing.
            if given or id(loop) not in found:
                found[id(loop)] = given
    return found


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return ``name`` and every variable that is assigned from it."""
    found = {name}
    pending = [name]
    while pending:
        current = pending.pop()
        for assign in tree.find_all(nodes.Assign):
            if not _is_access(assign.node, current):
                continue
            target = _target_name(assign.target)
            if target not in found:
                found.add(target)
                pending.append(target)
    return found


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnclearError
    return target.name


def _is_access(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Say whether an expression is ``name`` (or ``name.key``), perhaps filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            is_key = isinstance(node, nodes.Getattr) and node.attr == key
        if not is_key:
            return False
        node = node.node  # type: ignore[union-attr]
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name

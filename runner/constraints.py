"""Requests for answers of a given form, all refused: this runner holds no model to a grammar.

An answer that ignored them would look right most of the time, which is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.errors import ApiError, invalid

if TYPE_CHECKING:
    from runner.fields import Fields

# How servers of this API family call their grammars -> the values that ask for nothing.
_GRAMMARS: Mapping[str, tuple[object, ...]] = {
    # vLLM's
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structural_tag": (),
    # SGLang's and llama.cpp's
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
}


def refuse_constraints(fields: Fields) -> None:
    """Check that a body leaves the form of the answer to the model.

    Raises:
        ApiError: 400 naming the field that does not.
    """
    values = fields.values
    for name, neutral in _GRAMMARS.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            raise _unsupported(name, f"`{name}`")
    wanted = fields.object("response_format")
    if wanted is not None and (kind := wanted.string("type", "")) != "text":
        if not kind:
            raise wanted.refuse("type", "a non-empty string")
        raise _unsupported("response_format", f"`response_format` of type {kind}")
    # The second is what the first was called before tools.
    for name in ("tool_choice", "function_call"):
        choice = values.get(name)
        if isinstance(choice, Mapping):
            raise _unsupported(name, f"`{name}` of a named function")
        if choice not in (None, "auto", "none"):
            raise _unsupported(name, f"`{name}` {fields.string(name, '')}")
    for tool in fields.objects("tools") or ():
        function = tool.object("function")
        if function is not None and function.boolean("strict"):
            raise _unsupported(function.name("strict"), f"`{function.name('strict')}`")


def _unsupported(param: str, what: str) -> ApiError:
    return invalid(
        f"{what} is not supported: this runner does not constrain what a model writes. Describe "
        "the form you want in the prompt, check the answer, and leave this out",
        param,
        "unsupported_parameter",
    )

"""What is wrong with a value, in words of whoever writes the configuration.

Pydantic speaks of tuples, models and patterns; a file has lists, mappings and names. Values are
shown only where they cannot be secrets: numbers and words out of a fixed list.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from gateway.config.root import Settings
from gateway.config.section import ENV_NAME, WORKER_ID, Section
from gateway.config.tenants import TENANT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import ErrorDetails

_LIST = "expected a list ([a, b], or lines that begin with -)"
_MAPPING = "expected a mapping (key: value)"
# Kinds of value that did not come; what came instead is named by its kind alone.
_KINDS = {
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "string_type": "expected text (in quotes where YAML reads it as something else)",
}
# Told with the value that came.
_VALUES = {
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "literal_error": "expected {expected}",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} at least",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected {le} at most",
}
_OTHERS = {
    "missing": "is required",
    "too_short": "expected {min_length} at least",
    "string_too_short": "expected {min_length} characters at least",
    "string_too_long": "expected {max_length} characters at most",
    "union_tag_not_found": "needs a type",
    "union_tag_invalid": "type: expected one of {expected_tags}",
}
_PATTERNS = {
    ENV_NAME: "expected the name of an environment variable (letters, digits and _)",
    WORKER_ID: "expected letters, digits and . _ : - only",
    TENANT_NAME: "expected printable ASCII without commas",
}
# A longer value is no slip of the pen that would have to be shown.
_SHOWN_CHARS = 40


def in_words(problem: ErrorDetails, model: type[Section] = Settings) -> str:
    """Say what was expected, and what came where that may be shown.

    Args:
        problem: One of a ``ValidationError``'s.
        model: The section that was validated; unknown keys are compared with its own.
    """
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(problem["loc"], model)
    if kind == "string_pattern_mismatch" and (text := _PATTERNS.get(context["pattern"])):
        return text
    if kind in _KINDS:
        return f"{_KINDS[kind]}, got {_kind_of(problem['input'])}"
    if kind in _VALUES:
        return f"{_filled(_VALUES[kind], context)}, got {_shown(problem['input'])}"
    if kind in _OTHERS:
        return _filled(_OTHERS[kind], context)
    return problem["msg"].removeprefix("Value error, ")


def _unknown(location: tuple[str | int, ...], model: type[Section]) -> str:
    name, keys = str(location[-1]), _keys_at(location[:-1], model)
    told = f"unknown key {name!r}"
    if close := get_close_matches(name, keys, n=1):
        return f"{told}; did you mean {close[0]!r}?"
    return f"{told}; expected one of {', '.join(keys)}" if keys else told


def _keys_at(location: tuple[str | int, ...], model: type[Section]) -> list[str]:
    """Return the keys of the section at a place, which may name the ``type`` of a section."""
    sections: list[type[Section]] = [model]
    for part in location:
        if isinstance(part, int):
            continue
        fields = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
        if fields:
            sections = [found for field in fields for found in _sections(field)]
        else:
            sections = [s for s in sections if part in _types_of(s)]
    return sorted({key for section in sections for key in section.model_fields})


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _types_of(section: type[Section]) -> tuple[Any, ...]:
    field = section.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _filled(text: str, context: Mapping[str, Any]) -> str:
    return text.format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})


def _kind_of(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return _kind_of(value)
    return repr(value) if len(str(value)) <= _SHOWN_CHARS else _kind_of(value)

"""YAML as JSON values, with the line each of them stands on.

Scalars are read by JSON's rules: what YAML 1.1 makes of ``yes``, ``1:30``, ``010`` or a date would
send other bytes to the engine than the application does.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

Location = tuple[str | int, ...]

# Ten thousand inline documents have a tenth of it; a nest of aliases passes it in no time.
MAX_VALUES = 500_000

_SURROGATE = re.compile("[\ud800-\udfff]")

_BOOL, _INT, _FLOAT, _NULL, _STR, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "str", "merge")
)


class YamlError(Exception):
    """The text is no YAML of this kind; the message begins with file and line."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with JSON's scalars; ``<<`` still merges mappings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for tag, pattern, first in (
    (_BOOL, r"true|false", "tf"),
    (_INT, r"-?(?:0|[1-9]\d*)", "-0123456789"),
    (_FLOAT, r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", "-0123456789"),
    (_NULL, r"null|~|", ["n", "~", ""]),
    (_MERGE, r"<<", "<"),
):
    _Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list(first))


def load(text: str, name: str) -> tuple[dict[str, Any], dict[Location, str]]:
    """Return the mapping in ``text`` and where each value stands.

    Args:
        text: A YAML document.
        name: Its file name, for messages.

    Returns:
        JSON values, and ``name:line`` by location; the location of everything is ``()``.

    Raises:
        YamlError: If it is no YAML, no mapping, or a key stands twice.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        lines: dict[Location, str] = {(): f"{name}:1"}
        _collect(node, (), name, lines)
        values = yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader with fewer scalars
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        indented = "; YAML is indented by spaces, not by tabs" if "'\\t'" in what else ""
        raise YamlError(f"{name}{line}: not valid YAML: {what}{indented}") from error
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits; 1,000 brackets
        raise YamlError(f"{name}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        got = "nothing: the file is empty" if values is None else type(values).__name__
        raise YamlError(f"{name}:1: expected a mapping, got {got}")
    return values, lines


def line_of(lines: dict[Location, str], location: Location) -> str:
    """Name the most specific known place of ``location``."""
    for length in range(len(location), 0, -1):
        if (found := lines.get(location[:length])) is not None:
            return found
    return lines[()]


def _collect(node: yaml.Node | None, at: Location, name: str, out: dict[Location, str]) -> None:
    if node is None:
        return
    if len(out) > MAX_VALUES:
        raise YamlError(f"{name}: expected at most {MAX_VALUES} values, aliases counted in full")
    out.setdefault(at, f"{name}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        raise YamlError(f"{out[at]}: expected whole characters, got half of a surrogate pair")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            place = f"{name}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise YamlError(f"{place}: expected a text as key")
            if key.value in seen:
                raise YamlError(f"{place}: {key.value}: stands twice")
            seen.add(key.value)
            _collect(value, (*at, key.value), name, out)
            out[(*at, key.value)] = place
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _collect(item, (*at, index), name, out)

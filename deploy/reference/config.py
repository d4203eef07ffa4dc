"""docs/reference/config.md: every key of the configuration, from its schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gateway.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """# Configuration

Written by `python -m deploy.reference` from the schema, which `warmlane config schema` prints for \
editors. The file is YAML and closed: an unknown key is an error that names its line. Any key can \
be set in the environment too: `WARMLANE_SERVER__PORT=9000`. `warmlane config check` checks a \
file, `warmlane config show` says where each value came from, and [Reload](../reload.md) which \
ones are taken over without a restart. `[]` marks a list.
"""

Node = dict[str, Any]


def page() -> str:
    """Return the page."""
    schema = Settings.model_json_schema()
    sections = _sections(schema, schema["$defs"], "", set())
    return "\n".join([HEAD, *sections])


def _sections(section: Node, defs: dict[str, Node], path: str, seen: set[str]) -> Iterator[str]:
    """Yield the table of one section, then those of the sections in it."""
    rows, below = [], []
    for key, value in section["properties"].items():
        names = list(_names(value))
        place = f"{path}{key}[]" if "items" in value else f"{path}{key}"
        below += [(name, place) for name in names if name not in seen]
        seen.update(names)
        default = _default(section, key, value, is_section=bool(names))
        text = value.get("description") or defs[names[0]]["description"]
        rows.append(f"| `{key}` | {_kind(value, names)} | {default} | {' '.join(text.split())} |")
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    yield "\n".join([*_title(section, path), *head, *rows, ""])
    for name, place in below:
        yield from _sections(defs[name], defs, f"{place}.", seen)


def _title(section: Node, path: str) -> list[str]:
    if not path:
        return ["## The file", ""]
    kind = section["properties"].get("type", {}).get("const")
    which = f", `type: {kind}`" if kind else ""
    return [f"## `{path.rstrip('.')}`{which}", "", section["description"], ""]


def _names(value: Node) -> Iterator[str]:
    """Yield the names of the sections that a key holds."""
    for choice in (value, value.get("items", {}), *value.get("oneOf", ()), *value.get("anyOf", ())):
        if "$ref" in choice:
            yield choice["$ref"].rsplit("/", 1)[1]


def _default(section: Node, key: str, value: Node, *, is_section: bool) -> str:
    if key in section.get("required", ()):
        return "required"
    if is_section or "default" not in value:
        return ""
    return f"`{json.dumps(value['default'])}`"


def _kind(value: Node, names: list[str]) -> str:
    if value.get("type") == "array":
        return "list" if names else f"list of {_kind(value['items'], [])}"
    if names:
        return "section"
    if "anyOf" in value:
        return ", ".join(_kind(choice, []) for choice in value["anyOf"])
    if "enum" in value or "const" in value:
        return ", ".join(f"`{word}`" for word in value.get("enum", (value.get("const"),)))
    if value.get("type") == "object":
        return "map"
    least = value.get("minimum", value.get("exclusiveMinimum"))
    above = " > " if "exclusiveMinimum" in value else " >= "
    return str(value["type"]) + (f"{above}{least:g}" if least is not None else "")

"""Generates ``values.schema.json``: closed, from defaults, ``SHAPES`` and the gateway's schema.

It keeps to what draft 7 knows, which every Helm 3 and 4 reads.
"""

from __future__ import annotations

import copy
import json
from fnmatch import fnmatchcase
from typing import Any

import yaml

from deploy.chart.shapes import SHAPES, VERBATIM, Schema, list_of
from deploy.chart.values import CHART, VALUES, read_values
from gateway.config import Settings

SCHEMA = CHART / "values.schema.json"

# Longer ones would not fit into names of pods together with a release's.
SET_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$"}


def schema_text() -> str:
    """Return the whole schema as it stands in the file."""
    defaults = yaml.safe_load(VALUES.read_text("utf-8"))
    comments = {value.path: value.comment for value in read_values(VALUES.read_text("utf-8"))}
    properties = _closed(defaults, (), comments)["properties"]
    definitions = _gateway_definitions()
    engine = properties["engine"]
    # A pool of a set has a name and models already.
    pool = copy.deepcopy(definitions["PoolConfig"])
    for key in ("required", "description"):
        pool.pop(key, None)
    definitions["SetPool"] = pool
    engine["properties"]["pool"] = {"$ref": "#/$defs/SetPool"}
    # Sets need not say what engine says already.
    definitions["Engine"] = _without_required(engine)
    one_set = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {
            "name": SET_NAME,
            **{key: {"$ref": f"#/$defs/Engine/properties/{key}"} for key in engine["properties"]},
        },
    }
    properties["workers"] = {**properties["workers"], **list_of(one_set)}
    properties["config"] = {"$ref": "#/$defs/Settings"}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart warmlane",
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _closed(
    defaults: dict[str, Any], at: tuple[str, ...], comments: dict[tuple[str, ...], str]
) -> Schema:
    """Return the closed shape of a section; without one of its own, a value has its default's."""
    properties: Schema = {}
    for key, default in defaults.items():
        path = (*at, key)
        shape = _shape(path)
        if shape is None:
            is_section = isinstance(default, dict) and default
            shape = _closed(default, path, comments) if is_section else _of_type(default)
        if comment := comments.get(path):
            shape = {"description": comment, **shape}
        properties[key] = shape
    # All have defaults, so that only a null takes one away.
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


def _without_required(section: Schema) -> Schema:
    """Return a section in which nothing has to be said, nor in those below."""
    properties = {
        key: _without_required(one) if "properties" in one else one
        for key, one in section["properties"].items()
    }
    shape = {key: value for key, value in section.items() if key != "required"}
    return {**shape, "properties": properties}


def _shape(path: tuple[str, ...]) -> Schema | None:
    dotted = ".".join(path)
    for pattern, shape in SHAPES.items():
        if fnmatchcase(dotted, pattern):
            return copy.deepcopy(shape)
    return None


def _of_type(default: Any) -> Schema:
    if isinstance(default, bool):
        return {"type": "boolean"}
    if isinstance(default, int):
        return {"type": "integer"}
    if isinstance(default, str):
        return {"type": "string"}
    # Of lists and mappings only those of other projects' objects are left.
    return list_of(VERBATIM) if isinstance(default, list) else dict(VERBATIM)


def _gateway_definitions() -> Schema:
    """Return ``warmlane config schema`` as definitions; pools are the chart's to add."""
    whole = Settings.model_json_schema()
    definitions: Schema = whole.pop("$defs")
    definitions["Settings"] = whole
    whole.pop("required")
    return {name: _plain(shape) for name, shape in definitions.items()}


def _plain(shape: Any) -> Any:
    """Leave out what is for programs that draw forms, and what draft 7 does not know."""
    if isinstance(shape, list):
        return [_plain(item) for item in shape]
    if not isinstance(shape, dict):
        return shape
    return {
        key: {name: _plain(item) for name, item in value.items()}
        if key == "properties"
        else _plain(value)
        for key, value in shape.items()
        if key not in ("title", "default", "discriminator")
    }

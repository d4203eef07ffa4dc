"""Where settings come from: flag > environment > YAML file > default, each value with its source.

Errors name the file and line, the environment variable or the flag that holds the wrong value.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from gateway.config import Settings
from gateway.config.cross_checks import problems
from gateway.config.words import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "WARMLANE_"
# The bundled runner reads its own variables under this prefix.
OTHERS_PREFIX = "WARMLANE_RUNNER__"
LISTS = frozenset({"pools", "routes", "tenants"})
Location = tuple[str | int, ...]
# Up to the last @ before the path: passwords hold any character.
_USERINFO = re.compile(r"://[^/?#]*@")
_SECRET_QUERY = re.compile(r"(?i)([?&][^=&]*(?:key|token|secret|pass|auth)[^=&]*)=[^&#]*")


class ConfigError(Exception):
    """The configuration cannot be used; the message is for the operator, one problem per line."""


@dataclass(slots=True)
class Layered:
    """Raw values merged from all layers, with the place each leaf came from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Location, str] = field(default_factory=dict)

    def merge(self, values: Mapping[str, Any], sources: Mapping[Location, str]) -> None:
        """Lay ``values`` over what is there; lists are replaced as a whole."""
        _overlay(self.values, values)
        self.sources.update(sources)

    def source_of(self, location: Location) -> str:
        """Name the most specific known place of ``location``."""
        for length in range(len(location), 0, -1):
            if (found := self.sources.get(location[:length])) is not None:
                return found
        return self.sources.get((), "no --config FILE")


def load(
    path: str | None,
    *,
    flags: Mapping[Location, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Settings, Layered]:
    """Read and validate the configuration.

    Args:
        path: YAML file, or None when flags and environment say everything.
        flags: Command-line values by location, for example ``{("server", "port"): 8080}``.
        environ: Environment to read (default: this process's).

    Raises:
        ConfigError: If the file cannot be read or any value is wrong or unknown.
    """
    layered = Layered()
    if path is not None:
        layered.merge(*_read_yaml(path))
    layered.merge(*_read_environ(os.environ if environ is None else environ))
    for location, value in (flags or {}).items():
        layered.merge(_nest(location, value), {location: f"flag --{location[-1]}"})
    try:
        settings = Settings.model_validate(layered.values)
    except ValidationError as error:
        raise ConfigError(_explain(error, layered)) from None
    found = [_problem(layered, location, text) for location, text in problems(settings)]
    if found:
        raise ConfigError("\n".join(dict.fromkeys(found)))
    return settings, layered


def describe(settings: Settings, layered: Layered) -> list[tuple[str, Any, str]]:
    """Return (dotted key, value, source) of every leaf, in the order of the schema.

    Secrets stand in the environment, under the names that are shown; passwords in URLs do not show.
    """
    rows: list[tuple[str, Any, str]] = []

    def walk(value: Any, at: Location) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, (*at, key))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                walk(item, (*at, index))
        else:
            shown = redacted(value) if isinstance(value, str) else value
            rows.append((".".join(str(part) for part in at), shown, _leaf_source(layered, at)))

    walk(settings.model_dump(mode="json"), ())
    return rows


def redacted_document(settings: Settings) -> dict[str, Any]:
    """Return all values as plain JSON, without what URLs may hold of users and passwords."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(item) for key, item in value.items()}
        if isinstance(value, list):
            return [shown(item) for item in value]
        return redacted(value) if isinstance(value, str) else value

    document: dict[str, Any] = shown(settings.model_dump(mode="json"))
    return document


def redacted(text: str) -> str:
    """Return a text without the user, the password and the keys that a URL may hold."""
    if "://" not in text:
        return text
    shown = _USERINFO.sub("://***@", text)
    return _SECRET_QUERY.sub(r"\1=***", shown)


def _leaf_source(layered: Layered, at: Location) -> str:
    """Name the source of a leaf; a value under a known section may still be a default."""
    value: Any = layered.values
    for part in at:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return "default"
    return layered.source_of(at)


def _read_yaml(path: str) -> tuple[dict[str, Any], dict[Location, str]]:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "expected text in UTF-8"
        raise ConfigError(f"{path}: cannot read the configuration: {why}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_problem(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if values is None:
        return {}, {(): path}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected a mapping of sections, got {type(values).__name__}")
    sources: dict[Location, str] = {}
    try:
        _lines(node, (), path, sources)
    except RecursionError:
        raise ConfigError(f"{path}: an alias (*) stands inside its own anchor (&)") from None
    return values, sources


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Say on which line a file is no YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    indented = "; YAML is indented by spaces, not by tabs" if "'\\t'" in what else ""
    return f"{line}: not valid YAML: {what}{indented}"


def _lines(node: yaml.Node | None, at: Location, path: str, out: dict[Location, str]) -> None:
    if node is None:
        return
    out.setdefault(at, f"{path}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ConfigError(
                    f"{path}:{key.start_mark.line + 1}: {key.value}: expected text as a key; put "
                    "it into quotes"
                )
            if key.value in seen:
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: {key.value}: stands twice")
            seen.add(key.value)
            out[(*at, key.value)] = f"{path}:{key.start_mark.line + 1}"
            _lines(value, (*at, key.value), path, out)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _lines(item, (*at, index), path, out)


def _read_environ(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[Location, str]]:
    """Take ``WARMLANE_SECTION__KEY`` and ``WARMLANE_SECTION`` variables; values are YAML."""
    values: dict[str, Any] = {}
    sources: dict[Location, str] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name.startswith(OTHERS_PREFIX):
            continue
        location: Location = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
        # Others have no __ either: WARMLANE_ADMIN_TOKEN, and what Kubernetes says of a Service.
        if len(location) == 1 and location[0] not in Settings.model_fields:
            continue
        if location[0] in LISTS and len(location) > 1:
            raise ConfigError(
                f"environment variable {name}: {location[0]}: is a list, which a variable says as "
                f"a whole: {ENV_PREFIX}{location[0].upper()}='[{{...}}]'"
            )
        try:
            value = yaml.safe_load(environ[name])
        except yaml.YAMLError:
            value = environ[name]
        _overlay(values, _nest(location, value))
        sources[location] = f"environment variable {name}"
    return values, sources


def _nest(location: Location, value: Any) -> dict[str, Any]:
    for key in reversed(location):
        value = {key: value}
    return dict(value)


def _overlay(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value)
        else:
            base[key] = value


def _explain(error: ValidationError, layered: Layered) -> str:
    problems = error.errors(include_url=False)
    lines = []
    for problem in problems:
        location = _written(problem["loc"], layered.values)
        # A bad item also makes its list "too short"; only the deepest problem helps.
        if any(p["loc"][: len(problem["loc"])] == problem["loc"] != p["loc"] for p in problems):
            continue
        lines.append(_problem(layered, location, in_words(problem)))
    return "\n".join(dict.fromkeys(lines))


def _written(location: Location, values: Any) -> Location:
    """Return a location as it stands in the file: without the ``type`` that chose its section."""
    at: list[str | int] = []
    is_chosen = False
    for part in location:
        if isinstance(values, dict) and part == values.get("type") and not is_chosen:
            is_chosen = True
            continue
        at.append(part)
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            values = None
    return tuple(at)


def _problem(layered: Layered, location: Location, text: str) -> str:
    dotted = ".".join(str(part) for part in location) or "configuration"
    return f"{layered.source_of(location)}: {dotted}: {text}"

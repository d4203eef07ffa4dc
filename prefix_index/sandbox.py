"""jinja2's immutable sandbox with the detours taken out of what every chat template does.

Templates are code from model hubs, so the sandbox stays: only look-ups whose answer its checks
cannot change skip them, and a rendering does not copy the environment's globals one by one. A
template prints the same, refuses the same and is kept from the same as in the original.

Source: jinja2 3.1 ``sandbox.py`` (``SandboxedEnvironment.getattr``), ``environment.py``
(``Template.render``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Template

# Plain values of a loop; its methods and private names go through the checks.
_LOOP_VALUES = frozenset(
    {"first", "last", "index", "index0", "revindex", "revindex0", "length", "previtem", "nextitem"}
)
# An attribute of a dict that is none of these can only be one of its keys.
_DICT_NAMES = frozenset(dir(dict))
# Methods of a text return new values and reach nothing; the two that format are wrapped.
_TEXT_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map")
)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute`` as a template sees it: an attribute, else a member."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES and attribute in obj:
                return obj[attribute]
        elif (kind is LoopContext and attribute in _LOOP_VALUES) or (
            kind is str and attribute in _TEXT_METHODS
        ):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class Renderer:
    """A compiled template, ready to print. Reentrant.

    Args:
        template: Template of any environment that loads and imports nothing.
        constants: Variables of every rendering.
    """

    def __init__(self, template: Template, constants: Mapping[str, Any]) -> None:
        self._environment = template.environment
        self._root = template.root_render_func
        self._name = template.name
        self._blocks = template.blocks
        # Copied once: the template's own globals are a chain of maps, slow to walk.
        self._base = {**template.globals, **constants}

    def __call__(self, variables: Mapping[str, Any]) -> str:
        """Return what the template prints; raises whatever its expressions raise."""
        environment = self._environment
        context = environment.context_class(
            environment, {**self._base, **variables}, self._name, self._blocks
        )
        return environment.concat(self._root(context))

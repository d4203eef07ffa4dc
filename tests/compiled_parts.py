"""What the tests of the compiled build know of the sources: which are compiled, and their trees."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
_WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
COMPILED = [Path(name) for name in _WHEEL["hooks"]["custom"]["modules"]]
# Those of the wheel's packages that import compiled modules, or may.
PACKAGES = ("gateway", "prefix_index", "runner", "warmup")


def module_name(file: Path) -> str:
    """Return the module of a file whose path is relative to the project's root."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file of the project."""
    return ast.parse((REPOSITORY / file).read_text())


def sources() -> list[Path]:
    """Return every file of the product, relative to the project's root."""
    found = (file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py"))
    return sorted(file.relative_to(REPOSITORY) for file in found)


@cache
def imported(file: Path) -> dict[str, tuple[str, str]]:
    """Return local name -> (module, name there) of everything a module imports by name."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@cache
def only_for_types(file: Path) -> set[str]:
    """Return the names a module has for the type checker alone."""
    return {
        name
        for block in tree_of(file).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        for name in _bound(node)
    }


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.ImportFrom() | ast.Import():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.ClassDef():
            return [node.name]
    return []

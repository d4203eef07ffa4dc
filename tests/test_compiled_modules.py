"""The modules that may be compiled: what mypyc gets wrong without a word stands in none of them.

Each rule is a fault that was seen: a crash at import, an exception of the wrong class, a TypeError
where plain Python goes on. What the compiler itself refuses, and what shows in any use, is left to
``check_compiled.py``.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.compiled_parts import (
    COMPILED,
    REPOSITORY,
    imported,
    module_name,
    only_for_types,
    sources,
    tree_of,
)

BY_MODULE = {module_name(file): file for file in sources()}
# Bases whose classes are made at run time: msgspec and pydantic read what a compiler has taken.
MADE_AT_RUN_TIME = {"Struct", "BaseModel", "Section"}
# Which of its parameters a type holds weakly. Each such object of the product is annotated.
WEAK = {"WeakKeyDictionary": 0, "WeakValueDictionary": 1, "WeakSet": 0, "ref": 0}


def test_the_list_names_each_file_once_and_in_order() -> None:
    assert all((REPOSITORY / file).is_file() for file in COMPILED)
    assert sorted(set(COMPILED)) == COMPILED


def test_what_a_class_names_in_its_annotations_is_there_at_run_time() -> None:
    missing = {
        f"{file}: {each.name}: {name.id}"
        for file in COMPILED
        for each in classes(tree_of(file))
        if is_read_at_run_time(each)
        for field in each.body
        if isinstance(field, ast.AnnAssign)
        for name in ast.walk(field.annotation)
        if isinstance(name, ast.Name) and name.id in only_for_types(file)
    }
    assert missing == set()


def test_no_function_catches_two_classes_under_one_name() -> None:
    shared = {
        f"{file}: {function.name}: {name}"
        for file in COMPILED
        for function in ast.walk(tree_of(file))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, times in Counter(caught(function)).items()
        if times > 1
    }
    assert shared == set()


def test_classes_stand_at_module_level_and_are_not_made_at_run_time() -> None:
    wrong = {
        f"{file}: {each.name}"
        for file in COMPILED
        for each in classes(tree_of(file))
        if each not in tree_of(file).body or MADE_AT_RUN_TIME & set(base_names(each))
    }
    assert wrong == set()


def test_nobody_asks_a_compiled_object_for_slots_or_a_dict() -> None:
    asked = {
        f"{file}: {ast.unparse(node)}"
        for file in COMPILED
        for node in ast.walk(tree_of(file))
        if (isinstance(node, ast.Attribute) and node.attr in {"__slots__", "__dict__"})
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "vars")
    }
    assert asked == set()


def test_nobody_reads_the_cause_of_an_error_alone() -> None:
    # Compiled, ``raise ... from`` sets none: what was caught is the context.
    alone = {
        f"{file}: {ast.unparse(node)}"
        for file in sources()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute)
        and node.attr == "__cause__"
        and f"{ast.unparse(node)} or {ast.unparse(node.value)}.__context__"
        not in ast.unparse(tree_of(file))
    }
    assert alone == set()


def test_no_class_that_stays_interpreted_derives_from_a_compiled_one() -> None:
    derived = {
        f"{file}: {each.name}({base})"
        for file in sources()
        if file not in COMPILED
        for each in classes(tree_of(file))
        for base in base_names(each)
        if is_compiled(file, base)
    }
    assert derived == set()


def test_no_weak_reference_is_taken_to_what_is_compiled() -> None:
    weak = {
        f"{file}: {name.id}"
        for file in sources()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Subscript)
        for name in weakly_held(node)
        if isinstance(name, ast.Name) and is_compiled(file, name.id)
    }
    assert weak == set()


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield every class of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def base_names(each: ast.ClassDef) -> list[str]:
    """Return the names of a class's bases, without their parameters and modules."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in each.bases)
    return [ast.unparse(base).split(".")[-1] for base in plain]


def is_read_at_run_time(each: ast.ClassDef) -> bool:
    """Whether making the class evaluates its annotations."""
    decorated = any(ast.unparse(by).startswith("dataclass") for by in each.decorator_list)
    return decorated or bool({"NamedTuple", "TypedDict"} & set(base_names(each)))


def weakly_held(node: ast.Subscript) -> Iterator[ast.AST]:
    """Yield the names of what an annotation says that weak references are taken to."""
    held = WEAK.get(ast.unparse(node.value).split(".")[-1])
    if held is not None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        yield from ast.walk(parts[held])


def caught(function: ast.AST) -> list[str]:
    """Return the name of each clause of a function that catches under one."""
    clauses = (node for node in own_nodes(function) if isinstance(node, ast.ExceptHandler))
    return [clause.name for clause in clauses if clause.name is not None]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a function, without the functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def is_compiled(file: Path, name: str) -> bool:
    """Whether a name in a file is that of a compiled class, however often it was passed on."""
    seen: set[tuple[Path, str]] = set()
    while (file, name) not in seen:
        seen.add((file, name))
        tree = tree_of(file)
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
            return file in COMPILED
        module, name = imported(file).get(name, ("", name))
        if module not in BY_MODULE:
            return False
        file = BY_MODULE[module]
    return False

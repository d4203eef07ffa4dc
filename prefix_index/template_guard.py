"""A jinja2 environment in which no template can hang or fill the memory.

Chat templates are code from model hubs and read what clients send. jinja2's sandbox keeps them from
the interpreter but not from looping: two nested ``range`` are ten thousand million steps. So the
syntax tree is changed before it is compiled: each loop and each macro call spends from a budget
that belongs to one rendering, text that is kept is measured, and arithmetic and calls that can blow
up a value are checked. What a template prints is not changed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.visitor import NodeTransformer

from prefix_index.sandbox import Renderer, Sandbox
from prefix_index.template_budget import (
    Budget,
    check_count,
    check_format,
    check_power,
    check_product,
    check_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from jinja2.runtime import Context

# Pieces of output that are joined and measured at a time.
_PIECES = 512
_WIDTH_FILTERS = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")

# Expressions whose value can be larger than what goes into them.
_GROWING = (
    nodes.Add,
    nodes.Concat,
    nodes.Mul,
    nodes.Call,
    nodes.Filter,
    nodes.List,
    nodes.Tuple,
    nodes.Dict,
)

BUDGET = "_warmlane_budget"
_EACH, _CALLED, _KEPT, _PRINTED = (f"_warmlane_{n}" for n in ("each", "called", "kept", "printed"))


class GuardedTemplate(Renderer):
    """A compiled template, guarded; reentrant, and may be called from any thread.

    Args:
        environment: What it is compiled in.
        tree: Its syntax tree; changed.
        constants: Variables of every rendering.
    """

    def __init__(
        self, environment: GuardedEnvironment, tree: nodes.Template, constants: Mapping[str, Any]
    ) -> None:
        guarded = _Guard().visit(tree)
        guarded.set_environment(environment)
        code = environment.compile(guarded)
        template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )
        super().__init__(template, constants)

    def __call__(self, variables: Mapping[str, Any]) -> str:
        """Return what the template prints.

        Raises:
            TooMuchError: If it prints or computes too much.
            Exception: Whatever its expressions raise.
        """
        budget = Budget()
        environment = self._environment
        variables = {**self._base, **variables, BUDGET: budget}
        context = environment.context_class(environment, variables, self._name, self._blocks)
        pieces = self._root(context)
        texts: list[str] = []
        while text := "".join(islice(pieces, _PIECES)):
            budget.print(len(text))
            texts.append(text)
        return "".join(texts)


class GuardedEnvironment(Sandbox):
    """The sandbox of chat templates, with bounds on what expressions make."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(
            {_EACH: _each, _CALLED: _called, _KEPT: _kept, _PRINTED: _printed},
        )
        for name in _WIDTH_FILTERS:
            self.filters[name] = _bounded(self.filters[name])
        self.filters["format"] = _bounded_format(self.filters["format"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` unless the result would be huge."""
        if operator == "%":
            if isinstance(left, str):
                check_format(left)
        elif operator == "**":
            check_power(left, right)
        else:
            check_product(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, unless an argument makes the result huge."""
        for value in args:
            check_count(value)
        for value in kwargs.values():
            check_count(value)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ == "replace" and len(args) > 1:
            check_size(owner.count(args[0]) * len(args[1]))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's own ``format`` of a text, unless that has huge widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_format(value.__self__)
        return wrapped


class _Guard(NodeTransformer):
    """Puts the budget into a syntax tree."""

    def __init__(self) -> None:
        self._repeated = 0  # depth of loops and macros
        self._buffered = 0  # depth of what collects its output before it is printed

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._repeated += 1
        self.generic_visit(node)
        self._repeated -= 1
        chars = _text_size(node.body)
        node.iter = _filter(node.iter, _EACH, nodes.Const(chars))
        if node.recursive:
            node.body.insert(0, _step(()))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self._in_buffer(node)
        node.body.insert(0, _step(node.args))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self._in_buffer(node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self._in_buffer(node)
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        self._in_buffer(node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        if self._buffered:
            node.nodes = [
                n if isinstance(n, nodes.TemplateData) else _filter(n, _PRINTED) for n in node.nodes
            ]
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if self._repeated and _can_grow(node.node):
            node.node = _filter(node.node, _KEPT)
        return node

    def _in_buffer(self, node: nodes.Node) -> None:
        self._repeated += 1
        self._buffered += 1
        self.generic_visit(node)
        self._buffered -= 1
        self._repeated -= 1


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _step(names: Iterable[nodes.Name]) -> nodes.Stmt:
    values = nodes.Tuple([nodes.Name(n.name, "load") for n in names], "load", lineno=0)
    return nodes.ExprStmt(_filter(values, _CALLED), lineno=0)


def _text_size(body: list[nodes.Node]) -> int:
    return sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))


def _can_grow(node: nodes.Node) -> bool:
    return isinstance(node, _GROWING) or any(node.find(kind) for kind in _GROWING)


@pass_context
def _each(context: Context, iterable: Iterable[Any], chars: int) -> Iterator[Any]:
    step = context.parent[BUDGET].step
    for item in iterable:
        step(chars)
        yield item


@pass_context
def _called(context: Context, values: tuple[Any, ...]) -> None:
    context.parent[BUDGET].step()
    for value in values:
        if isinstance(value, str):
            check_size(len(value))


@pass_context
def _kept(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        context.parent[BUDGET].keep(value)
    return value


@pass_context
def _printed(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        context.parent[BUDGET].print(len(value))
    return value


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            check_count(value)
        for value in kwargs.values():
            check_count(value)
        return function(*args, **kwargs)

    return _like(checked, function)


def _bounded_format(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_format(str(value))
        return function(value, *args, **kwargs)

    return _like(checked, function)


def _like(checked: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(function, "jinja_pass_arg", None)
    if passed is not None:
        checked.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return checked

"""Which global names the source of a cell reads, and which it binds; pure.

`nbdist.notebook.shipping.plan` asks it before a cell goes to the workers.  The source has
been through IPython's input transformer, so magics and `!` lines are calls of
`get_ipython()` with strings; names inside these strings count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nbdist.notebook.shipping.magic_strings import code_in_magic

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def names_used(source: str) -> frozenset[str]:
    """Find the global names that a cell reads before it has certainly bound them.

    In doubt a name counts as used: what depends on a condition may not have been bound,
    and a function may be called as soon as something mentions it.  Raises SyntaxError.
    """
    flow = _Flow()
    flow.read(_parse(source).body)
    return frozenset(flow.used)


def names_bound(source: str) -> frozenset[str]:
    """Find the names that a cell may bind, or delete, at global level.  Raises SyntaxError."""
    return frozenset(Binding.of(_parse(source).body).all_globals)


def dotted_names(source: str) -> frozenset[tuple[str, ...]]:
    """Find what the cell reaches through dots from a name: `xml.dom.minidom` as three parts."""
    chains = (_chain(node) for node in ast.walk(_parse(source)) if isinstance(node, ast.Attribute))
    return frozenset(chain for chain in chains if chain)


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> ast.Module:
    # Several questions are asked about one source.
    return ast.parse(source)


def _chain(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=inner, attr=name):
            start = _chain(inner)
            return (*start, name) if start else ()
        case _:
            return ()


# --- what code reads, in no order -------------------------------------------------------------


class _Reading(ast.NodeVisitor):
    """Names that code reads in its own scope or looks up outside it, in no order."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> set[str]:
        reading = cls()
        for node in nodes:
            reading.visit(node)
        return reading.names

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self.names.add(node.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.names.add(node.target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # Inside a function the annotation is not evaluated.
        self.names |= _Reading.of([node.target, *([node.value] if node.value else [])])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names |= _reads_when_defined(node) | _reads_when_called(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.names |= _Reading.of(defaults(node.args)) | _reads_when_called(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        now, later = _reads_of_class(node)
        self.names |= now | later

    def visit_ListComp(self, node: Comprehension) -> None:
        self.names |= _reads_of_comprehension(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        self.names |= _Reading.of(code_in_magic(node))
        self.generic_visit(node)


def _reads_when_called(node: Function) -> set[str]:
    """Find the names that the body of a function looks up outside it."""
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
    own = Binding.of(body)
    arguments = {argument.arg for argument in arguments_of(node.args)}
    return _Reading.of(body) - (arguments - own.elsewhere) - own.local - _type_params(node)


def _reads_when_defined(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Find the names in a function's decorators, defaults and annotations."""
    annotations = [argument.annotation for argument in arguments_of(node.args)]
    typed = _Reading.of(part for part in [*annotations, node.returns] if part)
    plain = _Reading.of([*node.decorator_list, *defaults(node.args)])
    return plain | (typed - _type_params(node))


def _reads_of_class(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Find the names that a class reads when it is made, and those that its methods will."""
    inner = _Flow()
    for statement in node.body:
        inner.visit(statement)
    heads = _Reading.of([*node.decorator_list, *node.bases, *node.keywords])
    own = _type_params(node)
    # Methods do not see the names of the class's body.
    later = set().union(*inner.pending.values())
    return (heads | inner.used) - own, later - own


def _reads_of_comprehension(node: Comprehension) -> set[str]:
    first, *others = node.generators
    targets = Binding.of(generator.target for generator in node.generators).names
    results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    inner = _Reading.of([*results, first.target, *first.ifs, *others])
    # The first iterable is evaluated outside.
    return _Reading.of([first.iter]) | (inner - targets)


# --- what code reads before it has bound it ---------------------------------------------------


class _Flow(ast.NodeVisitor):
    """Follows statements in the order in which they run; for a cell, or the body of a class.

    `bound` are the names that are certain to be bound by now, `used` those that were read
    before, `pending` what functions will read when they are called.
    """

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.used: set[str] = set()
        self.pending: dict[str, set[str]] = {}

    def read(self, body: list[ast.stmt]) -> None:
        """Follow a whole cell, and assume that its functions will be called after it."""
        self._visit_all(body)
        for name in [*self.pending]:
            self._load(name)

    def _load(self, name: str) -> None:
        if name not in self.bound:
            self.used.add(name)
        # What mentions a function may call it.
        for inner in self.pending.pop(name, ()):
            self._load(inner)

    def _load_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._load(name)

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # What reads and binds.

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self._load(node.id)
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._load(node.target.id)
        self._visit_all([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value, node.annotation])
        # `x: int` alone binds nothing.
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all([node.value, node.target])

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound |= Binding.of([node]).names

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._load_all(_reads_when_defined(node))
        self._define(node, _reads_when_called(node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        now, later = _reads_of_class(node)
        self._load_all(now)
        self._define(node, later)

    def _define(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, later: set[str]
    ) -> None:
        # The one that was called so before may be in use still.
        self._load_all(self.pending.pop(node.name, ()))
        if node.decorator_list:
            self._load_all(later - {node.name})
            later = set()
        self.bound.add(node.name)
        self.pending[node.name] = later

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._load_all(_Reading.of([node]))

    def visit_ListComp(self, node: Comprehension) -> None:
        self._load_all(_reads_of_comprehension(node))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self._maybe(*code_in_magic(node))

    # What may or may not run.

    def _branches(self, *branches: Callable[[], bool | None]) -> None:
        """Follow each from here; certain is only what all of those bind that do not leave."""
        before, ends = self.bound, []
        for branch in branches:
            self.bound = set(before)
            if not branch():
                ends.append(self.bound)
        self.bound = set.intersection(*ends) if ends else before

    def _run(self, *nodes: ast.AST | None) -> bool:
        """Follow statements; whether the last one leaves."""
        self._visit_all(nodes)
        leaves = (ast.Raise, ast.Return, ast.Continue, ast.Break)
        return bool(nodes) and isinstance(nodes[-1], leaves)

    def _maybe(self, *nodes: ast.AST | None) -> None:
        self._branches(lambda: False, lambda: self._run(*nodes))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches(lambda: self._run(*node.body), lambda: self._run(*node.orelse))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._branches(lambda: self._run(node.body), lambda: self._run(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        for value in node.values[1:]:
            self._maybe(value)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._loop(node.body)
        self._maybe(*node.orelse)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._loop([node.target, *node.body])
        self._maybe(*node.orelse)

    visit_AsyncFor = visit_For

    def _loop(self, nodes: list[Any]) -> None:
        # Also when its last statement leaves: it goes on after the loop.
        self._branches(lambda: False, lambda: self._visit_all(nodes))

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._visit_all([item.context_expr, item.optional_vars])
        names = {name.rpartition(".")[2] for name in _called(node)}
        if names & {"suppress", "raises"}:
            self._maybe(*node.body)
        else:
            self._visit_all(node.body)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        before = set(self.bound)
        handlers = [lambda h=handler: self._handle(h) for handler in node.handlers]
        self._branches(lambda: self._run(*node.body, *node.orelse), *handlers)
        after, self.bound = self.bound, before & self.bound
        self._visit_all(node.finalbody)
        self.bound |= after

    visit_TryStar = visit_Try

    def _handle(self, handler: ast.ExceptHandler) -> bool:
        self._visit_all([handler.type])
        if handler.name is None:
            return self._run(*handler.body)
        self.bound.add(handler.name)
        leaves = self._run(*handler.body)
        self.bound.discard(handler.name)
        return leaves

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        cases = [lambda c=case: self._case(c) for case in node.cases]
        last = node.cases[-1]
        whatever = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        nothing = [] if whatever and last.guard is None else [lambda: False]
        self._branches(*cases, *nothing)

    def _case(self, case: ast.match_case) -> bool:
        self.visit(case.pattern)
        self.bound |= Binding.of([case.pattern]).names
        self._visit_all([case.guard])
        return self._run(*case.body)


def _called(node: ast.With | ast.AsyncWith) -> Iterator[str]:
    for item in node.items:
        if isinstance(item.context_expr, ast.Call):
            yield ast.unparse(item.context_expr.func)


def _type_params(node: ast.AST) -> set[str]:
    """Return the names of Python 3.12's `def f[T]`, which are of the definition itself."""
    return {found.name for found in getattr(node, "type_params", ())}


# --- which names statements bind in their own scope, with no regard to order; pure ------------


Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Binding(ast.NodeVisitor):
    """Names that statements bind in their own scope, with no regard to order."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.elsewhere: set[str] = set()  # Declared `global` or `nonlocal`.
        self._declared_global: set[str] = set()
        self._inner_globals: set[str] = set()

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> Binding:
        """Collect what these nodes bind, as one scope."""
        binding = cls()
        for node in nodes:
            binding.visit(node)
        return binding

    @property
    def all_globals(self) -> set[str]:
        """For statements at global level: with what functions bind as `global`."""
        return self.names | self._inner_globals

    @property
    def local(self) -> set[str]:
        """For the body of a function: its local names."""
        return self.names - self.elsewhere

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        self._visit_all([*node.decorator_list, *defaults(node.args)])
        self._enter(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all(defaults(node.args))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._enter(node.body)

    def visit_ListComp(self, node: Comprehension) -> None:
        # Its targets are its own, what `:=` binds is not.
        for part in ast.walk(node):
            if isinstance(part, ast.NamedExpr):
                self.visit(part.target)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        bound = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        self.names.update(name for name in bound if name != "*")

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._visit_named(node, node.name)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self._visit_named(node, node.name)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._visit_named(node, node.rest)

    def visit_Global(self, node: ast.Global) -> None:
        self._declared_global.update(node.names)
        self.elsewhere.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.elsewhere.update(node.names)

    def visit_Call(self, node: ast.Call) -> None:
        self._visit_all(code_in_magic(node))
        self.generic_visit(node)

    def _visit_named(self, node: ast.AST, name: str | None) -> None:
        if name is not None:
            self.names.add(name)
        self.generic_visit(node)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _enter(self, body: list[ast.stmt]) -> None:
        inner = Binding.of(body)
        self._inner_globals |= inner._inner_globals | (inner.names & inner._declared_global)


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """List all parameters, of every kind."""
    rest = [found for found in (arguments.vararg, arguments.kwarg) if found]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]


def defaults(arguments: ast.arguments) -> list[ast.AST]:
    """List the expressions of the default values."""
    return [*arguments.defaults, *(found for found in arguments.kw_defaults if found)]

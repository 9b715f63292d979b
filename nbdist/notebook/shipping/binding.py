"""Which names statements bind in their own scope, with no regard to order; pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from nbdist.notebook.shipping.magic_strings import code_in_magic

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

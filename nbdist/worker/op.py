"""Ops: what a task can ask of a worker besides running source.

Each is a function of a module in `nbdist.worker.ops`, or of one that an entry point names
(`nbdist.plugins`), found by name.  It runs on the main thread in the place of a cell, gets a
`Context` and the arguments of its `Call`, and what it returns comes back as the rank's value.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nbdist import plugins
from nbdist.values.payload import Payload
from nbdist.worker import ops
from nbdist.worker.memory import Peaks

if TYPE_CHECKING:
    from nbdist.worker.group.group import Group
    from nbdist.worker.homeward import Homeward
    from nbdist.worker.namespace import Namespace


@dataclass
class Context:
    """What a task works with, and what it says of itself besides its value.

    `bound` are the names that it has bound, `gone` those that it has deleted, `title` is what
    people call it.  What `at_end` has is closed once the value has been packed.  `task_id` is
    the task's.
    """

    shell: Any
    namespace: Namespace
    group: Group | None
    peaks: Peaks = field(default_factory=Peaks)
    title: str = ""
    task_id: str = ""
    bound: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    at_end: ExitStack = field(default_factory=ExitStack)

    @property
    def rank(self) -> int:
        """The worker's, whatever cells have bound to the name."""
        return int(self.namespace.ready["rank"])

    @property
    def names(self) -> dict[str, Any]:
        """The worker's `__main__`."""
        names: dict[str, Any] = self.shell.user_ns
        return names

    def open(self, payload: Payload) -> Any:
        """Return what the notebook has pickled; VariableError where it cannot be rebuilt."""
        return self.namespace.open(payload)

    def lend(self, value: Any, home: Homeward | None = None) -> Payload:
        """Pack a value for whoever opens it before the notebook lets go of the task."""
        return self.namespace.lend(value, self.task_id, home)

    def noting(self) -> Noting:
        """Note in `bound` what users' code binds meanwhile."""
        return Noting(self)


class Noting:
    """Compares the names before and after.

    Not a generator's: contextlib sets attributes of what is raised, which a user's class can
    refuse.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before = self._context.namespace.snapshot()

    def __exit__(self, *_: object) -> None:
        namespace = self._context.namespace
        self._context.bound |= namespace.bound_since(self._before)
        self._context.gone |= namespace.gone_since(self._before)


@cache
def import_ops() -> Mapping[str, ModuleType | Exception]:
    """Import all, by name; or why one cannot be.

    Before users' code runs: once that has opened all files that it may, nothing can be imported.
    """
    found: dict[str, ModuleType | Exception] = {}
    for name, point in plugins.entry_points(plugins.OPS).items():
        try:
            found[name] = point.load()
        except Exception as error:  # noqa: BLE001 (other people's modules)
            found[name] = error
    for each in pkgutil.iter_modules(ops.__path__):
        found[each.name] = import_module(f"{ops.__name__}.{each.name}")
    return found


def find_op(name: str) -> Callable[..., Any]:
    """Find the function: `script` of the module `script`, `write` for `snapshot.write`."""
    module, _, function = name.partition(".")
    found = import_ops().get(module)
    if not isinstance(found, ModuleType):
        raise ImportError(
            f"nbdist has no `{module}` on this rank" + (f": {found}" if found else "")
        )
    run: Callable[..., Any] = getattr(found, function or module)
    return run

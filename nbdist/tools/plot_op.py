"""The ops of `--plot`: track numbers in tqdm's postfix and in logs of transformers and Lightning.

Runs in workers; the notebook calls `begin` before a cell and `end` after it.  While the cell runs,
the methods by which these libraries log are wrapped, also if the cell itself imports a library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nbdist.worker.tracking import track

if TYPE_CHECKING:
    from nbdist.worker.namespace import Context

MAX_SEEN = 50
ALSO = {"learning_rate": "lr"}
"""Shorter names that `--plot` also accepts, by the name of a logged number.

For example, transformers logs `learning_rate`.
"""

LoggedValues = tuple[float | None, Mapping[str, Any]]
"""The step, or None if `track` shall count the calls, and the logged values by name."""


def begin(context: Context, names: Sequence[str]) -> None:
    """Start to track the logged numbers with these names."""
    _stop()
    _begun.append(Taps(frozenset(names)))


def end(context: Context) -> tuple[str, ...]:
    """Stop tracking; return the names of all logged numbers, also of numbers that were not tracked.

    Once there are `MAX_SEEN` names, further names that were not tracked are left out.
    """
    return _stop()


def _stop() -> tuple[str, ...]:
    return _begun.pop().stop() if _begun else ()


# --- readers of the arguments of methods that log -----------------------------------------------


def _of_postfix(
    _: Any, ordered_dict: Mapping[str, Any] | None = None, *__: Any, **numbers: Any
) -> LoggedValues:
    numbers.pop("refresh", None)
    # No step: `track` then counts the calls.  The steps of a bar begin at 0 again in each epoch.
    return None, {**(ordered_dict or {}), **numbers}


def _of_text(_: Any, s: str = "", *__: Any, **___: Any) -> LoggedValues:
    parts = (part.partition("=") for part in str(s).split(","))
    return None, {name.strip(): number for name, _, number in parts}


def _of_trainer(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> LoggedValues:
    return trainer.state.global_step, logs


def _of_module(module: Any, name: str, value: Any, *_: Any, **__: Any) -> LoggedValues:
    return module.global_step, {name: value}


Reader = Callable[..., LoggedValues]

READERS: dict[str, tuple[str, dict[str, Reader]]] = {
    "tqdm.std": ("tqdm", {"set_postfix": _of_postfix, "set_postfix_str": _of_text}),
    "transformers.trainer": ("Trainer", {"log": _of_trainer}),
    "lightning.pytorch.core.module": ("LightningModule", {"log": _of_module}),
    "pytorch_lightning.core.module": ("LightningModule", {"log": _of_module}),
}
"""By module: the class that logs, and a function that reads the arguments of each method."""


class Taps(MetaPathFinder):
    """Wraps the methods in `READERS`, so that logged numbers are tracked, until `stop` is called.

    The object is also a finder on `sys.meta_path`: it wraps the methods of a module of `READERS`
    that is imported later.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._seen: dict[str, None] = {}
        self._wrapped: list[tuple[type, str, Any, Any]] = []
        for name in READERS:
            if (module := sys.modules.get(name)) is not None:
                self._wrap(module)
        sys.meta_path.insert(0, self)

    def stop(self) -> tuple[str, ...]:
        """Restore the wrapped methods, and return the names of the numbers that were logged.

        If other code has wrapped a method too since then, the method is not restored, and the
        wrapper of this object does nothing from now on.
        """
        self._names = frozenset()
        sys.meta_path.remove(self)
        for owner, name, original, wrapper in self._wrapped:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        return tuple(self._seen)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec with which importing a module of `READERS` also wraps the module's methods.

        Return None for any other module, or if the module is not found, so that Python asks the
        next finder.
        """
        if fullname not in READERS or not (spec := PathFinder.find_spec(fullname, path)):
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            if self._names:
                self._wrap(module)

        loader.exec_module = execute_and_wrap
        return spec

    def _wrap(self, module: ModuleType) -> None:
        owner_name, readers = READERS[module.__name__]
        owner = getattr(module, owner_name, None)
        for name, read in readers.items():
            original = getattr(owner, name, None)
            if isinstance(owner, type) and original is not None and name in vars(owner):
                wrapper = self._wrapper(original, read)
                self._wrapped.append((owner, name, original, wrapper))
                setattr(owner, name, wrapper)

    def _wrapper(self, original: Callable[..., Any], read: Reader) -> Callable[..., Any]:
        @wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            returned = original(*args, **kwargs)
            if self._names:
                self._track_logged(*read(*args, **kwargs))
            return returned

        return log

    def _track_logged(self, step: float | None, logged: Mapping[str, Any]) -> None:
        """Track the logged numbers that `--plot` names, and record the names of all numbers."""
        for name, value in _numbers(logged.items()):
            if (also := ALSO.get(name)) in self._names and also not in logged:
                name = str(also)
            is_wanted = name in self._names and name != "step"
            if len(self._seen) < MAX_SEEN or is_wanted:
                self._seen.setdefault(name)
            if is_wanted:
                # `track` refuses values that are no numbers, such as some subclasses of tensors,
                # and steps that are too large.
                with suppress(TypeError, ValueError):
                    track(step=step, **{name: value})


_begun: list[Taps] = []
"""The object that wraps methods now, if any; at most one."""


def _numbers(logged: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in logged:
        if isinstance(value, str):
            try:
                yield name, float(value)
            except ValueError:
                continue
        elif isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1:
            yield name, value

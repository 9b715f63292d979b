"""The ops of `--plot`: track numbers in tqdm's postfix and in logs of transformers and Lightning.

Runs in workers; the notebook calls `begin` before a cell and `end` after it.  Meanwhile the methods
of these libraries that log are wrapped, also in modules that the cell itself imports.
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
"""Names of transformers for which people also write a shorter name."""

LoggedValues = tuple[float | None, Mapping[str, Any]]
"""The step, or None to count calls instead, and the logged values by name."""


def begin(context: Context, names: Sequence[str]) -> None:
    """Start tracking logged numbers with these names."""
    _stop()
    _begun.append(Taps(frozenset(names)))


def end(context: Context) -> tuple[str, ...]:
    """Stop tracking, and return names of logged numbers, at most `MAX_SEEN` of untracked ones."""
    return _stop()


def _stop() -> tuple[str, ...]:
    return _begun.pop().stop() if _begun else ()


# --- readers of the arguments of methods that log -----------------------------------------------


def _of_postfix(
    _: Any, ordered_dict: Mapping[str, Any] | None = None, *__: Any, **numbers: Any
) -> LoggedValues:
    numbers.pop("refresh", None)
    # Calls are counted, since a bar's own steps begin again in each epoch.
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
"""By module: a class, and by its methods that log a reader of the method's arguments."""


class Taps(MetaPathFinder):
    """Wraps the methods in `READERS` until `stop` is called.

    As a finder on `sys.meta_path`, the object also wraps methods of modules imported later.
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
        """Restore the methods, and return the names of logged numbers.

        If other code has wrapped a method meanwhile, the old wrapper stays inside and does nothing.
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
        """Return the spec of a module of `READERS` whose loading wraps its methods, or None."""
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
        """Track the logged values that are numbers and whose names `--plot` has chosen."""
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
"""The `Taps` that wraps methods now, if any."""


def _numbers(logged: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in logged:
        if isinstance(value, str):
            try:
                yield name, float(value)
            except ValueError:
                continue
        elif isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1:
            yield name, value

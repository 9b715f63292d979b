"""Functions that have a world of their own for one call: `nbdist.run`, `nbdist.distributed`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from nbdist.config import WorldConfig
from nbdist.errors import NbdistError
from nbdist.world.result import CellResult
from nbdist.world.world import World

P = ParamSpec("P")
R = TypeVar("R")


def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
    """Call a function on new workers, one per GPU; they end with the call.

    Without GPUs one per core, at most 4.  `distributed` says how many, and more; with
    `World` they stay.  Raises what `World.start` and `World.run` raise.
    """
    try:
        return _call(WorldConfig(), function, args, kwargs)
    except NbdistError as error:
        raise error.with_traceback(None)  # noqa: B904 (it is the same error, with less to read)


class Distributed(Generic[P, R]):
    """A function whose call starts workers, runs it on all of them, and ends them.

    `function` is the function itself: `world.run(train.function, data)` calls it on workers
    that exist already.  Raises UsageError for `options` that can never be.
    """

    def __init__(self, function: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.options = options
        self._config = WorldConfig(**options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> CellResult[R]:
        try:
            return _call(self._config, self.function, args, kwargs)
        except NbdistError as error:
            raise error.with_traceback(None)  # noqa: B904 (see run)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"<distributed({options}) {self.function!r}>"


@overload
def distributed(function: Callable[P, R], /) -> Distributed[P, R]: ...


@overload
def distributed(
    *, n: int | str = "auto", **options: Any
) -> Callable[[Callable[P, R]], Distributed[P, R]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """Decorate a function: each call of it is made on new workers, which end with it.

        @nbdist.distributed(n=4)
        def train(model, steps): ...

        trained = train(model, 100).rank(0)

    `options` are those of `World`; without any, `@nbdist.distributed` will do.
    """
    if function is not None:
        return Distributed(function, options)
    return functools.partial(Distributed, options=options)


def _call(
    config: WorldConfig, function: Callable[..., Any], args: Any, kwargs: Any
) -> CellResult[Any]:
    with World(**vars(config)) as world:
        return world.run(function, *args, **kwargs)

"""The public functions beside `World`: `nbdist.run`, `nbdist.distributed` and `nbdist.attach`.

On the notebook's thread, or that of a script.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from nbdist import __version__
from nbdist.config import WorldConfig
from nbdist.errors import NbdistError, UsageError
from nbdist.system.folders import JoinedFolder
from nbdist.wire.frames import BadFrame
from nbdist.wire.views import Accepted, Attach, Refused
from nbdist.world.agents import Asking, AttachedAgent, Found, to_attach, worlds
from nbdist.world.link import Link
from nbdist.world.result import CellResult
from nbdist.world.session import Session
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


ADMIT_TIMEOUT = 30.0
"""Seconds; longer than an agent has a notebook wait while its workers start or heal."""


def attach(name: str | None = None) -> World:
    """Take over a world that was started with `detach=True` and whose process has gone.

    By its name, its pool's, or the number of its agent's process; without, the only one that
    nobody has.  What it runs goes on: `world.catch_up()` shows what was missed, and waits.

    Raises:
        UsageError: there is no such world, or somebody has it.
    """
    return take_over(to_attach(worlds(), name), sys.modules["__main__"].__dict__)


def take_over(found: Found, namespace: dict[str, Any]) -> World:
    """Take this one over, with its names in this namespace; raises UsageError as `attach` does."""
    link, agent = _link_to(found)
    try:
        there = link.take_over(agent)
        session = Session(WorldConfig(**there.memory.options), there)
        session.attach(link, there, namespace)
    except BaseException:
        link.detach()
        raise
    return World.of(session)


def _link_to(found: Found) -> tuple[Link, AttachedAgent]:
    """Ask at the door for the world, with a socket bound that its agent can connect to."""
    try:
        folder = JoinedFolder(found.folder)
        link = Link(folder=folder)
        try:
            return link, _accepted(found, folder.socket)
        except BaseException:
            link.detach()
            raise
    except (OSError, BadFrame) as error:
        raise UsageError(f"World {found.name} cannot be attached to: {error}.") from None


def _accepted(found: Found, socket: str) -> AttachedAgent:
    asking = Asking(found.folder, Attach(__version__, os.getpid(), socket))
    try:
        answer = asking.answer(ADMIT_TIMEOUT)
        if not isinstance(answer, Accepted):
            why = answer.why if isinstance(answer, Refused) else "its agent says something else"
            raise UsageError(f"World {found.name} cannot be attached to: {why}.")
        return AttachedAgent(found, asking, answer)
    except BaseException:
        asking.close()
        raise

"""The worker's `__main__`: names that come with a cell, names it binds, values that go back."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbdist.wire.calls import CALL, FunctionCall
from nbdist.wire.memory import Segment
from nbdist.wire.payload import Payload, open_payload, pack_frames
from nbdist.wire.pickling import pickle, unpickle
from nbdist.wire.unshippable import blame, fails_in
from nbdist.worker.calling import CallNames


class NameProblem(Exception):
    """A name could not be bound or brought back; the message is for the user."""


class Namespace:
    """Wraps the kernel's `user_ns`, which is also the `__main__` of the process."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._lent: dict[str, Segment] = {}
        self._calls = CallNames(names)

    def start_with(self, names: Mapping[str, Any]) -> None:
        """Bind what every worker has from its start."""
        self._names.update(names)

    def change(self, name: str, before: object, after: object) -> None:
        """Bind one of these to another value, unless a cell has bound it."""
        if self._names.get(name) == before:
            self._names[name] = after

    def receive(self, payload: Payload | None) -> None:
        """Bind the names that came along; with none of them bound when one cannot be read."""
        # What the last cell brought back has been read by now.
        for cell_id in list(self._lent):
            self.let_go(cell_id)
        if payload is None:
            return
        try:
            names = unpickle(open_payload(payload), self._names)
        except Exception as error:  # a user's class can raise anything while it is rebuilt
            raise NameProblem(
                f"a name that the cell uses could not be rebuilt in the worker: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._names.update(names)
        if isinstance(call := names.get(CALL), FunctionCall):
            self._calls.begin(call)

    @property
    def call(self) -> FunctionCall | None:
        """The function call that came along, if it is one rather than a cell."""
        return self._calls.call

    def end_call(self) -> None:
        """Keep nothing of it; does nothing where there was none."""
        if self.call is not None:
            self._calls.end()

    def let_go(self, cell_id: str) -> None:
        """What this cell sent back has been read.  Also called on the control thread."""
        if segment := self._lent.pop(cell_id, None):
            segment.close()

    def snapshot(self) -> dict[str, int]:
        """Which object each name is bound to; compare with `bound_since`."""
        return {name: id(value) for name, value in self._names.items()}

    def bound_since(self, before: Mapping[str, int]) -> frozenset[str]:
        """Names that are bound to another object now, without IPython's own `_`, `In`, `_i3`."""
        return frozenset(
            name
            for name, value in self._names.items()
            if not name.startswith("_") and before.get(name) != id(value)
        )

    def imported(self, names: Iterable[str]) -> list[str]:
        """Those of them that are modules, or functions and classes of modules."""
        return [name for name in names if _is_imported(self._names.get(name))]

    def fetch(self, expressions: Sequence[str], cell_id: str) -> Payload:
        """The values of some names (or expressions), CUDA tensors moved to the CPU.

        A big payload stays in memory that this process lends until `let_go`, or its next cell.
        """
        values = {}
        for expression in expressions:
            try:
                values[expression] = eval(expression, self._names)
            except Exception as error:  # the expression is the user's
                raise NameProblem(f"{type(error).__name__}: {error}") from error
        try:
            pickled = pickle(values, self._names, tensors_to_cpu=True)
        except Exception as error:  # a user's __reduce__ can raise anything
            raise self._unsendable(expressions, values, error) from error
        payload, segment = pack_frames(pickled.frames)
        if segment is not None:
            self._lent[cell_id] = segment
        return payload

    def _unsendable(
        self, expressions: Sequence[str], values: Mapping[str, Any], error: Exception
    ) -> NameProblem:
        """Which part of what a function returned cannot be sent, and why."""
        call = self._calls.call
        if call is None:
            return NameProblem(
                f"`{', '.join(expressions)}` cannot be sent to the notebook: "
                f"{type(error).__name__}: {error}"
            )
        (value,) = values.values()
        path, kind, why, _ = blame("result", value, fails_in(self._names), error)
        what = f"what {call.title} returned"
        part = what if path == "result" else f"{what}: `{path}`"
        return NameProblem(f"{part} ({kind}) cannot be sent back: {why}.")


def _is_imported(value: Any) -> bool:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value.__module__ != "__main__"
    return isinstance(value, types.ModuleType)

"""Values that lie in files beside the script: which file, how it is written and read.

Written as any program would, so that nothing of nbdist is needed to read them.  This process
has torch where a value has tensors; it is never imported here.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbdist.values.pickling import pickle as look_at
from nbdist.values.unpicklable import PICKLING_ERRORS
from nbdist.words import one_line

_PLAIN_TYPES = (dict, list, tuple, set, str, bytes, int, float, bool, complex, type(None))


@dataclass(frozen=True, slots=True)
class File:
    """Names whose values share objects, or one alone, in one file.

    `needs` are names of the notebook that it takes to read them, `module` is what reads them.
    """

    names: tuple[str, ...]
    kind: Literal["npy", "pkl", "pt"]
    needs: frozenset[str] = frozenset()
    weights_only: bool = True

    @property
    def name(self) -> str:
        """Of the file itself."""
        return f"{self.names[0]}.{self.kind}"

    @property
    def module(self) -> str:
        """The name of the module that reads it, as the script has it."""
        return {"npy": "np", "pkl": "pickle", "pt": "torch"}[self.kind]

    @property
    def code(self) -> str:
        """The line of the script that reads it."""
        path = f'DATA / "{self.name}"'
        only = "" if self.weights_only else ", weights_only=False"
        load = {
            "npy": f"np.load({path})",
            "pkl": f"pickle.loads(({path}).read_bytes())",
            "pt": f'torch.load({path}, map_location="cpu"{only})',
        }
        return f"{', '.join(self.names)} = {load[self.kind]}"

    def write(self, folder: Path, namespace: Mapping[str, Any]) -> int:
        """Write the values; how many bytes the file has.  Raises OSError."""
        value = _value(self.names, namespace)
        with (folder / self.name).open("wb") as file:
            match self.kind:
                case "npy":
                    sys.modules["numpy"].save(file, value)
                case "pkl":
                    pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
                case "pt":
                    sys.modules["torch"].save(value, file)
            return file.tell()


def sharing(values: Mapping[str, Any], namespace: dict[str, Any]) -> list[list[str]]:
    """Group names whose values have an object in common: these must be read together."""
    looks = {}
    for name, value in values.items():
        try:
            looks[name] = look_at({name: value}, namespace, sketch=True)
        except PICKLING_ERRORS:
            continue
    groups: list[tuple[list[str], set[int]]] = []
    for name in values:
        objects = set(looks[name].shared) if name in looks else set()
        meet = [group for group in groups if not objects.isdisjoint(group[1])]
        groups = [group for group in groups if group not in meet]
        names = [each for group in meet for each in group[0]]
        groups.append(([*names, name], objects.union(*(group[1] for group in meet))))
    return [names for names, _ in groups]


def file_of(names: Iterable[str], namespace: Mapping[str, Any]) -> File | str:
    """Choose the file for the values of these names; or say why there can be none."""
    names = (*names,)
    value = _value(names, namespace)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    if type(value) is array and not value.dtype.hasobject:
        return File(names, "npy")
    pickler = _Noting(_Nowhere())
    try:
        pickler.dump(value)
    except PICKLING_ERRORS as error:
        return f"{type(error).__name__}: {one_line(str(error))}"
    kind: Literal["pt", "pkl"] = "pt" if pickler.has_tensors else "pkl"
    return File(names, kind, frozenset(pickler.needs), pickler.is_plain)


def _value(names: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
    values = tuple(namespace[name] for name in names)
    return values[0] if len(values) == 1 else values


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Noting(pickle.Pickler):
    """Pickles as anybody does, but for tensors, and notes what the reader will have to have."""

    def __init__(self, file: _Nowhere) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.needs: set[str] = set()
        self.has_tensors = False
        self.is_plain = True
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)

    def persistent_id(self, value: Any) -> str | None:
        """Note each object; only a tensor is not pickled here.  Called by pickle."""
        if self._tensor is not None and isinstance(value, self._tensor):
            self.has_tensors = True
            self.is_plain = self.is_plain and type(value).__module__.startswith("torch")
            return "tensor"
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            self.needs.add(value.__qualname__.partition(".")[0])
        if type(value) not in _PLAIN_TYPES:
            self.is_plain = False
        return None

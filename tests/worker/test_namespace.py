"""Tests of `nbdist.worker.namespace`: names received, names bound, and values sent."""

from __future__ import annotations

import collections
import json
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.values.linked import write
from nbdist.values.links import Links
from nbdist.values.payload import (
    INLINE_LIMIT,
    MODULE,
    OPTIMIZER,
    SHARDED,
    TENSOR,
    Payload,
    open_payload,
    pack_frames,
    refs_in,
)
from nbdist.values.pickling import pickle, unpickle
from nbdist.wire.work import Task
from nbdist.worker.namespace import Context, Namespace, VariableError


@pytest.fixture
def names() -> dict[str, Any]:
    return {"rank": 0, "_": 5}


@pytest.fixture
def namespace(names: dict[str, Any]) -> Namespace:
    return Namespace(names)


def message(**values: Any) -> Payload:
    """Return small values as the notebook sends them."""
    payload, segment = pack_frames(write(values, [], Links(), {}, (), {}).frames)
    assert segment is None
    return payload


def task(**fields: Any) -> Task:
    """Return a task for rank 0."""
    return Task("t", (0,), **fields)


def plain(value: Any) -> Payload:
    """Return a value that was pickled without keys for its objects."""
    return pack_frames(pickle(value, {}).frames)[0]


class Undone:
    """A value that cannot be rebuilt."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return int, ("x",)


def test_kinds_and_covered_names_are_found(names: dict[str, Any], namespace: Namespace) -> None:
    """Modules, optimizers and tensors are found, and so are names that hide `rank` or `device`."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    namespace.add_ready({"rank": 1000, "device": torch.device("cpu"), "dist": json})
    optimizer = object.__new__(torch.optim.SGD)  # its `__init__` imports torch._dynamo
    names.update(net=torch.nn.Linear(1, 1), sgd=optimizer, x=torch.ones(1), n=[torch.ones(1)])
    names["f"] = object.__new__(type("FSDPLinear", (FSDPModule, torch.nn.Linear), {}))
    kinds = {"net": MODULE, "sgd": OPTIMIZER, "x": TENSOR, "f": SHARDED}
    assert namespace.kinds(names) == kinds
    names.update(rank=int("1000"), device="cpu", dist=json)
    assert namespace.covered_names({*names, "gone"}) == set()
    names.update(rank=torch.tensor(1000), device="cuda", dist=3)
    assert namespace.covered_names(names) == {"rank", "device", "dist"}


def test_received_names_replace_variables(names: dict[str, Any], namespace: Namespace) -> None:
    """Received names replace variables of the same name; payloads for other ranks are not read."""
    namespace.add_ready({"size": 4, "x": 1})
    assert namespace.receive(task(names={0: message(x=[2], y=3)}), 0) == []
    namespace.receive(task(), 0)
    namespace.receive(task(names={1: Payload((b"not for this one",))}), 0)
    assert names == {"rank": 0, "_": 5, "size": 4, "x": [2], "y": 3}
    namespace.receive(task(plain=plain({"x": 5, "z": 3})), 0)
    assert (names["x"], names["y"], names["z"]) == (5, 3, 3)


def test_names_deleted_in_the_notebook_are_deleted_on_a_rank(
    names: dict[str, Any], namespace: Namespace
) -> None:
    """A rank deletes names that the notebook has deleted, unless a cell has bound them again."""
    namespace.receive(task(names={0: message(x=[2], y=3, z=[1])}), 0)
    names["z"] = [1]
    gone = namespace.receive(task(deleted={0: ("x", "y", "z", "never")}), 0)
    assert (gone, names) == (["x", "y"], {"rank": 0, "_": 5, "z": [1]})


def test_a_value_not_rebuilt_binds_no_name(names: dict[str, Any], namespace: Namespace) -> None:
    """If a value cannot be rebuilt, an error names it, and no name of the task is bound."""
    before, undone = {**names}, message(a=1, b=Undone())
    for given, said in (
        ({"plain": Payload((b"garbage",))}, "a variable .*: UnpicklingError"),
        ({"plain": plain({"b": Undone()})}, "a variable .*: ValueError: invalid literal"),
        ({"names": {0: Payload((b"garbage",))}}, "a variable .*: UnpicklingError"),
        ({"names": {0: undone}}, "`b` .*: ValueError: invalid literal"),
    ):
        said = said.replace(".*", "(that the cell uses )?could not be rebuilt in the worker")
        with pytest.raises(VariableError, match=said):
            namespace.receive(task(**given), 0)
    assert names == before


def test_a_dropped_object_binds_no_name(names: dict[str, Any], namespace: Namespace) -> None:
    """If a cell uses an object that the rank has dropped, no name is bound and an error says so."""
    links, x = Links(), [1]
    key = links.add(x, "list").key
    frames = write({"y": 1, "x": [x]}, [], links, {}, {key}, {}).frames
    before = {**names}
    with pytest.raises(VariableError, match="has dropped an object that the cell uses; run the"):
        namespace.receive(task(names={0: pack_frames(frames)[0]}), 0)
    assert names == before


class Unchangeable:
    """An object that cannot be changed."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise LookupError(name)

    def __setstate__(self, state: Any) -> None:
        raise LookupError("no")


def test_a_change_that_fails_binds_no_variable(names: dict[str, Any], namespace: Namespace) -> None:
    """If an object cannot be changed, an error says why, and no variable is bound."""
    names["x"] = value = Unchangeable()
    namespace.counterparts.links.add(value, "opaque", 7)
    update = 7, "opaque", ({"a": 1}, None, None, None)
    frames = write({"y": 1}, [update], Links(), {}, {7}, {}).frames
    with pytest.raises(VariableError, match="could not be made in the worker: LookupError: no"):
        namespace.receive(task(names={0: pack_frames(frames)[0]}), 0)
    assert "y" not in names


def test_a_changed_variable_of_every_worker_is_bound(
    names: dict[str, Any], namespace: Namespace
) -> None:
    """A worker's own variable, such as `rank`, changes unless a cell has bound or deleted it."""

    class Tensor:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    mine = Tensor()
    namespace.add_ready({"world_size": 2, "bound": 2, "equal": 2, "deleted": 2})
    names.update(bound=mine, equal=2.0)
    del names["deleted"]
    for name in ("world_size", "bound", "equal", "deleted"):
        namespace.change_ready(name, 3)
    assert names["bound"] is mine
    assert (names["world_size"], names["equal"], "deleted" in names) == (3, 2.0, False)
    assert namespace.ready == dict.fromkeys(("world_size", "bound", "equal", "deleted"), 3)


def test_bound_and_deleted_names_are_found(names: dict[str, Any], namespace: Namespace) -> None:
    """New, rebound and deleted names are found; changes in place and names of IPython are not."""
    exec("kept = [1]; other = [1]; gone = 1", names)
    before = namespace.snapshot()
    exec("kept.append(2); other = [1]; del gone; new = rank; _ = 6; _i3 = 'x'; rank = 0", names)
    exec("_17 = __ = _ih = _exit_code = __doc__ = 1; _cfg = _2a = 1; __x = 1", names)
    found = {"other", "new", "_cfg", "_2a", "__x"}
    assert namespace.changes_since(before) == (found, {"gone"})


def test_a_name_that_was_rebound_many_times_is_found(
    names: dict[str, Any], namespace: Namespace
) -> None:
    """A rebound name is found even if its new object has the address of the old object."""
    names["Net"] = type("Net", (), {})
    for first, code in (
        ("0.1", "for _ in range({}): x = x * 0.5"),
        ("Net()", "for _ in range({}): x = None; x = Net()"),
        ("[0.1]", "for _ in range({}): x = None; x = [1, 2]"),
        ("Net()", "del x\nfor _ in range({}): x = Net()"),
    ):
        for times in range(1, 9):
            names["x"] = eval(first, names)
            before = namespace.snapshot()
            exec(code.format(times), names)
            assert "x" in namespace.changes_since(before)[0], (code, times)


def test_threads_may_bind_names_meanwhile(names: dict[str, Any], namespace: Namespace) -> None:
    """Names can be compared while a thread of an earlier cell binds names."""
    over = threading.Event()

    def bind() -> None:
        while not over.is_set():
            # Python switches between threads at the start of each turn of a loop.
            names.pop("x") if "x" in names else names.update(x=1)

    names.update({f"name{number}": number for number in range(1000)})
    thread, interval = threading.Thread(target=bind), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(20):
            assert namespace.changes_since(namespace.snapshot())[0] <= {"x"}
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_import_paths_lead_to_the_imported_objects(
    names: dict[str, Any], namespace: Namespace
) -> None:
    """An import path names module and object; it is "" if an import would not give the object."""
    gone = types.ModuleType("gone")
    exec(
        "import json as j, os.path as path\nfrom collections import OrderedDict as Ordered\n"
        "from json import dumps\nfrom math import floor\ndef mine(): pass",
        names | {"__name__": "__main__"},
        names,
    )
    names.update(gone=gone, nested=test_import_paths_lead_to_the_imported_objects, value=5)
    names["inner"] = (lambda: lambda: 0)()
    names["stale"] = types.FunctionType(json.dumps.__code__, {}, "dumps")
    names["stale"].__module__ = "json"
    found = namespace.import_paths([*names, "nowhere"])
    assert found == {
        "j": "json",
        "path": "posixpath",
        "Ordered": "collections:OrderedDict",
        "dumps": "json:dumps",
        "floor": "math:floor",
        "gone": "",
        "nested": f"{__name__}:test_import_paths_lead_to_the_imported_objects",
        "inner": "",
        "stale": "",
    }


def test_a_new_worker_repeats_the_imports_of_the_old_worker(
    names: dict[str, Any],
    namespace: Namespace,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new worker imports what the old worker had imported, unless the name is bound.

    A line on stderr reports each import that fails.
    """
    (tmp_path / "nbt_breaks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    names["json"] = 7
    imports = {"json": "json", "Ordered": "collections:OrderedDict", "lost": ""}
    imports |= {"method": "json:JSONEncoder.encode", "moved": "json:nowhere"}
    imports |= {"none": "nbt_nowhere", "breaks": "nbt_breaks"}
    assert namespace.import_names(imports) == {"Ordered", "method"}
    assert names["Ordered"] is collections.OrderedDict
    assert names["method"] is json.JSONEncoder.encode
    assert names["json"] == 7
    moved, none, breaks = capsys.readouterr().err.splitlines()
    assert moved.startswith("`moved` could not be imported again (json:nowhere): AttributeError")
    assert none.startswith("`none` could not be imported again (nbt_nowhere): ModuleNotFoundError")
    assert breaks.endswith("(nbt_breaks): ZeroDivisionError: division by zero")


def opened(payload: Payload | None) -> Any:
    assert payload is not None
    return unpickle(open_payload(payload), {})


def can_be_opened(payload: Payload) -> bool:
    """Return True if the segment of a payload can still be opened."""
    try:
        return bool(payload.segment and open_payload(payload))
    except OSError:
        return False


def test_values_are_fetched_by_expression(names: dict[str, Any], namespace: Namespace) -> None:
    """Values come by expression; a big value's segment stays until a release or the next task."""
    names.update(x=[1, 2], big=bytes(INLINE_LIMIT))
    small = namespace.fetch(["x", "sum(x) + rank"], "a")
    assert opened(small) == {"x": [1, 2], "sum(x) + rank": 3}
    lent = [namespace.fetch(["big"], task) for task in "abc"]
    assert opened(lent[0]) == {"big": names["big"]}
    for _ in range(2):
        namespace.release_values("a")
    assert [*map(can_be_opened, lent)] == [False, True, True]
    namespace.receive(task(), 0)
    assert not any(map(can_be_opened, lent))
    # A result names the values lent inside of it, for a process that passes the result on.
    part = namespace.lend(names["big"], "d")
    returned = namespace.pack([part], "d", "gather")
    assert returned is not None
    assert refs_in(returned) == refs_in(part)
    assert opened(returned) == [part]
    namespace.release_values("d")


def test_a_value_that_is_not_fetched_says_why(names: dict[str, Any], namespace: Namespace) -> None:
    """A value that cannot be computed or sent raises an error of a single line with the reason."""
    names["lock"] = threading.Lock()
    for expression, said in {
        "nowhere": "NameError: name 'nowhere' is not defined",
        "no python": "SyntaxError: ",
        "1 / rank": "ZeroDivisionError: ",
        "lock": "`rank, lock` cannot be sent to the notebook: TypeError: cannot pickle",
    }.items():
        with pytest.raises(VariableError) as caught:
            namespace.fetch(["rank", expression], "a")
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)


def test_results_of_ops_are_packed(namespace: Namespace) -> None:
    """An op's result is packed unless it is None; the error about a result names op and part."""
    assert namespace.pack(None, "a", "train") is None
    assert opened(namespace.pack({"loss": 0.5}, "a", "train")) == {"loss": 0.5}
    for value, said in (
        (threading.Lock(), r"^what train returned \(thread lock\) cannot be sent back: "),
        ({"a": [sys._getframe()]}, r"^what train returned: `result\['a'\]\[0\]` \(frame\) cannot"),
    ):
        with pytest.raises(VariableError, match=said):
            namespace.pack(value, "a", "train")


class Stubborn(KeyError):
    """Refuses to have attributes set, as contextlib does with an exception."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_names_bound_by_user_code_are_recorded() -> None:
    """Names that user code binds in `record_changes` are recorded, even if the code raises."""
    names: dict[str, Any] = {"kept": 1, "before": 1}
    context = Context(SimpleNamespace(user_ns=names), Namespace(names))
    with context.record_changes():
        context.names["a"] = 1
    with suppress(Stubborn), context.record_changes():
        context.names.update(b=1, kept=1)
        raise Stubborn
    context.names["after"] = 1
    assert context.bound == {"a", "b"}

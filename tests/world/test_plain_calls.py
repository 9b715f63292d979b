"""Tests of `nbdist.world.plain_calls`: which calls are plain, and that no old pickle is sent."""

from __future__ import annotations

import functools
import linecache
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from nbdist.values.pickling import unpickle
from nbdist.world import plain_calls
from nbdist.world.plain_calls import MAX_ARGUMENTS, MAX_KEPT, PlainCall
from nbdist.world.remote_call import is_sent_name
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

Main = dict[str, Any]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """The variables of a new `__main__`, in which tests run code by `exec`."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return vars(module)


@pytest.fixture
def script(main: Main, world: World) -> Iterator[Main]:
    """The variables of `main`, which the shared world uses as the notebook's variables."""
    before, world.engine.names.namespace = world.engine.names.namespace, main
    yield main
    world.engine.names.namespace = before  # `names` is looked up again: a restart renews it


def pack(main: Main, function: Callable[..., Any], *args: Any, **kwargs: Any) -> PlainCall | None:
    is_ours = functools.partial(is_sent_name, main)
    return plain_calls.pack(main, function, args, kwargs, is_ours)


def packed(main: Main, *args: Any, **kwargs: Any) -> PlainCall:
    """Pack a call of the function `f`, which must be plain."""
    call = pack(main, main["f"], *args, **kwargs)
    assert call is not None
    return call


def run_packed(main: Main, **names: Any) -> Any:
    """Run the packed call `f()` as a rank does, in a `__main__` with `names`; return the result."""
    call = packed(main)
    namespace: Main = {"__builtins__": main["__builtins__"], **names}
    function, (args, kwargs), *sent = (unpickle([each], namespace) for each in call.payload.frames)
    namespace.update(*sent)
    return function(*args, **kwargs)


# --- what a plain call is ---------------------------------------------------------------------


def test_calls_with_plain_parts_are_packed_without_keys(main: Main) -> None:
    """Functions of `__main__` and of modules are packed with numbers, texts and short tuples."""
    exec("import math\nscale = 3\ndef f(x: int, *more, y='a'): return x * scale, math.pi", main)
    call = packed(main, 2, ("a", 1.5), y=b"b")
    assert dict(call.names) == {"math": math, "scale": 3}
    by_name = [pack(main, each) for each in (os.getpid, os.path.join, functools.reduce)]
    assert [len(each.payload.frames) for each in by_name if each is not None] == [2, 2, 2]


def test_calls_whose_parts_have_an_identity_are_not_plain(main: Main) -> None:
    """A call is not plain if a part of it can change, so that a copy differs from the original."""
    exec(
        "import functools\n"
        "def f(*args, **kwargs): return 1\n"
        "def counted(): counted.calls = 1\n"
        "def helped(): return f()\n"
        "def listed(): return items\n"
        "items = [1]\n"
        "def with_list(x=[]): return x\n"
        "def with_named_list(*, x=[]): return x\n"
        "class Kind: pass\n"
        "def annotated(x): return x\n"
        "annotated.__annotations__ = {'x': Kind}\n"
        "def closed(y): return lambda: y\n"
        "def marked(): return 1\n"
        "marked.note = 1\n",
        main,
    )
    names = ("counted", "helped", "listed", "with_list", "with_named_list", "annotated", "marked")
    functions = [*(main[name] for name in names), main["closed"](1), main["Kind"]]
    functions += [functools.partial(main["f"], 1), main["Kind"]().__str__, [].append]
    assert [pack(main, each) for each in functions] == [None] * len(functions)
    big = "x" * 5000
    parts: list[Any] = [[1], {}, {1}, (1, [2]), main["Kind"](), big, 1 << 5000, (1,) * 17, Index(1)]
    for value in parts:
        assert pack(main, main["f"], value) is None
        assert pack(main, main["f"], x=value) is None
    assert packed(main, *range(MAX_ARGUMENTS))
    assert pack(main, main["f"], *range(MAX_ARGUMENTS + 1)) is None
    texts = [f"{number:04096}" for number in range(MAX_ARGUMENTS)]  # too long in all
    assert pack(main, main["f"], *texts) is None


class Index(int):
    """A number of a user's class, which can have attributes."""


def test_a_module_without_a_file_is_not_plain(main: Main) -> None:
    """A call that uses a module without a file is packed the other way, which words the error."""
    exec("import math as m\ndef f(): return m.pi", main)
    assert packed(main)
    main["m"] = types.ModuleType("m")
    assert pack(main, main["f"]) is None


# --- what was packed before is used again, unless anything has changed ------------------------


def test_an_unchanged_function_is_pickled_once(main: Main) -> None:
    """A second call reuses the function's pickle, also for another function of the same code."""
    exec("def f(): return 1\ndef again(): return [lambda: 2 for _ in range(2)]", main)
    assert packed(main).payload.frames[0] is packed(main).payload.frames[0]
    one, other = main["again"]()
    calls = [pack(main, each) for each in (one, other)]
    assert calls[0] is not None
    assert calls[1] is not None
    assert calls[0].payload.frames[0] is calls[1].payload.frames[0]


CHANGES: dict[str, tuple[str, object]] = {
    "defined again": ("def f(x=1, *, y=2): return (x, y, 'new', f.__doc__, big)", None),
    "code": ("f.__code__ = (lambda x=1, *, y=2: (x, y, 'code')).__code__", None),
    "defaults": ("f.__defaults__ = (7,)", None),
    "default of a keyword": ("f.__kwdefaults__['y'] = 8", None),
    "defaults of keywords": ("f.__kwdefaults__ = {'y': 9}", None),
    "variable": ("big = 1001", None),
    "variable that is another type": ("big = True", None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_a_function_is_noticed(main: Main, what: str) -> None:
    """After a change in the notebook, the packed call returns what the changed function returns."""
    exec("big = 1000\ndef f(x=1, *, y=2): return (x, y, 'old', big)", main)
    assert repr(run_packed(main)) == repr(main["f"]()) == "(1, 2, 'old', 1000)"
    exec(CHANGES[what][0].replace("f.__doc__, ", ""), main)
    expected = main["f"]()
    assert repr(run_packed(main)) == repr(expected) != "(1, 2, 'old', 1000)"


def test_changed_details_are_noticed(main: Main) -> None:
    """A function's names, docstring and annotations are packed as they are at the call."""
    exec("def f(x: int = 1): 'old'", main)
    details = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
    for changed in details:
        assert packed(main)
        if changed == "__annotations__":
            main["f"].__annotations__["x"] = str
        else:
            setattr(main["f"], changed, "new")
        function = unpickle([packed(main).payload.frames[0]], {})
        for name in details:
            assert getattr(function, name) == getattr(main["f"], name), changed


def test_an_attribute_or_helper_of_a_known_function_ends_its_plain_calls(main: Main) -> None:
    """A function is plain only while it has no attribute, uses no list and has none as default."""
    exec("def f(): return factor", main)
    assert packed(main).names == {}
    main["factor"] = 2
    assert packed(main).names == {"factor": 2}
    main["factor"] = [2]
    assert pack(main, main["f"]) is None
    del main["factor"]
    assert packed(main).names == {}
    main["f"].note = 1
    assert pack(main, main["f"]) is None
    del main["f"].note
    main["f"].__defaults__ = ([],)
    assert pack(main, main["f"]) is None


def test_a_function_that_its_module_has_no_more_is_not_sent_by_name(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the module has another function of this name now, a call of the old one is not plain."""
    function = os.path.join
    assert pack(main, function) is not None
    monkeypatch.setattr(os.path, "join", os.path.split)
    assert pack(main, function) is None


def test_functions_of_a_module_that_is_sent_by_value_are_not_sent_by_name(main: Main) -> None:
    """A function is not sent by name if cloudpickle was told to pickle its module by value."""
    assert pack(main, os.path.join) is not None
    cloudpickle.register_pickle_by_value(os.path)
    try:
        assert pack(main, os.path.join) is None
    finally:
        cloudpickle.unregister_pickle_by_value(os.path)


def test_the_source_of_a_cell_that_runs_again_is_sent(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a cell runs again under the same file name, its function is packed with the new source."""
    source, name = "def f(): return 1\n", "<ipython-input-9>"
    exec(compile(source, name, "exec"), main)
    for text in (source, f"{source}# again\n"):
        entry = (len(text), None, text.splitlines(keepends=True), name)
        monkeypatch.setitem(linecache.cache, name, entry)
        assert text.splitlines()[-1].encode() in packed(main).payload.frames[0]


def test_submodules_imported_since_are_sent(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function's new pickle names a submodule that was imported after the last pickle."""
    package, part = types.ModuleType("pack"), types.ModuleType("pack.part")
    package.__path__ = []
    exec("def f(): return pack.part", main)
    main["pack"] = package
    monkeypatch.setitem(sys.modules, "pack", package)
    frame = plain_calls._keep(main, main["f"])
    monkeypatch.setitem(sys.modules, "pack.part", part)
    later = plain_calls._keep(main, main["f"])
    assert frame is not None
    assert later is not None
    assert (b"pack.part" in frame.frame, b"pack.part" in later.frame) == (False, True)


def test_only_the_last_functions_are_kept(main: Main) -> None:
    """However many functions are called, at most `MAX_KEPT` pickles are kept."""
    for number in range(3 * MAX_KEPT):
        exec(f"def f(): return {number}", main)
        assert run_packed(main) == number
        assert len(plain_calls._kept) <= MAX_KEPT


# --- on ranks ---------------------------------------------------------------------------------


def test_ranks_use_what_was_edited_since_the_last_call(world: World, script: Main) -> None:
    """The next call uses an edited function, helper or variable, directly or through a helper."""
    exec("unit = 1\ndef g(): return 'g', unit\ndef f(x=0): return unit, x\n", script)
    exec("def h(): return g()", script)
    for edit in (
        *("", "unit = 2", "def f(x=3): return unit, x, 'new'", "f.__defaults__ = (4,)"),
        *("def g(): return 'edited', unit", "unit = [5]", "unit.append(6)", "unit = 7"),
        *(
            "f.note = 1",
            "del f.note",
            "g.__code__ = (lambda: 8).__code__",
            "f = g",
            "del unit; f=len",
        ),
    ):
        exec(edit, script)
        for name in ("f", "h", "f"):
            args = ("four",) if script["f"] is len else ()
            if name == "h" and "unit" not in script:
                continue
            expected = script[name](*args)
            assert list(world.run(script[name], *args)) == [expected] * 2, (edit, name)


def test_a_function_with_a_counterpart_is_called_there(world: World, script: Main) -> None:
    """If ranks keep a function that a call has brought, later calls use the ranks' function."""
    exec(
        "def f(x=1): return x\n"
        "def keep():\n    global kept\n    kept = f\n    f.__defaults__ = (5,)\n",
        script,
    )
    assert list(world.run(script["f"])) == [1, 1]
    world.run(script["keep"])
    assert list(world.run(script["f"])) == [5, 5]
    world.execute("del kept")


def test_a_plain_call_brings_changes_of_objects_that_ranks_have(world: World, script: Main) -> None:
    """Before a plain call, ranks get the changes of all their objects, named by the call or not."""
    exec(
        "items = [1]\n"
        "def keep():\n    global kept\n    kept = items\n"
        "def look(): return list(globals()['kept'])",
        script,
    )
    world.run(script["keep"])
    assert list(world.run(script["look"])) == [[1]] * 2
    script["items"].append(2)
    assert list(world.run(script["look"])) == [[1, 2]] * 2
    world.execute("del kept")


def test_what_a_rank_cannot_import_is_named(world: World, script: Main) -> None:
    """If ranks lack the function's module, the call raises an error, and later calls work."""
    module = types.ModuleType("only_here")
    exec("def f(): return 1", vars(module))
    sys.modules["only_here"] = module
    try:
        with pytest.raises(Exception, match="`call` could not be rebuilt in the worker: ModuleNot"):
            world.run(vars(module)["f"])
    finally:
        del sys.modules["only_here"]
    assert list(world.run(os.getcwd)) == [os.getcwd()] * 2

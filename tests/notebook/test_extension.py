"""Tests of `nbdist.notebook.extension`: the notebook is never the victim."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.notebook.extension import check_libraries, wrap
from nbdist.system.requirements import is_within
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world

FOOTPRINT = """
def footprint():
    import os, signal, sys, threading
    return (
        dict(os.environ),
        {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        sorted(name for name in globals() if not name.startswith('_')),
        'torch' in sys.modules,
        sys.path[:],
        sorted(thread.name for thread in threading.enumerate() if 'nbdist' in thread.name),
    )
"""

STATE = (
    "(footprint(), sorted(get_ipython().magics_manager.lsmagic()['line']), "
    "sorted(get_ipython().magics_manager.lsmagic()['cell']), "
    "[len(found) for found in get_ipython().events.callbacks.values()], "
    "sorted(vars(get_ipython())), sorted(vars(get_ipython().kernel)), "
    "[str(each) for each in get_ipython().input_transformers_cleanup], "
    "[each for each in get_ipython().configurables if 'nbdist' in type(each).__module__])"
)


@pytest.mark.own_agent
def test_the_notebook_is_as_it_was(fresh: Callable[..., Notebook]) -> None:
    """A session imports no torch here and changes no variable, signal handler, name or path.

    `%unload_ext` ends the workers and takes out magics, events, settings and threads.
    """
    notebook = fresh(FOOTPRINT)
    notebook.value(STATE)  # the first look may import something
    before = notebook.value(STATE)
    environ, handlers, names, has_torch, path, _ = before[0]
    notebook.run("%load_ext nbdist")
    notebook.run("%%distributed -n 2\nx = torch.ones(2) * rank\ndist.all_reduce(x)")
    notebook.run("%%distributed\nraise ValueError")
    assert notebook.run("%dist_gather rank --as ranks_there").errors == []
    after = notebook.value("footprint()")
    assert after[:3] == (environ, handlers, sorted([*names, "ranks_there"]))
    assert after[3:5] == (has_torch, path) == (False, path)
    notebook.run("del ranks_there")
    for load in ("%unload_ext nbdist", "%load_ext nbdist\n%unload_ext nbdist"):
        assert notebook.run(load).errors == []
        assert notebook.value(STATE) == before
        assert notebook.process.children(recursive=True) == []


@pytest.mark.parametrize(
    ("found", "wanted", "is_right"),
    [
        ("6.17.1", ">=6.17.1,!=7.0.*", True),
        ("6.4.0", ">=6.17.1,!=7.0.*", False),
        ("7.0.1", ">=6.17.1,!=7.0.*", False),
        ("2.13.0+cpu", ">=2.8", True),
        ("2.8.0a0+6e3f12.nv25.5", ">=2.8", True),
        ("2.7.1+cu126", ">=2.8", False),
        ("4.0", ">=3.0,<4", False),
        ("our own", ">=2.8", True),
    ],
)
def test_builds_and_previews_are_their_version(found: str, wanted: str, is_right: bool) -> None:  # noqa: FBT001
    """What stands after a version's number does not count."""
    assert is_within(found, wanted) is is_right
    check_libraries()  # what is installed here is right


@pytest.mark.own_agent
def test_an_old_library_is_refused(fresh: Callable[..., Notebook], tmp_path: Path) -> None:
    """`%load_ext` says in one line what is wrong and what to do; nothing is loaded or started."""
    metadata = tmp_path / "torch-2.3.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.1\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    notebook = fresh(env={"PYTHONPATH": path})
    error = notebook.run("%load_ext nbdist").error
    assert error.startswith(
        "WrongVersion: nbdist does not run with torch 2.3.1, so nothing was loaded: "
        "`%pip install 'torch>="
    )
    assert error.endswith("'`, then restart the kernel.")
    assert notebook.value("'distributed' in get_ipython().magics_manager.magics['cell']") is False
    assert notebook.process.children() == []


class Kernel:
    """Something with a method."""

    def say(self, text: str) -> str:
        """Say it."""
        return text


def louder(original: Callable[[str], str], text: str) -> str:
    return original(text).upper()


def test_a_method_is_wrapped_and_given_back() -> None:
    """It is as it was afterwards, whoever else has wrapped it."""
    kernel = Kernel()
    undo = wrap(kernel, "say", louder)
    assert kernel.say("x") == "X"
    assert (kernel.say.__name__, kernel.say.__doc__) == ("say", "Say it.")
    assert Kernel().say("x") == "x"
    undo()
    assert kernel.say("x") == "x"
    assert vars(kernel) == {}
    kernel = Kernel()
    kernel.say = own = lambda text: f"<{text}>"  # type: ignore[method-assign]
    undo = wrap(kernel, "say", louder)
    assert kernel.say("x") == "<X>"
    undo()
    assert kernel.say is own
    kernel = Kernel()
    undo_inner = wrap(kernel, "say", louder)
    undo_outer = wrap(kernel, "say", lambda original, text: f"<{original(text)}>")
    undo_inner()
    assert kernel.say("x") == "<x>"
    undo_outer()
    assert kernel.say("x") == "x"

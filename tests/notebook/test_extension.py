"""Tests of `nbdist.notebook.extension`: the notebook stays intact, and errors have hints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.notebook.extension import check_libraries, wrap
from nbdist.output.ansi import strip
from nbdist.plugins import is_within
from tests.notebook.front_end import Notebook, body, lasting
from tests.worlds import IDLE_IMPORTS

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
def test_unloading_leaves_the_notebook_as_it_was(fresh: Callable[..., Notebook]) -> None:
    """Cells of workers neither import torch here nor change environment, signals, names or paths.

    `%unload_ext` ends the workers and removes magics, events, settings and threads.
    """
    notebook = fresh(FOOTPRINT)
    notebook.value(STATE)  # the first evaluation may import modules
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
    ("installed", "required", "is_right"),
    [
        ("6.17.1", ">=6.17.1,!=7.0.*", True),
        ("7.0.1", ">=6.17.1,!=7.0.*", False),
        ("2.8.0a0+6e3f12.nv25.5", ">=2.8", True),
        ("2.7.1+cu126", ">=2.8", False),
        ("our own", ">=2.8", True),
    ],
)
def test_builds_and_previews_are_their_version(
    installed: str,
    required: str,
    is_right: bool,  # noqa: FBT001
) -> None:
    """Text after the numbers of a version does not count; a version without numbers fits."""
    assert is_within(installed, required) is is_right
    check_libraries()  # the installed libraries are in range


@pytest.mark.own_agent
def test_an_old_library_is_refused(fresh: Callable[..., Notebook], tmp_path: Path) -> None:
    """`%load_ext` names version and remedy in one line, and neither loads nor starts anything."""
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


def test_reloading_keeps_the_workers(fresh: Callable[..., Notebook]) -> None:
    """`%reload_ext nbdist` leaves workers and variables as they are; without workers it reloads."""
    notebook = fresh("%load_ext nbdist")
    hooks = (
        "sorted(get_ipython().magics_manager.lsmagic()['cell']), "
        "[len(found) for found in get_ipython().events.callbacks.values()], "
        "len(get_ipython().input_transformers_cleanup), sorted(vars(get_ipython().kernel))"
    )
    before = notebook.value(hooks)
    assert notebook.run("%reload_ext nbdist").streams == []
    assert notebook.value(hooks) == before
    notebook.run("%%distributed -n 2\nimport os\nx, pid = 7 + rank, os.getpid()")
    notebook.run("%dist_gather pid --as pids")
    for _ in range(2):
        ran = notebook.run("%reload_ext nbdist")
        assert (ran.errors, len(ran.streams)) == ([], 1)
    assert body(notebook.run("%distributed x"))[1::2] == ["7", "8"]
    notebook.run("%dist_gather pid --as again")
    assert notebook.value("again == pids") is True
    assert notebook.value(hooks) == before
    assert notebook.run("%unload_ext nbdist").errors == []
    assert notebook.value("[__import__('os').path.exists(f'/proc/{pid}') for pid in pids]") == [
        False,
        False,
    ]


class Kernel:
    """An object with a method to wrap."""

    def say(self, text: str) -> str:
        """Say it."""
        return text


def louder(original: Callable[[str], str], text: str) -> str:
    return original(text).upper()


def test_a_wrapped_method_is_restored() -> None:
    """The method is as before once all wrappers are undone, in whatever order they are undone."""
    kernel, other = Kernel(), Kernel()
    undo_inner = wrap(kernel, "say", louder)
    assert (kernel.say("x"), other.say("x"), kernel.say.__doc__) == ("X", "x", "Say it.")
    undo_outer = wrap(kernel, "say", lambda original, text: f"<{original(text)}>")
    undo_inner()
    assert kernel.say("x") == "<x>"
    undo_outer()
    assert kernel.say("x") == "x"
    kernel.say = replacement = lambda text: f"<{text}>"  # type: ignore[method-assign]
    for each in (kernel, other):
        wrap(each, "say", louder)()
    assert (kernel.say, vars(other)) == (replacement, {})


def test_a_cell_can_load_nbdist_and_go_on_with_a_magic(fresh: Callable[..., Notebook]) -> None:
    """The magic runs the lines below it, which keep their numbers; if it fails, the cell fails.

    If code is above the magic, the cell is refused after the code above `%load_ext` has run.
    """
    notebook, load = fresh(), "%load_ext nbdist"
    ran = notebook.run(f"before = 1\n{load}\nx = 1\n%%distributed -n 2\nhere = 1\n")
    assert "must be the first line of its cell: split the cell at line 4" in ran.seen
    names = "sorted({'before', 'x', 'here', 'after'} & {*globals()})"
    assert notebook.value(names) == ["before"]
    assert notebook.run("%unload_ext nbdist").errors == []
    ran = notebook.run(f"# a\n{load}\n%%distributed -n 2\nhere = rank\nhere\n1 / here")
    assert "rank 0 failed, of 2, after" in ran.errors[0]["evalue"]
    assert "line 6" in ran.panel["text/plain"]
    assert notebook.run("after = 1").errors == []
    assert notebook.value(names) == ["after", "before"]
    assert body(notebook.run("%%distributed\nhere"))[-1] == "1"


@pytest.mark.own_agent
def test_imports_of_ddp_are_made_before_the_fork(fresh: Callable[..., Notebook]) -> None:
    """Modules that DDP needs are imported before the ranks of a first cell with DDP are forked."""
    notebook = fresh(env={IDLE_IMPORTS: "1"})
    ran = notebook.run(
        "%load_ext nbdist\n%%distributed -n 2\nimport sys\nhere = 'torch._dynamo' in sys.modules\n"
        "from torch.nn.parallel import DistributedDataParallel\n%dist_gather here"
    )
    assert ran.errors == []
    assert notebook.value("here") == [True, True]


# --- a plain cell that uses a name of the workers -----------------------------------------------


two = lasting(
    "%load_ext nbdist",
    "shipped = 1",
    "%%distributed -n 2\nimport torch.nn as nn\nmodel, used = nn.Linear(1, 1), shipped",
    "%%rank 1\nlonely = 1",
    "%%distributed --pool other -n 1\ntheirs = 1",
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("model", "`model` is on ranks 0-1: {begin}, or `%dist_gather model`"),
        ("lonely + 1", "`lonely` is on rank 1: {begin}, or `%dist_gather lonely`"),
        ("def f():\n    return model\nf()",
         "`model` is on ranks 0-1: {begin}, or `%dist_gather model`"),
        ("nn", "`nn` is on ranks 0-1: {begin}, or import it here too"),
        ("del shipped\nshipped",
         "`shipped` is on ranks 0-1: {begin}, or `%dist_gather shipped`"),
        ("theirs", "`theirs` is on rank 0: {begin} --pool other, or "
                   "`%dist_gather --pool other theirs`"),
        ("rank", "`rank` is each worker's own: {begin}"),
        ("dist", "the workers have `dist`: {begin}, or `import torch.distributed as dist` here"),
        ("modle", "name 'modle' is not defined"),
    ],
)  # fmt: skip
def test_a_name_error_says_which_ranks_have_the_name(
    two: Notebook, source: str, message: str
) -> None:
    """The error says which ranks have the name and how to get it, and shows the user's line."""
    message = message.format(begin="begin the cell with %%distributed")
    ran = two.run(source)
    (error,) = ran.errors
    assert (error["ename"], error["evalue"], ran.reply["evalue"]) == ("NameError", message, message)
    text = strip("\n".join(error["traceback"]))
    assert source.splitlines()[-1] in text
    assert text.endswith(f"NameError: {message}")


def test_a_command_with_a_name_of_ranks_is_refused(two: Notebook) -> None:
    """The error of a command such as `!touch $model` names the variable, and nothing has run."""
    for source, expected in (
        ("mine = 1\n!touch $mine $model", "; `$$model` is the shell's own. Nothing has run."),
        ("files = !touch $rank", "`rank` is each worker's own: begin the cell"),
        ("%cd {model.path}", "`model` is on ranks 0-1"),
        ("def f(own):\n    !touch {own} {model}\nf(1)", "`model` is on ranks 0-1"),
    ):
        error = two.run(source).errors[0]["evalue"]
        assert expected in error
        assert error.endswith("Nothing has run.")


def test_a_command_gets_names_of_notebook_function_or_ranks(two: Notebook) -> None:
    """A command in the notebook can use variables of the notebook, of a function and of the shell.

    A command on ranks can use variables that all these ranks have.
    """
    two.run("mine = 'm'\ndef f(own):\n    !echo {own} {mine}")
    for source, expected in (
        ("f('o')", "o m"),
        ("!for model in 1 2; do echo $model; done", "1 2"),
        ("!echo [$$model] $mine", "[] m"),
        ("!echo {elsewhere}", "{elsewhere}"),
        ("found = !echo {mine}\nprint(found)", "['m']"),
    ):
        assert " ".join("".join(two.run(source).streams).split()) == expected
    error = two.run("%%distributed\n!touch {lonely}.bak").error
    assert "is on rank 1 and not on rank 0: `%dist_sync lonely --from 1` copies it" in error
    assert body(two.run("%%rank 1\n!echo {lonely}")) == ["── rank 1 ──", "1"]
    outcome = two.run("%%distributed\ndef f(lonely):\n    !echo {lonely}\nf(7)")
    assert body(outcome) == ["── ranks 0-1 (same) ──", "7"]
    outcome = two.run("%%distributed -r 0\nlonely = 8\n!echo {lonely}")
    assert body(outcome) == ["── rank 0 ──", "8"]
    two.run("%dist_shutdown")  # now no rank has `model`
    assert two.run("model").errors[0]["evalue"] == "name 'model' is not defined"

"""Tests of `nbdist.notebook.extension`: the notebook is never the victim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.notebook.front_end import Notebook

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

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

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


def test_notebook_is_not_changed(fresh: Callable[..., Notebook]) -> None:
    """A session imports no torch here and changes no variable, signal handler, name or path."""
    notebook = fresh(FOOTPRINT)
    before = notebook.value("footprint()")
    notebook.run("%load_ext nbdist")
    notebook.run("%%distributed -n 2\nx = torch.ones(2) * rank\ndist.all_reduce(x)")
    notebook.run("%%distributed\nraise ValueError")
    notebook.run("%dist_gather rank --as ranks_there")
    after = notebook.value("footprint()")
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] == sorted([*before[2], "ranks_there"])
    assert after[3:5] == before[3:5] == (False, before[4])


def test_unload_leaves_nothing(fresh: Callable[..., Notebook]) -> None:
    """`%unload_ext` ends the workers and takes out magics, events, settings and threads."""
    notebook = fresh(FOOTPRINT)
    state = (
        "(footprint(), sorted(get_ipython().magics_manager.lsmagic()['line']), "
        "sorted(get_ipython().magics_manager.lsmagic()['cell']), "
        "[len(found) for found in get_ipython().events.callbacks.values()], "
        "sorted(vars(get_ipython())), sorted(vars(get_ipython().kernel)), "
        "[str(each) for each in get_ipython().input_transformers_cleanup], "
        "[each for each in get_ipython().configurables if 'nbdist' in type(each).__module__])"
    )
    notebook.value(state)  # the first look may import something
    before = notebook.value(state)
    for _ in range(2):
        notebook.run("%load_ext nbdist")
        assert notebook.run("%%distributed -n 2\npass").errors == []
        assert notebook.run("%unload_ext nbdist").errors == []
        assert notebook.value(state) == before
        assert notebook.process.children(recursive=True) == []
    notebook.run("%load_ext nbdist")
    assert notebook.run("%unload_ext nbdist").errors == []
    assert notebook.process.children(recursive=True) == []

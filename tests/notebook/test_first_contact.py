"""Mistakes that people make in their first hour, and the answers: a table for all front ends.

Each row has the typed cells, and parts of the answer that the user sees.  If a row has several
cells, the last cell is the mistake, and the cells before it succeed.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass

import pytest

from tests.notebook.front_end import Notebook, lasting

pytestmark = pytest.mark.shared_world


@dataclass(frozen=True)
class Mistake:
    """The typed cells of a mistake, and the texts that the answer must contain."""

    cells: tuple[str, ...]
    said: tuple[str, ...]

    def __str__(self) -> str:
        return self.cells[-1].replace("\n", " ⏎ ")[:60]


def _row(cells: str | tuple[str, ...], *said: str) -> Mistake:
    return Mistake((cells,) if isinstance(cells, str) else cells, said)


AHEAD = (
    "%load_ext nbdist",
    "%%writefile broken.py\ndef f(:\n    pass",
    "%%distributed -n 2\nhere, kept = rank, 1",
    "import nbdist, threading; lock = threading.Lock()",
)
"""Cells without a mistake that run before all rows."""

MISTAKES = (
    # Code that is no Python, and iterators past their end.
    _row(
        "%%distributed\nit = iter([1]); next(it)\nnext(it)",
        "ranks 0-1 failed, of 2",
        "StopIteration",
    ),
    _row(("%%distributed --no-wait -o ended\nnext(iter([]))", "ended.wait()"), "StopIteration"),
    _row(
        "try:\n    get_ipython().run_cell_magic('distributed', '', 'next(iter([]))')\n"
        "except StopIteration as found:\n    print('caught', found.rank in (0, 1))",
        "caught True",
    ),
    _row("%%distributed\nimport broken", "SyntaxError: invalid syntax (broken.py, line 1)"),
    _row('%%distributed\nexec("if 1:\\nx")', "IndentationError: expected an indented block"),
    _row("%%distributed\nprint 'a'", "Missing parentheses in call to 'print'", "Nothing has run"),
    # How many workers, and which ranks.
    _row("%%distributed -n 4\nx", "2 workers are running. `%dist_scale 4` keeps their variables"),
    _row("%dist_scale 100000", "100,000 workers take more than the"),
    _row("%dist_scale", "`%dist_scale` takes a number of workers (4, +2)"),
    _row("%dist_scale 1 -r 0", "not both"),
    _row("%dist_scale 0", "it takes at least one worker. `%dist_shutdown` ends them all."),
    _row("%%rank 1 0\nprint(f'rank {rank} ran')", "rank 0 ran", "rank 1 ran"),
    # Magics and calls of other libraries, and misspelt names.
    _row("%%px\nx", "not found. In nbdist begin the cell with `%%distributed`."),
    _row("nbdist.World(workers=3)", "no argument `workers`: did you mean `n`?"),
    _row("nbdist.World(2, bakcend='gloo')", "no argument `bakcend`: did you mean `backend`?"),
    _row("nbdist.run(print, 1, n=2)", "`nbdist.run`: all arguments are the function's", "n=2"),
    _row("nbdist.World(2, 'gloo')", "`nbdist.World`: there is no argument `'gloo'`."),
    # Variables that are on the other side, cannot be sent, or do not exist.
    _row("%dist_gather here+1", "`%dist_gather here+1 --as values`"),
    _row("%dist_scale 4 -n 5", "`%dist_scale`: give the number of workers once"),
    _row("%dist_gather 1/0 --as x", "`1/0` on ranks 0-1: ZeroDivisionError: division by zero."),
    _row("%dist_push nope", "nope"),
    _row("%%distributed\nlock", "`lock` (thread lock) cannot be sent", "Make it inside"),
    _row("%dist_scatter nope", "the notebook has no `nope`."),
    _row("%dist_push nbdist.x", "by name: assign it first, as in `part = nbdist.x`."),
    _row("%dist_snapshot kept.real", "by name: `%dist_snapshot kept` saves `kept`."),
    _row("%dist_sync nope", "no `nope`"),
    _row("%dist_sync here --from 0,1", "it takes one rank to copy from"),
    _row("%dist_scatter lock", "cannot be split: use a tensor"),
    _row("%dist_restart --keep nope", "no rank has `nope`; all workers are as they were."),
    _row(("%%distributed -o res\nhere", "res[7]"), "no value of rank 7: ranks 0-1 have one."),
    # Code in the wrong place, and names that nbdist or the variable does not have.
    _row("x = 1\n%%distributed\ny = 2", "first line of its cell: split the cell at line 2"),
    _row("%load_ext nbdist\n%%distributed\nprint('runs')", "runs"),
    _row("%distributed print('runs')", "runs"),
    _row(("%distributed here = rank", "_ = %dist_gather kept  # a list\n_"), "[1, 1]"),
    _row("%dist_gather kepd", "no rank has `kepd`. Did you mean `kept`?"),
    _row("%%distributed\nprint(kepd)", "Did you mean `kept`?"),
    _row("%%distributed\ntorch.ones(2).cuda()", "There is no GPU here: `.to(device)`"),
    _row(
        "%%distributed\ntorch.nn.parallel.DistributedDataParallel(\n"
        "    torch.nn.Linear(1, 1), device_ids=[local_rank])",
        "The model is on the CPU: leave out `device_ids`, `DDP(net)` needs none.",
    ),
    _row("%%distributed -n gpu\nx", "`-n gpu`: no GPU is visible here. Use `-n 4`"),
    _row("%dist_wait", "In nbdist `job.wait()` waits for a cell that was sent with `--no-wait"),
    # Scripts, files and folders that are missing or of the wrong kind.
    _row(
        ("import pathlib; pathlib.Path('other.ipynb').write_text('{}');", "%dist_run other.ipynb"),
        "`other.ipynb` is a notebook: `%run other.ipynb` runs its cells",
    ),
    _row("%dist_export train", "the script needs a name that ends in .py"),
    _row("%dist_export /nosuch/x.py", "there is no folder /nosuch."),
    _row("%dist_attach nope", "has this name"),
    # Errors on the ranks.
    _row("%%distributed\nnope", "NameError: name 'nope' is not defined", "ranks 0-1 failed, of 2"),
    _row("%%distributed\nimport sys; sys.exit(2)", "ended the cell on this rank"),
    _row("%%distributed\ndist.all_reduce(5)", "Expected parameter `tensor` of type torch.Tensor"),
    _row(
        "try:\n    get_ipython().run_line_magic('dist_gather', 'nope')\n"
        "except Exception as error:\n    raise KeyError('mine') from error",
        "no rank has `nope`.",
        "KeyError: 'mine'",
    ),
)


beginner = lasting(
    "import os; os.chdir('{folder}'); os.environ['NBDIST_SNAPSHOT_DIR'] = '{folder}/snapshots'",
    *AHEAD,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_gets_a_helpful_line(beginner: Notebook, mistake: Mistake) -> None:
    """The answer to a mistake has the texts of its row; nbdist's own errors are a single line."""
    *before, last = mistake.cells
    for cell in before:
        assert beginner.run(cell).errors == []
    outcome = beginner.run(last)
    for text in mistake.said:
        assert text in outcome.seen
    for error in outcome.errors:
        # Python's own errors have a traceback, and a syntax error has the line of code.
        is_pythons = hasattr(builtins, error["ename"]) or "SyntaxError" in error["ename"]
        assert is_pythons or len(error["traceback"]) == 1
        assert len(error["evalue"]) < 500

"""What people do wrong in their first hour, and what is said: one table for all front ends.

Each row is what is typed, and a part of what is said, all of it where a person sees it.  Where
several cells are typed the first ones go well, and the last is the mistake.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """What is typed, and what is said; `ename` is the class's name where it is an error."""

    cells: tuple[str, ...]
    said: tuple[str, ...]

    def __str__(self) -> str:
        return self.cells[-1].replace("\n", " ⏎ ")[:60]


def _row(cells: str | tuple[str, ...], *said: str) -> Mistake:
    return Mistake((cells,) if isinstance(cells, str) else cells, said)


AHEAD = (
    "%load_ext nbdist",
    "%%writefile broken.py\ndef f(:\n    pass",
    "%%writefile ends.py\nnext(iter([]))",
    "%%distributed -n 2\nhere, kept = rank, 1",
    "import nbdist, threading; lock = threading.Lock()",
)
"""Cells that go well before any of these."""

PYTHON = (
    _row(
        "%%distributed\nit = iter([1]); next(it)\nnext(it)", "2 of 2 ranks failed", "StopIteration"
    ),
    _row("%dist_run ends.py", "2 of 2 ranks failed", "StopIteration"),
    _row(("%%distributed --no-wait -o ended\nnext(iter([]))", "ended.wait()"), "StopIteration"),
    _row(
        "try:\n    get_ipython().run_cell_magic('distributed', '', 'next(iter([]))')\n"
        "except StopIteration as found:\n    print('caught', found.rank in (0, 1))",
        "caught True",
    ),
    _row("%%distributed\nimport broken", "SyntaxError: invalid syntax (broken.py, line 1)"),
    _row("%dist_run broken.py", "`broken.py` is no Python: line 1: invalid syntax"),
    _row('%%distributed\nexec("if 1:\\nx")', "IndentationError: expected an indented block"),
    _row("%%distributed\nreturn 5", "Nothing has run on the workers. The last line of a cell is"),
    _row("%%distributed\nif 1:\nx = 1", "x = 1", "expected an indented block", "Nothing has run"),
    _row("%%distributed\nprint 'a'", "Missing parentheses in call to 'print'", "Nothing has run"),
)
"""Code that is none, and iterators past their end."""


NUMBERS = (
    _row("%%distributed -n 4\nx", "2 workers are running. `%dist_scale 4` keeps their variables"),
    _row("%dist_scale 100000", "100,000 workers take more than the"),
    _row("%dist_scale", "`%dist_scale` takes a number of workers (4, +2)"),
    _row("%dist_scale 1 -r 0", "not both"),
    _row("%dist_scale 0", "it takes at least one worker. `%dist_shutdown` ends them all."),
    _row("%%distributed -r 5\nx", "there is no rank 5. There are ranks 0-1; select with `0`"),
    _row("%%distributed -r a\nx", "`a` cannot be read. There are ranks 0-1"),
    _row("%%rank 1 0\nprint(f'rank {rank} ran')", "rank 0 ran", "rank 1 ran"),
    _row("%dist_restart -r 9", "there is no rank 9"),
)
"""How many workers, which ranks, how long."""

ELSEWHERE = (
    _row("%%px\nx", "not found. In nbdist begin the cell with `%%distributed`."),
    _row("%dist_gahter x", "not found. Did you mean `%dist_gather`?"),
    _row("nbdist.World(workers=3)", "no argument `workers`: did you mean `n`?"),
    _row("nbdist.World(2, bakcend='gloo')", "no argument `bakcend`: did you mean `backend`?"),
    _row("nbdist.World(2, 'gloo')", "`nbdist.World`: there is no argument `'gloo'`."),
    _row(
        "%%distributed\ndist.init_process_group('nccl')",
        'the world\'s group has the backend gloo, not nccl. Pass "gloo" or leave it out',
    ),
    _row(
        "%%distributed\ndist.init_process_group('gloo', rank=rank, world_size=4)",
        "the world has 2 ranks, not 4. Pass world_size=world_size or leave it out",
    ),
)
"""Flags, magics and calls of torchrun, accelerate, ipyparallel and others, and misspelt ones."""

NAMES = (
    _row("%dist_gather nope", "no rank has `nope`."),
    _row("%dist_gather here+1", "`%dist_gather here+1 --as values`"),
    _row("%dist_scale 4 -n 5", "`%dist_scale`: give the number of workers once"),
    _row("%dist_gather 1/0 --as x", "`1/0` on ranks 0-1: ZeroDivisionError: division by zero."),
    _row("%dist_gather dist.group.WORLD --as x", "a process group connects the ranks"),
    _row("%dist_push nope", "nope"),
    _row(("rank = 3", "%dist_push rank"), "each worker has its own `rank`"),
    _row(
        "%%distributed\nlock",
        "`lock` (thread lock) cannot be sent to the workers",
        "Make it inside",
    ),
    _row(
        ("gen = (i for i in [1])", "%%distributed\nnext(gen)"), "`gen` (generator) cannot be sent"
    ),
    _row(
        ("f = open('broken.py')", "%%distributed\nf"), "`f` (open file) cannot be sent", "its path"
    ),
    _row("%dist_scatter nope", "the notebook has no `nope`."),
    _row("%dist_sync nope", "no `nope`"),
    _row("%dist_sync here --from 9", "there is no rank 9"),
    _row("%dist_sync here --from 0,1", "it takes one rank to copy from"),
    _row("%dist_scatter lock", "cannot be split: use a tensor"),
    _row("%dist_restart --keep nope", "no rank has `nope`; all workers are as they were."),
    _row(("%%distributed -o res\nhere", "res[7]"), "no value of rank 7: ranks 0-1 have one."),
)
"""Variables that are elsewhere, that cannot be sent, or that there are not."""

FIRST_LINES = (
    _row(
        "x = 1\n%%distributed\ny = 2",
        "must be the first line of its cell: split the cell at line 2",
    ),
    _row("%%distributed\n%dist_gather x", "line 2: `%dist_gather` is for the notebook", "has run."),
    _row("%load_ext nbdist\n%%distributed\nprint('runs')", "runs"),
    _row("%distributed print('runs')", "runs"),
    _row(("%distributed here = rank", "_ = %dist_gather kept  # a list\n_"), "[1, 1]"),
    _row("%dist_gather kepd", "no rank has `kepd`. Did you mean `kept`?"),
    _row("%%distributed\nprint(kepd)", "Did you mean `kept`?"),
    _row("%%distributed\ntorch.ones(2).cuda()", "There is no GPU here: `.to(device)`"),
    _row("%%distributed -n gpu\nx", "`-n gpu`: no GPU is visible here. Use `-n 4`"),
    _row("%%distributed\nlocal_rank = 5", "`local_rank`", "each worker's own"),
    _row(("dist = 3", "%%distributed\ndist.barrier()"), "`dist` was ignored"),
    _row("%dist_start -n 2", "In nbdist `%dist_init -n 4` starts workers."),
    _row("%dist_wait", "In nbdist `job.wait()` waits for a cell that was sent with `--no-wait"),
)
"""What stands in the wrong place, or is called otherwise."""

FILES = (
    _row("%dist_export train", "the script needs a name that ends in .py"),
    _row("%dist_export /nosuch/x.py", "there is no folder /nosuch."),
    _row("%dist_attach nope", "has this name"),
)
"""Scripts, files and what is not there."""

CELLS = (
    _row("%%distributed\nnope", "NameError: name 'nope' is not defined", "2 of 2 ranks failed"),
    _row("%%distributed\nimport sys; sys.exit(2)", "ended the cell on this rank"),
    _row("%%distributed\n1/0 if rank else dist.barrier()", "1 of 2 ranks failed (1)", "barrier"),
    _row("%%rank 0\ndist.barrier()", "rank 1 does not run this cell", "released"),
    _row("%%distributed\nif rank: dist.barrier()", "rank 0 finished the cell without it"),
    _row("%%distributed\ndist.all_reduce(5)", "Expected parameter `tensor` of type torch.Tensor"),
    _row("%%distributed\ndist.broadcast(torch.ones(1), src=5)", "invalid root rank: 5"),
    _row(
        "%%distributed\nif rank: 1/0\ntry: dist.barrier()\nexcept RuntimeError: nope",
        "ZeroDivisionError: division by zero",
    ),
    _row(
        "try:\n    get_ipython().run_line_magic('dist_gather', 'nope')\n"
        "except Exception as error:\n    raise KeyError('mine') from error",
        "no rank has `nope`.",
        "KeyError: 'mine'",
    ),
)
"""What goes wrong on the ranks."""

MISTAKES = PYTHON + NUMBERS + ELSEWHERE + NAMES + FIRST_LINES + FILES + CELLS

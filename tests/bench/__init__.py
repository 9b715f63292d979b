"""Figures of a real notebook kernel, beside their budgets: `python -m tests.bench`.

    python -m tests.bench                      all rows, 5 runs each: about 6 minutes
    python -m tests.bench --only start,pass    some rows; `--list` names them all

Each line is one figure: median, min and max of its runs, its budget and the ratio of the
median to it; `miss` marks a median above its budget.  A figure without a budget has `-`: it is
a limit or a peer, measured in the same run for comparison, or a figure of which nothing is asked.

- Times are seen by a front end: from sending a cell to a notebook kernel until its reply.
- `p50` and `p95` are of 30 cells; each run gives a value of each.
- `x` is a ratio between two times of the same run.
- `busy` marks figures that were measured while something else used the processors.

No budget is asserted, and the exit code is 0 if some are missed: a machine that others use cannot
keep a promise.  Each measurement has a fresh notebook kernel, and names on stderr the processes
that were left behind.
"""

"""`%%distributed --watch model,optimizer`: which rank was the first to differ from others.

What that means is worked out in `nbdist.tools.divergence`, which is imported where it is used.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.command import CellOption, Line
from nbdist.notebook.options import Magic

EVERY = 50
_WANTED = (
    argument("--watch", metavar="NAMES",
             help="compare modules and optimizers over the ranks while the cell trains, such as"
             " `--watch model,optimizer`, and say what differed first"),
    argument("--every", metavar="STEPS", type=lambda text: _number(text),
             help=f"with --watch: compare after every STEPS steps of the optimizer ({EVERY})"),
    argument("--stop-on-difference", action="store_true",
             help="with --watch: end the cell on all ranks at the step where they differ; it then"
             " waits for all ranks at each step that is compared"),
)  # fmt: skip


def _number(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise UsageError(f"`--every {text}`: give a number of steps, such as `--every 50`.")
    return int(text)


def _add(magic: Magic) -> Magic:
    for option in reversed(_WANTED):
        magic = option(magic)
    return magic


@contextmanager
def _watched(line: Line) -> Iterator[None]:
    """Watch what `--watch` names while the cell runs, and show what was found after it."""
    options = line.options
    if options.watch is None:
        if options.every or options.stop_on_difference:
            raise UsageError(
                "`--every` and `--stop-on-difference` go with `--watch`: `--watch model`."
            )
        yield
        return
    if options.no_wait:
        raise UsageError("`--watch`: what it found is shown after the cell: not with `--no-wait`.")
    from nbdist.tools import divergence

    wanted = [*dict.fromkeys(filter(None, map(str.strip, options.watch.split(","))))]
    if not wanted:
        raise UsageError(divergence.NOTHING)
    line.pool.ensure(options, line.display)
    exchange = uuid.uuid4().hex[:8], line.ranks, options.stop_on_difference
    every = options.every or EVERY
    refused = line.call("watch.begin", wanted=wanted, every=every, exchange=exchange)
    if any(refused.values()):
        line.call("watch.end")  # on ranks that have begun
        raise divergence.refusal(refused)
    try:
        yield
    finally:
        divergence.show(line, wanted)


WATCH = CellOption(_add, _watched)

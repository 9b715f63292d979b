"""The magics `%dist_run` for scripts, `%dist_debug` for a failed rank, and `%dist_memory`.

They run in the notebook's process when a user calls them.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from IPython.core.magic_arguments import argument

from nbdist.config import DEFAULT_POOL, LOCAL, OPTIONS, launcher_for
from nbdist.errors import Interrupted, NbdistError, UsageError
from nbdist.notebook.cells import (
    attempt_steps,
    check_end,
    follow_steps,
    prepare,
    run_steps,
)
from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.commands.cells import send, sending_options
from nbdist.notebook.display import CommandOutput, below, table
from nbdist.notebook.jobs import CellSteps
from nbdist.notebook.options import (
    Magic,
    ranks_option,
    restarts_option,
    split_code,
    torchrun_options,
    world_options,
)
from nbdist.notebook.pool import Pool, Pools
from nbdist.notebook.shipping import Plan
from nbdist.output.events import Died
from nbdist.output.wording import fold_ranks
from nbdist.wire.ops import Cleaned, Memory, NameMemory, Peak
from nbdist.wire.work import OpCall
from nbdist.words import format_ranks, name_ranks, size_range, size_text
from nbdist.world.remote_call import find_script

NO_SCRIPT = (
    "`%dist_run`: give either a script or `-m module`: `%dist_run train.py --lr 0.1`, "
    "`%dist_run -m pkg.mod`, or `%dist_run --no-python hostname`."
)
NO_PYTHON_MODULE = (
    "`%dist_run --no-python -m`: a module needs python. `-m pkg.mod` alone runs a module, "
    "`--no-python` alone an executable."
)


def split_line(magic: Magic, line: str) -> tuple[str, list[str]]:
    """Split a line into nbdist's options at its beginning, and the words that follow them."""
    try:
        options, program = split_code(magic, line)
        words = shlex.split(program)
    except ValueError as error:  # for example, a quote is not closed
        raise UsageError(f"`%{magic.__name__}`: {str(error).lower()}.") from None
    return options, words[1:] if words[:1] == ["--"] else words


@command(
    argument("program", nargs="*", help="a script and its arguments"),
    argument("-m", "--module", action="store_true", help="the program is a module: -m pkg.mod"),
    argument("--no-python", action="store_true", help="the program is an executable"),
    argument("--pass-local-rank", action="store_true",
             help="pass --local-rank=N as the first argument"),
    ranks_option,
    restarts_option,
    *sending_options,
    torchrun_options,
    world_options,
    split=split_line,
)  # fmt: skip
def dist_run(line: MagicCall) -> None:
    """Run a script on all workers: `%dist_run -n 4 train.py --lr 0.1`.

    The script runs as `__main__`, in the notebook's folder and in the workers' namespace: later
    cells can use the variables that it has set.  Options of `%dist_run` come before the script; all
    words after it are the script's.  `{lr}` and `$lr` are replaced by the notebook's `lr`.
    """
    for note in _torchruns_line(line):
        line.display.add_note(note)
    send(line, _steps(line))


REDIRECTS = re.compile(r"[0-3]")


def _torchruns_line(line: MagicCall) -> Iterator[str]:
    """Yield notes for a line that was written for torchrun.

    The notes say which options are ignored, and that `-r 3` selects a rank and not torchrun's
    redirects.  If all workers are on this machine, `--rdzv-backend` and `--rdzv-endpoint` are
    ignored too, and are removed from `line.options`.
    """
    options = line.options
    ignored = list[str](options.ignored or ())
    if launcher_for(vars(options), os.environ) == LOCAL and not options.launcher:
        for name in ("rdzv_backend", "rdzv_endpoint"):
            if value := getattr(options, name):
                ignored.append(OPTIONS[name].as_typed(value))
                setattr(options, name, None)
    if ignored:
        texts = ", ".join(f"`{each}`" for each in ignored)
        yield f"ignored {texts}: the ranks of a world find one another, and all output is shown"
    is_torchruns = bool(ignored) or "--nproc" in line.text
    if is_torchruns and REDIRECTS.fullmatch(options.ranks or ""):
        rank = options.ranks
        yield f"`-r {rank}` is rank {rank} here, not torchrun's `--redirects {rank}`: leave it out"


def _steps(line: MagicCall) -> CellSteps:
    options = line.options
    if not line.words:
        raise UsageError(NO_SCRIPT)
    if options.module and options.no_python:
        raise UsageError(NO_PYTHON_MODULE)
    kind: Any = "module" if options.module else "executable" if options.no_python else "file"
    program, *words = line.words
    script = find_script(kind, program, words, local_rank=options.pass_local_rank)
    task, world = prepare(line.pool, script, line.display, options)
    steps = attempt_steps(
        line.pool, world, task, lambda table: Plan(table, frozenset()), line.display, options
    )
    return (yield from steps)


# --- debugging a rank's exception on the rank; IPython's `%debug` and `%pdb` do this too ----------


@command(
    argument("--alone", action="store_true",
             help="in JupyterLab's debugger: only this rank makes steps"),
    ranks_option,
)  # fmt: skip
def dist_debug(line: MagicCall) -> None:
    """Debug the last exception of a rank, in its own frames.

    By default it is the rank that failed first.  Type commands of pdb, such as `p x`, `up` and
    `where`, into the input box; `q` leaves the debugger and changes nothing.

    While ranks stand at a breakpoint in JupyterLab's debugger, `-r 2` shows rank 2 there; with
    `--alone` only that rank makes steps.
    """
    world, options = line.world, line.options
    if options.ranks is not None and len(line.ranks) == 1 and (debugger := line.pool.debugger):
        link = world.engine.connection.link
        if text := debugger.choose(link, line.ranks[0], is_alone=options.alone):
            line.display.add_note(text)
            return
    if options.alone:
        raise UsageError("`%dist_debug --alone`: no rank stands at a breakpoint of JupyterLab's.")
    ranks = line.ranks if line.options.ranks is not None else (failed_rank(line.pool),)
    task = world.task(OpCall("run.debug"), ranks=ranks)
    running = line.pool.last = world.submit(task)
    run_steps(follow_steps(line.pool, world, running, line.display))
    check_end(line.pool, world, running)
    results = zip(ranks, running.result(), strict=True)
    if none := [rank for rank, was_there in results if not was_there]:
        verb = "has" if len(none) == 1 else "have"
        raise UsageError(
            f"`%dist_debug`: {name_ranks(none)} {verb} no exception: none was raised, or"
            " `%dist_memory --free` or a restart released it. `%dist_output --failed` may still "
            "show it."
        )


def failed_rank(pool: Pool) -> int:
    """Return the rank that failed first in the last cell that failed.

    Raises UsageError if no rank has failed, or if the rank failed because its process ended.
    """
    if pool.failures.first_error is None:
        raise UsageError("`%dist_debug`: no rank has failed yet. `-r 2` says which to look at.")
    _, rank, error = pool.failures.first_error
    if isinstance(error, Died):
        raise UsageError(
            f"`%dist_debug`: rank {rank} {error.end}, so its exception is lost. "
            "`%dist_output --failed` shows its last output."
        )
    return rank


def debug_ranks(pools: Pools, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Debug a rank if the last error was nbdist's; otherwise call IPython's debugger (`original`).

    Wraps `InteractiveShell.debugger`, which `%debug` and `%pdb` call.  The rank is the one that
    failed first in the last failed cell of any pool.  While `%pdb` is on, does nothing after a
    UsageError, since no rank has run anything then.
    """
    shell = pools.shell
    is_wanted = bool(args or kwargs) or shell.call_pdb
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not is_wanted or not isinstance(error, NbdistError | Interrupted):
        return original(*args, **kwargs)
    if isinstance(error, UsageError) and shell.call_pdb:
        return None  # most such errors come before ranks run anything: there is nothing to debug
    errors = [(pool.failures.first_error, pool.name) for pool in pools]
    failed = [(error[0], name) for error, name in errors if error is not None]
    _, name = max(failed, default=(0.0, DEFAULT_POOL))
    return shell.run_line_magic("dist_debug", "" if name == DEFAULT_POOL else f"--pool {name}")


# --- the memory of the workers by variable, and releasing unused memory ---------------------------

MAX_MEMORY_ROWS = 12


@command(
    argument("--free", action="store_true", help="free what tracebacks, Out and caches hold"),
    ranks_option,
)
def dist_memory(line: MagicCall) -> CommandOutput:
    """Show memory per rank, and the largest tensors by variable.

    Shows the memory of the process (PSS: shared pages count in part) and of the GPU, its peak since
    the last cell began, and tensors that only the last traceback and `Out` hold; `--free` frees
    them.
    """
    return free_memory(line) if line.options.free else memory_tables(line.call("memory"))


def memory_tables(by_rank: Mapping[int, Memory]) -> CommandOutput:
    """Return tables of the memory of ranks: of all ranks, of each rank, and of the largest tensors.

    A further table has tensors that only the last traceback and `Out` hold.
    """
    parts = [table(headline(by_rank), per_rank(by_rank, used_figures))]
    rows = tensor_rows(by_rank, [(rank, each) for rank in by_rank for each in by_rank[rank].held])
    if rows:
        parts.append(table("Largest tensors, by variable", rows))
    kept = tensor_rows(by_rank, [(rank, each) for rank in by_rank for each in by_rank[rank].kept])
    if kept:
        sizes = size_range(memory.kept_size for memory in by_rank.values() if memory.kept)
        who = name_ranks(rank for rank, memory in by_rank.items() if memory.kept)
        title = f"{sizes} that only the last traceback and `Out` hold on {who}"
        parts.append(table(f"{title}: `%dist_memory --free` frees it", kept))
    if cut := [rank for rank, memory in by_rank.items() if not memory.is_whole]:
        parts.append(table(f"not all variables of {name_ranks(cut)} were searched in time", []))
    return below(parts)


def headline(by_rank: Mapping[int, Memory]) -> str:
    """Return a line on all ranks: `ranks 0-3 · 42-61 MiB · this machine 3.1 GiB of 23.5 GiB`."""
    parts = [name_ranks(by_rank), size_range(memory.pss for memory in by_rank.values())]
    if gpus := [memory.gpu for memory in by_rank.values() if memory.gpu]:
        used, total = size_range(gpu.used for gpu in gpus), size_range(gpu.total for gpu in gpus)
        parts.append(f"GPU {used} of {total}")
    limits = [memory.limit for memory in by_rank.values() if memory.limit]
    if limits:
        least = min(limits, key=lambda limit: limit.free)
        used = size_text(max(0, least.limit - least.free))
        parts.append(f"{least.where} {used} of {size_text(least.limit)}")
    return " · ".join(parts)


F = TypeVar("F")

Figures = Sequence[tuple[str, str]]  # a rank's row in a table: pairs of heading and text


def per_rank(by_rank: Mapping[int, F], figures_of: Callable[[F], Figures]) -> list[tuple[str, ...]]:
    """Return a table: its headings, then its rows; ranks with equal figures share a row.

    `figures_of` turns a rank's value in `by_rank` into pairs of a heading and the text below it.
    """
    figures = {rank: figures_of(each) for rank, each in by_rank.items()}
    (first, *_) = figures.values()
    headings = ("ranks", *(heading for heading, _ in first))
    same = fold_ranks({rank: tuple(text for _, text in each) for rank, each in figures.items()})
    return drop_empty_columns([headings, *((format_ranks(on), *row) for row, on in same.items())])


def drop_empty_columns(table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a table without its empty columns, such as `GPU` on a machine without GPUs.

    A column is empty if it has no text below its heading.
    """
    return [*zip(*(each for each in zip(*table, strict=True) if any(each[1:])), strict=True)]


def used_figures(memory: Memory) -> Figures:
    """Return a rank's row in the table of memory in use: headings with sizes for CPU and GPU."""
    gpu = memory.gpu
    return [
        ("memory", size_text(memory.pss)),
        ("peak in last cell", _peak_text(memory.peak)),
        ("in variables", size_text(memory.tensors)),
        ("GPU", f"{size_text(gpu.used)} of {size_text(gpu.total)}" if gpu else ""),
        ("GPU tensors", size_text(gpu.tensors) if gpu else ""),
        ("their peak", _peak_text(gpu.peak) if gpu else ""),
    ]


def _peak_text(peak: Peak) -> str:
    """Return `1.2 GiB`, or `at most 1.2 GiB` if the peak may be an earlier cell's."""
    return f"at most {size_text(peak.size)}" if peak.is_bound else size_text(peak.size)


def tensor_rows(
    by_rank: Mapping[int, Memory], tensors: Iterable[tuple[int, NameMemory]]
) -> list[tuple[str, ...]]:
    """Return a table of the largest tensors, with headings; ranks with equal tensors share a row.

    `tensors` are pairs of a rank and one of its tensors.  `by_rank` has all ranks.  Returns [] if
    there are no tensors.
    """
    on: dict[NameMemory, list[int]] = {}
    for rank, each in tensors:
        on.setdefault(each, []).append(rank)
    largest = sorted(on, key=lambda each: -each.size)[:MAX_MEMORY_ROWS]
    if not largest:
        return []
    is_on_gpu = any(each.device != "cpu" for each in largest)
    table = [("size", "name", "what", "device", "ranks")]
    for each in largest:
        device = each.device if is_on_gpu else ""
        ranks = "all" if len(on[each]) == len(by_rank) else format_ranks(on[each])
        table.append((size_text(each.size), each.name, each.kind, device, ranks))
    return drop_empty_columns(table)


dist_clean = dist_memory.short("dist_clean", "--free")


def free_memory(line: MagicCall) -> CommandOutput:
    """Release the last traceback with its frames, `Out` and `_`, cycles, and torch's cache.

    Returns a table of the sizes before and after.  Variables are kept.
    """
    head = f"{name_ranks(line.ranks)} · tracebacks, Out and _, cycles, cached GPU memory released"
    return table(head, per_rank(line.call("memory.clean"), freed_figures))


def freed_figures(cleaned: Cleaned) -> Figures:
    """Return a rank's row in the table of freed memory: sizes before and after the release."""
    titles = ("memory", "GPU tensors", "GPU held by torch")
    figures = list[tuple[str, str]]()
    for title, sizes in zip(titles, cleaned, strict=True):
        before, after = map(rounded, sizes) if any(sizes) or title == "memory" else ("", "")
        figures += [(f"{title} before", before), ("after", after)]
    return figures


def rounded(size: int) -> str:
    """Return a size as `43 MiB`, `240 MiB` or `1.2 GiB`.

    The size is rounded so that ranks with similar sizes have equal texts and share a row.
    """
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    number = size / 2**20
    return f"{round(number, -1) if number >= 100 else round(number):.0f} MiB"

"""The commands `nbdist status`, `nbdist ps` and `nbdist kill`, and texts for `nbdist mcp`.

The commands ask this user's worlds on this machine, by the sockets in their runtime folders.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.transcript import is_consequence, later_errors_text
from nbdist.output.wording import body_text, error_text
from nbdist.wire.log_files import LogTail
from nbdist.wire.places import RankPosition, Stack, is_call_mismatch
from nbdist.wire.queries import DescribeRanks, TaskSummary, WorldInfo
from nbdist.wire.status import Usage
from nbdist.words import aligned, count, name_ranks, one_line
from nbdist.world import hangs
from nbdist.world.agents import RunningWorld, ask_all, find_by_name, worlds
from nbdist.world.result import log_lines, logs_text, rows, usage_text

# --- `nbdist ps` and `nbdist kill` ------------------------------------------------------------

WORLD_END_TIMEOUT = 25.0
"""Seconds for a world to end after its agent got SIGTERM, and again after it got SIGKILL."""

HEADINGS = ("name", "pool", "ranks", "state", "cell", "since", "notebook", "process")

LONGEST_CELL = 40


def show_worlds() -> int:
    """Print a table with a line for each of the user's worlds; return 1 if no world runs."""
    running = worlds()
    if not running:
        sys.stdout.write("none of your worlds is running on this machine\n")
        return 1
    sys.stdout.write(f"{worlds_text(running)}\n")
    return 0


def worlds_text(running: Sequence[RunningWorld]) -> str:
    """Return a table with headings and a line for each world."""
    return "\n".join(aligned([HEADINGS, *map(row_of, running)]))


def row_of(world: RunningWorld) -> tuple[str, ...]:
    """Return the texts of a world's row in the table, one for each of the `HEADINGS`."""
    info = world.info
    notebook = f"detached since {_clock(info.since)}" if world.is_detached else str(info.notebook)
    cell = info.cell[:LONGEST_CELL]
    state = (info.name, info.pool, str(info.workers), info.state, cell, _clock(info.began))
    return (*state, notebook, str(world.agent))


def kill_world(name: str) -> int:
    """End the world with this name, pool or process id; return 1 if the world does not end."""
    world = find_by_name(worlds(), name, "nbdist kill")
    is_over = _end(world.agent, world.info.guard)
    sys.stdout.write(f"{world.name} {'ended' if is_over else 'does not end'}\n")
    return 0 if is_over else 1


def _end(agent: int, guard: int) -> bool:
    """End a world by SIGTERM to its agent, if needed by SIGKILL; return True if its guard exits."""
    with ExitStack() as stack:
        try:
            guard_exit = os.pidfd_open(guard)
            stack.callback(os.close, guard_exit)
            process = os.pidfd_open(agent)
            stack.callback(os.close, process)
        except ProcessLookupError:
            return True
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal_number)
            # The guard exits last, when it has killed and removed the leftovers.
            if select.select([guard_exit], [], [], WORLD_END_TIMEOUT)[0]:
                return True
    return False


def _clock(seconds: float) -> str:
    """Return a time of today as `14:05`, and another time with its day, as `02 Dec 14:05`."""
    at = time.localtime(seconds)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", at)


# --- the table of ranks ---------------------------------------------------------------------------

NONE = (
    "none of your worlds runs on this machine: `%%distributed -n 4` in a notebook starts one,"
    " after `%load_ext nbdist`"
)

MADE_UP = re.compile(r"\d{8}-\d{6}-\d+|world|")
"""Matches the names that nbdist gives worlds without `--name`, which are not shown."""

Before = dict[tuple[str, int], tuple[float, float]]
"""The last measurement of each worker, by host and pid.

Its first number is the time, and its second the processor seconds that the worker had used."""


def cpu_since(before: Before, info: WorldInfo) -> dict[int, float]:
    """Return, by rank, how many per cent of a core the rank has used since the last call.

    `before` has the figures of the last call, and gets those of this call.  The result has no entry
    for processes that `before` did not have.
    """
    percents = {}
    for worker in info.ranks:
        key, now = (info.host, worker.pid), (info.at, worker.cpu_seconds)
        at, seconds = before.setdefault(key, now)
        if now[0] > at:
            percents[worker.rank] = 100 * max(0.0, now[1] - seconds) / (now[0] - at)
            before[key] = now
    return percents


WORLD_STATUS_TIMEOUT = 8.0  # seconds for worlds to describe their ranks; even a head needs less

Picture = Sequence[tuple[WorldInfo, Mapping[int, float]]]
"""Worlds, each with the per cent of a core that its ranks use, as `cpu_since` returns."""


def take_picture(before: Before) -> Picture:
    """Return this user's worlds, sorted by notebook, with their use of processors.

    `before` has the figures of the last picture, and gets those of this one.
    """
    infos = [each.info for each in ask_all(DescribeRanks(), WORLD_STATUS_TIMEOUT)]
    infos.sort(key=lambda info: (info.notebook, info.pool))
    return [(info, cpu_since(before, info)) for info in infos]


def title(info: WorldInfo) -> str:
    """Return a world's title, such as `4 workers · gloo · train.ipynb (pid 123) · cell 7`."""
    cells = sorted({each.cell for each in info.ranks if each.cell is not None})
    notebook = os.path.basename(info.notebook_name)
    place = f"pid {info.notebook}" if info.notebook else "detached"
    parts = [
        f"pool {info.pool}" if info.pool not in ("", "default") else "",
        count(len(info.ranks), "worker") if info.ranks else "no workers yet",
        info.backend,
        "" if MADE_UP.fullmatch(info.name) else info.name,
        f"{notebook} ({place})" if notebook else f"notebook {place}",
        f"cell {', '.join(map(str, cells))}" if cells else "",
        usage_text([Usage(each.memory, each.gpu) for each in info.ranks]),
    ]
    return " · ".join(filter(None, map(printable, parts)))


def table(info: WorldInfo, cpu: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Return the headings of a world's table, and a row for each rank."""
    lines = {each.rank: printable(each.last_line).strip() for each in info.ranks}
    cells = rows(info.ranks, cpu, lines)
    return [tuple(map(printable, row)) for row in cells]


def printable(text: str) -> str:
    """Return text without colours, and with a space for each character that is not printable."""
    return "".join(sign if sign.isprintable() else " " for sign in strip(text))


WHOLE_WIDTH = ("rank", "state", "pid", "device", "memory", "cpu", "gpu")
"""Headings of columns whose texts `fitted` does not cut."""

LEAST_WIDTH = 8
"""The least number of characters to which `fitted` shortens a column."""


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return the rows of a table with texts cut so that lines have at most `width` characters.

    `rows` begins with the headings.  The widest of the columns that may be cut is cut first.  If
    there is no such column, or if all have only `LEAST_WIDTH` characters, lines stay longer than
    `width`.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [at for at, heading in enumerate(rows[0]) if heading not in WHOLE_WIDTH] if rows else []
    while texts and sum(widths) + 2 * len(widths) - 2 > width:
        longest = max(texts, key=widths.__getitem__)
        if widths[longest] <= LEAST_WIDTH:
            break
        widths[longest] -= 1
    return [[cut(text, limit) for text, limit in zip(row, widths, strict=True)] for row in rows]


def cut(text: str, width: int) -> str:
    """Return the text; if it is longer than `width`, cut the text and end it with `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def as_lines(picture: Picture, width: int) -> Iterator[str]:
    """Yield the lines for all worlds of a picture, cut to `width` characters."""
    if not picture:
        yield NONE[:width]
    for index, (info, cpu) in enumerate(picture):
        if index:
            yield ""
        for line in (title(info), *aligned(fitted(table(info, cpu), width))):
            yield cut(line, width)


BETWEEN_LOOKS = 0.5
"""Seconds between two questions to the same world, for example to measure processor time."""

PIPE_WIDTH = 10_000
"""The most characters of a line if stdout is no terminal."""


def show_status(every: float | None = None) -> int:
    """Print the user's worlds with their ranks; return 1 if no world runs, and 0 otherwise.

    With `every`, print them again every `every` seconds until Ctrl-C, and return 0. In a terminal
    new lines replace the last lines.
    """
    before: Before = {}
    is_terminal = sys.stdout.isatty()
    try:
        take_picture(before)
        time.sleep(BETWEEN_LOOKS)
        while True:
            picture = take_picture(before)
            width, height = shutil.get_terminal_size() if is_terminal else (PIPE_WIDTH, 0)
            lines = [*as_lines(picture, width)]
            text = "".join(f"{line}\n" for line in lines)
            if every is None:
                sys.stdout.write(text)
                return 0 if picture else 1
            sys.stdout.write(_redrawn(lines, height) if is_terminal else f"{text}\n")
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the terminal has shown `^C`
    return 0


def _redrawn(lines: Sequence[str], height: int) -> str:
    """Return text that draws lines over the last picture in a terminal.

    The text does not clear the screen first, which would flicker.
    """
    if len(lines) >= height:
        left_out = f"{len(lines) - height + 2} more lines: this window is too low for them"
        lines = [*lines[: height - 2], left_out]
    text = "".join(f"{line}\x1b[K\n" for line in lines)
    return f"\x1b[H{text}\x1b[J"


# --- texts for `nbdist mcp` -----------------------------------------------------------------------

MAX_STATUS_ROWS, NO_LINES = 64, "no lines"


def status_text(info: WorldInfo, cpu: Mapping[int, float]) -> str:
    """Return a text with a world's title, state and table, and which ranks wait in collectives."""
    headings, *lines = table(info, cpu) or [("no workers yet",)]
    more = (
        [f"({count(len(lines) - MAX_STATUS_ROWS, 'more rank')})"]
        if len(lines) > MAX_STATUS_ROWS
        else []
    )
    places = {each.rank: each.place for each in info.ranks if each.place is not None}
    idle = [each.rank for each in info.ranks if each.state == "idle"]
    return "\n".join(
        [
            title(info),
            f"state: {info.state}" + (f" · runs: {info.cell}" if info.cell else ""),
            *aligned([headings, *lines[:MAX_STATUS_ROWS]]),
            *more,
            *_waits(places, idle),
        ]
    )


def _waits(places: Mapping[int, RankPosition], idle: Collection[int]) -> Iterator[str]:
    """Yield a line on ranks that wait in collectives.

    If all ranks wait, also yield a line on whether they wait in vain.
    """
    if any(place.operation for place in places.values()):
        text = hangs.waits_text(places)
        if idle:
            verb = "does" if len(idle) == 1 else "do"
            text += f" · {name_ranks(idle)} {verb} not run this cell, or finished it"
        yield f"waiting: {text}"
    if places and not idle and all(place.operation for place in places.values()):
        verdict = hangs.verdict(places) if is_call_mismatch(places) else hangs.differing(places)
        yield verdict or "all ranks wait in collectives: they may go on by themselves"


def stacks_text(stacks: Iterable[Stack]) -> str:
    """Return the ranks' Python stacks as a text, or `no ranks` if there are no stacks.

    If several ranks have equal stacks, the text has the stack only once.
    """
    stacks = [*stacks]
    pids = {stack.rank: str(stack.pid) for stack in stacks}

    def who(ranks: Iterable[int]) -> str:
        return f"{name_ranks(ranks)} (pid {', '.join(pids[rank] for rank in [*ranks][:8])})"

    return "\n".join(hangs.stacks_text(hangs.group_stacks(stacks), who)) or "no ranks"


def last_lines(logs: Sequence[LogTail], pattern: re.Pattern[str] | None, limit: int) -> str:
    """Return the last lines of logs as a text, at most `limit` lines of each log.

    With a pattern only lines that match are returned.  If several ranks have equal lines, the text
    has these lines only once.
    """
    if logs and not any(each.file for each in logs):
        return "these workers have no log files (NBDIST_LOG_DIR is empty)"
    tails = (each._replace(lines=tuple(log_lines(each, pattern)[-limit:])) for each in logs)
    return "\n".join(logs_text(tails)) or NO_LINES


def success_text(task: TaskSummary) -> str:
    """Return a line that says that the last task did not fail, and that a failure was before it."""
    return f"{_task_text(task)} did not fail; the last failure was before it:"


def _task_text(task: TaskSummary) -> str:
    cell = f"Cell In[{task.cell}]" if task.cell else "a task"
    return f"{cell} ({one_line(task.title, 80)}), run by {name_ranks(task.ranks)} of {task.size},"


def failure_text(task: TaskSummary) -> str:
    """Return a text on a task's failures: which rank failed first, when and why, and the others."""
    errors = {each.rank: each.error for each in task.troubles}
    released = {stack.rank: stack.place for stack in task.aborted if stack.rank in errors}
    places = {**{stack.rank: stack.place for stack in task.places}, **released}
    # Leave out errors that followed from another rank's failure, and errors of released ranks.
    causes = [r for r, e in errors.items()
           if not (is_consequence(e) or (r in released and isinstance(e, Failure)))]  # fmt: skip
    first = min(causes or errors, key=lambda rank: errors[rank].time_ns)
    error = errors[first]
    clock = time.strftime("%H:%M:%S", time.localtime(error.time_ns / 1e9))
    task_text = _task_text(task).rstrip(",")
    lines = [f"{clock} · {(error.time_ns - task.began_ns) / 1e9:.1f} s into {task_text}"]
    if task.troubles[0].is_idle:
        lines = [f"{clock} · while no cell was running; the last was {task_text}"]
    if released and not causes:
        why = hangs.why_aborted(released, places, task.ranks, errors.keys(), task.size)
        lines.append(f"ranks were released from a collective: {why}")
    if causes:
        lines.append(f"first failure: rank {first}: {error_text(error)}")
        if isinstance(error, Died):
            lines += filter(None, [hangs.why_died({first: error}, places), error.why])
        lines.append(strip(body_text(error)))
    after = {rank: _short(each, released.get(rank), errors) for rank, each in errors.items()}
    lines += [] if causes else [f"rank {first}: {error_text(after[first])}"]
    return "\n".join([*lines, *later_errors_text(after, first)])


def _short(
    error: RankError, released: RankPosition | None, errors: Mapping[int, RankError]
) -> RankError:
    if isinstance(error, Failure) and (released or error.connections == "ended"):
        return hangs.shorten_error(error, released, None, errors.values())
    return error

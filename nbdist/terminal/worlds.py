"""The commands `nbdist status`, `ps` and `kill`, and texts on worlds for `nbdist mcp`.

They ask the sockets of this user's worlds on this machine.
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
from nbdist.output.transcript import followed_text, follows
from nbdist.output.wording import body_text, error_text
from nbdist.wire.log_files import LogTail
from nbdist.wire.places import Place, Stack
from nbdist.wire.queries import Look, TaskSeen, WorldInfo
from nbdist.wire.status import Usage
from nbdist.words import aligned, count, name_ranks, one_line
from nbdist.world import hangs
from nbdist.world.agents import Found, ask_all, named, worlds
from nbdist.world.result import log_lines, logs_text, rows, usage_text

# --- `nbdist ps` and `nbdist kill` ------------------------------------------------------------

KILL_TIMEOUT = 25.0
"""Seconds for a world to end in order, and again for what is left once its agent was killed."""

HEADINGS = ("name", "pool", "ranks", "state", "cell", "since", "notebook", "process")

LONGEST_CELL = 40


def show_worlds() -> int:
    """Print all worlds, a line each; return 1 if there is none."""
    found = worlds()
    if not found:
        sys.stdout.write("none of your worlds is running on this machine\n")
        return 1
    sys.stdout.write(f"{worlds_text(found)}\n")
    return 0


def worlds_text(found: Sequence[Found]) -> str:
    """Return a table of worlds, a line each."""
    return "\n".join(aligned([HEADINGS, *map(row_of, found)]))


def row_of(found: Found) -> tuple[str, ...]:
    """Return a world's row for `HEADINGS`."""
    info = found.info
    notebook = f"detached since {_clock(info.since)}" if found.is_detached else str(info.notebook)
    cell = info.cell[:LONGEST_CELL]
    state = (info.name, info.pool, str(info.workers), info.state, cell, _clock(info.began))
    return (*state, notebook, str(found.agent))


def kill_world(name: str) -> int:
    """End a world and all that belongs to it; UsageError if none, or several, have this name."""
    found = named(worlds(), name, "nbdist kill")
    is_over = _end(found.agent, found.info.guard)
    sys.stdout.write(f"{found.name} {'ended' if is_over else 'does not end'}\n")
    return 0 if is_over else 1


def _end(agent: int, guard: int) -> bool:
    """End an agent and all that it has started, at last by SIGKILL; return True if all ended."""
    with ExitStack() as stack:
        try:
            last = os.pidfd_open(guard)
            stack.callback(os.close, last)
            process = os.pidfd_open(agent)
            stack.callback(os.close, process)
        except ProcessLookupError:
            return True
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            # The guard ends when nothing is left.
            if select.select([last], [], [], KILL_TIMEOUT)[0]:
                return True
    return False


def _clock(seconds: float) -> str:
    """Return a time of today as `14:05`, or another one with its day."""
    at = time.localtime(seconds)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", at)


# --- the table of ranks ---------------------------------------------------------------------------

NONE = (
    "none of your worlds runs on this machine: `%%distributed -n 4` in a notebook starts one,"
    " after `%load_ext nbdist`"
)

MADE_UP = re.compile(r"\d{8}-\d{6}-\d+|world|")
"""Names that nbdist gives worlds without `--name`."""

Before = dict[tuple[str, int], tuple[float, float]]
"""By host and pid, when a process was looked at last, and its processor seconds by then."""


def cpu_since(before: Before, seen: WorldInfo) -> dict[int, float]:
    """Return by rank the per cent of a core since the last look, which `before` keeps.

    Processes that were not there before have none.
    """
    found = {}
    for worker in seen.ranks:
        key, now = (seen.host, worker.pid), (seen.at, worker.cpu_seconds)
        at, seconds = before.setdefault(key, now)
        if now[0] > at:
            found[worker.rank] = 100 * max(0.0, now[1] - seconds) / (now[0] - at)
            before[key] = now
    return found


LOOK_TIMEOUT = 8.0  # seconds for worlds to describe their ranks; longer than a head takes

Picture = Sequence[tuple[WorldInfo, Mapping[int, float]]]
"""Worlds, and the processor time of each world's ranks."""


def look(before: Before) -> Picture:
    """Return all worlds, sorted by their notebooks, with the processor time since the last look."""
    found = [each.info for each in ask_all(Look(), LOOK_TIMEOUT)]
    found.sort(key=lambda info: (info.notebook, info.pool))
    return [(info, cpu_since(before, info)) for info in found]


def title(seen: WorldInfo) -> str:
    """Return a world's title, such as `4 workers · gloo · train.ipynb (pid 123) · cell 7`."""
    cells = sorted({each.cell for each in seen.ranks if each.cell is not None})
    notebook = os.path.basename(seen.notebook_name)
    place = f"pid {seen.notebook}" if seen.notebook else "detached"
    parts = [
        f"pool {seen.pool}" if seen.pool not in ("", "default") else "",
        count(len(seen.ranks), "worker") if seen.ranks else "no workers yet",
        seen.backend,
        "" if MADE_UP.fullmatch(seen.name) else seen.name,
        f"{notebook} ({place})" if notebook else f"notebook {place}",
        f"cell {', '.join(map(str, cells))}" if cells else "",
        usage_text([Usage(each.memory, each.gpu) for each in seen.ranks]),
    ]
    return " · ".join(filter(None, map(printable, parts)))


def table(seen: WorldInfo, cpu: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Return the headings of a world's table, and a row for each rank."""
    lines = {each.rank: printable(each.last_line).strip() for each in seen.ranks}
    found = rows(seen.ranks, cpu, lines)
    return [tuple(map(printable, row)) for row in found]


def printable(text: str) -> str:
    """Return text without control characters: a worker may have written what a terminal obeys."""
    return "".join(sign if sign.isprintable() else " " for sign in strip(text))


WHOLE_WIDTH = ("rank", "state", "pid", "device", "memory", "cpu", "gpu")
"""Columns that are never cut."""

LEAST_WIDTH = 8
"""Characters to which other columns are cut at most."""


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Cut texts in columns, the widest column first, until a line is at most `width` long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [at for at, heading in enumerate(rows[0]) if heading not in WHOLE_WIDTH] if rows else []
    while sum(widths) + 2 * len(widths) - 2 > width:
        longest = max(texts, key=widths.__getitem__)
        if widths[longest] <= LEAST_WIDTH:
            break
        widths[longest] -= 1
    return [[cut(text, most) for text, most in zip(row, widths, strict=True)] for row in rows]


def cut(text: str, width: int) -> str:
    """Cut a text that is longer than `width`, and end it with `…`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def as_lines(found: Picture, width: int) -> Iterator[str]:
    """Yield the lines for all worlds, none longer than `width`."""
    if not found:
        yield NONE[:width]
    for index, (seen, cpu) in enumerate(found):
        if index:
            yield ""
        for line in (title(seen), *aligned(fitted(table(seen, cpu), width))):
            yield cut(line, width)


BETWEEN_LOOKS = 0.5
"""Seconds for which `nbdist status` measures processor time: agents keep an answer less long."""

PIPE_WIDTH = 10_000
"""Characters of a line if stdout is no terminal."""


def show_status(every: float | None = None) -> int:
    """Print all worlds; return 1 if there is none.

    With `every`, print them again after so many seconds, until Ctrl-C: in a terminal over the last
    picture, else below it.
    """
    before: Before = {}
    is_terminal = sys.stdout.isatty()
    try:
        look(before)
        time.sleep(BETWEEN_LOOKS)
        while True:
            found = look(before)
            width, height = shutil.get_terminal_size() if is_terminal else (PIPE_WIDTH, 0)
            lines = [*as_lines(found, width)]
            below = "".join(f"{line}\n" for line in lines)
            if every is None:
                sys.stdout.write(below)
                return 0 if found else 1
            sys.stdout.write(_redrawn(lines, height) if is_terminal else f"{below}\n")
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        sys.stdout.write("\n")  # the terminal has shown `^C`
    return 0


def _redrawn(lines: Sequence[str], height: int) -> str:
    """Return text that draws over the last picture: clearing the screen first would flicker."""
    if len(lines) >= height:
        left_out = f"{len(lines) - height + 2} more lines: this window is too low for them"
        lines = [*lines[: height - 2], left_out]
    text = "".join(f"{line}\x1b[K\n" for line in lines)
    return f"\x1b[H{text}\x1b[J"


# --- texts for `nbdist mcp` -----------------------------------------------------------------------

MOST_ROWS, NO_LINES = 64, "no lines"


def status_text(seen: WorldInfo, cpu: Mapping[int, float]) -> str:
    """Return a world's title and table, and for whom ranks wait."""
    headings, *lines = table(seen, cpu) or [("no workers yet",)]
    more = [f"({count(len(lines) - MOST_ROWS, 'more rank')})"] if len(lines) > MOST_ROWS else []
    places = {each.rank: each.place for each in seen.ranks if each.place is not None}
    idle = [each.rank for each in seen.ranks if each.state == "idle"]
    return "\n".join(
        [
            title(seen),
            f"state: {seen.state}" + (f" · runs: {seen.cell}" if seen.cell else ""),
            *aligned([headings, *lines[:MOST_ROWS]]),
            *more,
            *_waits(places, idle),
        ]
    )


def _waits(places: Mapping[int, Place], idle: Collection[int]) -> Iterator[str]:
    """Yield lines on the ranks that wait, and for which others, if any do."""
    if any(place.operation for place in places.values()):
        said = hangs.waits_text(places)
        if idle:
            verb = "does" if len(idle) == 1 else "do"
            said += f" · {name_ranks(idle)} {verb} not run this cell, or finished it"
        yield f"waiting: {said}"
    if places and not idle and all(place.operation for place in places.values()):
        verdict = hangs.verdict(places) if hangs.never_meet(places) else hangs.differing(places)
        yield verdict or "all ranks wait in collectives: they may go on by themselves"


def stacks_text(stacks: Iterable[Stack]) -> str:
    """Return the Python stack of each rank, equal ones once."""
    stacks = [*stacks]
    pids = {stack.rank: str(stack.pid) for stack in stacks}

    def who(ranks: Iterable[int]) -> str:
        return f"{name_ranks(ranks)} (pid {', '.join(pids[rank] for rank in [*ranks][:8])})"

    return "\n".join(hangs.stacks_text(hangs.alike(stacks), who)) or "no ranks"


def last_lines(logs: Sequence[LogTail], pattern: re.Pattern[str] | None, most: int) -> str:
    """Return the last lines of each rank, equal ones once, without colours."""
    if logs and not any(each.file for each in logs):
        return "these workers have no log files (NBDIST_LOG_DIR is empty)"
    ends = (each._replace(lines=tuple(log_lines(each, pattern)[-most:])) for each in logs)
    return "\n".join(logs_text(ends)) or NO_LINES


def success_text(task: TaskSeen) -> str:
    """Return a line on a task that has not failed, as far as is known, above the last failure."""
    return f"{_named(task)} did not fail; the last failure was before it:"


def _named(task: TaskSeen) -> str:
    cell = f"Cell In[{task.cell}]" if task.cell else "a task"
    return f"{cell} ({one_line(task.title, 80)}), run by {name_ranks(task.ranks)} of {task.size},"


def failure_text(task: TaskSeen) -> str:
    """Return which rank of a task failed first, when and why, and what followed on the others."""
    errors = {each.rank: each.error for each in task.troubles}
    released = {stack.rank: stack.place for stack in task.aborted if stack.rank in errors}
    places = {**{stack.rank: stack.place for stack in task.places}, **released}
    # The others were released, or followed from another rank's failure.
    own = [r for r, e in errors.items()
           if not (follows(e) or (r in released and isinstance(e, Failure)))]  # fmt: skip
    first = min(own or errors, key=lambda rank: errors[rank].time_ns)
    error = errors[first]
    clock = time.strftime("%H:%M:%S", time.localtime(error.time_ns / 1e9))
    where = _named(task).rstrip(",")
    lines = [f"{clock} · {(error.time_ns - task.began_ns) / 1e9:.1f} s into {where}"]
    if task.troubles[0].is_idle:
        lines = [f"{clock} · while no cell was running; the last was {where}"]
    if released and not own:
        why = hangs.why_aborted(released, places, task.ranks, errors.keys(), task.size)
        lines.append(f"ranks were released from a collective: {why}")
    if own:
        lines.append(f"first failure: rank {first}: {error_text(error)}")
        if isinstance(error, Died):
            lines += filter(None, [hangs.why_died(first, error, places), error.why])
        lines.append(strip(body_text(error)))
    after = {rank: _after(each, released.get(rank), errors) for rank, each in errors.items()}
    lines += [] if own else [f"rank {first}: {error_text(after[first])}"]
    return "\n".join([*lines, *followed_text(after, first)])


def _after(error: RankError, released: Place | None, errors: Mapping[int, RankError]) -> RankError:
    if isinstance(error, Failure) and (released or error.connections == "ended"):
        return hangs.in_one_line(error, released, None, errors.values())
    return error

"""The worlds of this user on this machine: `nbdist status`, `top`, `ps` and `kill`."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from nbdist.errors import UsageError
from nbdist.output.ansi import strip
from nbdist.wire.views import Look, Usage, WorldInfo
from nbdist.words import aligned, count
from nbdist.world.agents import Found, ask_all, worlds
from nbdist.world.result import rows, usage_text

# --- `nbdist ps` and `nbdist kill` ------------------------------------------------------------

KILL_TIMEOUT = 10.0
"""Seconds for an agent to end in order, and again after it was killed for what is left."""

HEADINGS = ("name", "pool", "ranks", "state", "cell", "since", "notebook", "process")

LONGEST_CELL = 40


def show_worlds() -> int:
    """Print all worlds, a line each; 1 where there is none."""
    found = worlds()
    if not found:
        sys.stdout.write("none of your worlds is running on this machine\n")
        return 1
    sys.stdout.write(f"{worlds_text(found)}\n")
    return 0


def worlds_text(found: Sequence[Found]) -> str:
    """List worlds, a line each."""
    return "\n".join(aligned([HEADINGS, *map(row_of, found)]))


def row_of(found: Found) -> tuple[str, ...]:
    """Write what is said of one world, as `HEADINGS`."""
    info = found.info
    notebook = f"detached since {_clock(info.since)}" if found.is_detached else str(info.notebook)
    cell = info.cell[:LONGEST_CELL]
    state = (info.name, info.pool, str(info.workers), info.state, cell, _clock(info.began))
    return (*state, notebook, str(found.agent))


def kill_world(name: str) -> int:
    """End a world and all that belongs to it; UsageError where none, or several, are called so."""
    called = [each for each in worlds() if each.is_called(name)]
    if not called:
        raise UsageError(
            f"`nbdist kill {name}`: none of your worlds on this machine has this name."
        )
    if len(called) > 1:
        processes = ", ".join(str(each.agent) for each in called)
        raise UsageError(
            f"`nbdist kill {name}`: {len(called)} worlds have this name. "
            f"Use the number of its process: {processes}."
        )
    (found,) = called
    is_over = _end(found.agent, found.info.guard)
    sys.stdout.write(f"{found.name} {'ended' if is_over else 'does not end'}\n")
    return 0 if is_over else 1


def _end(agent: int, guard: int) -> bool:
    """End an agent with all that is its own, by force if need be; return True if all has ended."""
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
            # The guard ends once nothing is left.
            if select.select([last], [], [], KILL_TIMEOUT)[0]:
                return True
    return False


def _clock(seconds: float) -> str:
    """Write a time of today as `14:05`, else with its day."""
    at = time.localtime(seconds)
    is_today = at[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", at)


# --- how a world looks in a terminal ----------------------------------------------------------

NONE = (
    "none of your worlds runs on this machine: `%%distributed -n 4` in a notebook starts one,"
    " after `%load_ext nbdist`"
)

MADE_UP = re.compile(r"\d{8}-\d{6}-\d+|world|")
"""Names of worlds that nobody has given one."""

Before = dict[tuple[str, int], tuple[float, float]]
"""When each process was looked at last, by its host and number, and its seconds by then."""


def cpu_since(before: Before, seen: WorldInfo) -> dict[int, float]:
    """Return by rank the per cent of a core since the last look; none for new processes."""
    found = {}
    for worker in seen.ranks:
        key, now = (seen.host, worker.pid), (seen.at, worker.cpu_seconds)
        at, seconds = before.setdefault(key, now)
        if now[0] > at:
            found[worker.rank] = 100 * max(0.0, now[1] - seconds) / (now[0] - at)
            before[key] = now
    return found


LOOK_TIMEOUT = 3.0

Picture = Sequence[tuple[WorldInfo, Mapping[int, float]]]
"""Worlds, and the processor time of each one's ranks."""


def looks() -> Generator[Picture, None, None]:
    """Look at all worlds again and again, in the order of their notebooks."""
    before: Before = {}
    while True:
        found = [each.info for each in ask_all(Look(), LOOK_TIMEOUT)]
        found.sort(key=lambda info: (info.notebook, info.pool))
        yield [(info, cpu_since(before, info)) for info in found]


def title(seen: WorldInfo) -> str:
    """Say which world it is: `4 workers · gloo · train.ipynb (pid 123) · cell 7`."""
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
    """Lay out headings, and a row per rank."""
    lines = {each.rank: printable(each.last_line).strip() for each in seen.ranks}
    found = rows(seen.ranks, cpu, lines)
    return [tuple(map(printable, row)) for row in found]


def printable(text: str) -> str:
    """Return it without what a terminal would obey: it may be what a worker has written."""
    return "".join(sign if sign.isprintable() else " " for sign in strip(text))


def fitted(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Cut columns of texts, the longest first, until a line is no longer than `width`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [at for at, heading in enumerate(rows[0]) if heading not in WHOLE_WIDTH] if rows else []
    while sum(widths) + 2 * len(widths) - 2 > width:
        longest = max(texts, key=widths.__getitem__)
        if widths[longest] <= LEAST_WIDTH:
            break
        widths[longest] -= 1
    return [[cut(text, most) for text, most in zip(row, widths, strict=True)] for row in rows]


def cut(text: str, width: int) -> str:
    """Cut a text that is longer, and show that."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def as_lines(found: Picture, width: int) -> Iterator[str]:
    """Write all worlds, no line longer than that."""
    if not found:
        yield NONE[:width]
    for index, (seen, cpu) in enumerate(found):
        if index:
            yield ""
        for line in (title(seen), *aligned(fitted(table(seen, cpu), width))):
            yield cut(line, width)


def _printed(found: Picture, width: int) -> str:
    return "".join(f"{line}\n" for line in as_lines(found, width))


BETWEEN_LOOKS = 0.5
"""Seconds in which `nbdist status` counts processor time; longer than an answer is kept."""


def show_status() -> int:
    """Print all worlds once; 1 where there is none."""
    with closing(looks()) as seen:
        next(seen)
        time.sleep(BETWEEN_LOOKS)
        found = next(seen)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    sys.stdout.write(_printed(found, width))
    return 0 if found else 1


# --- draws what runs again and again ----------------------------------------------------------

STATE = re.compile(r"(?<=  )(?:(idle)|(busy)|(dead)|(starting))\b.*?(?=  |$)")
COLOURS = (32, 34, 31, 33)
"""Green, blue, red and yellow, for the states in this order."""

WHOLE_WIDTH = ("rank", "state", "pid", "device", "memory", "cpu", "gpu")
"""Columns that are not cut where a line is too long."""

LEAST_WIDTH = 8
"""Of the others."""

ON, OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back."""


def show_top(every: float, times: int = 0) -> int:
    """Draw all worlds every `every` seconds, until `q` or Ctrl-C, or `times` times."""
    is_screen = sys.stdout.isatty()
    has_keys = is_screen and sys.stdin.isatty()
    with suppress(KeyboardInterrupt), closing(looks()) as seen, ExitStack() as stack:
        if is_screen:
            stack.callback(sys.stdout.write, OFF)
            sys.stdout.write(ON)
        if has_keys:
            before = termios.tcgetattr(sys.stdin)
            stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
            tty.setcbreak(sys.stdin)
        for number, found in enumerate(seen, 1):
            sys.stdout.write(_redrawn(found) if is_screen else _printed(found, 10_000) + "\n")
            sys.stdout.flush()
            if number == times or _quits_within(every, has_keys=has_keys):
                break
    return 0


def _quits_within(seconds: float, *, has_keys: bool) -> bool:
    """Wait `seconds`; return True as soon as `q` is typed."""
    if not has_keys:
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


def _redrawn(found: Picture) -> str:
    """Draw over what is there, which does not flicker as a cleared screen would."""
    size = shutil.get_terminal_size()
    lines = map(coloured, [*as_lines(found, size.columns)][: size.lines - 1])
    text = "".join(f"{line}\x1b[K\r\n" for line in lines)
    return f"\x1b[H{text}\x1b[J"


def coloured(line: str) -> str:
    """Return a row with its state in a colour, unless NO_COLOR is set."""
    if "NO_COLOR" in os.environ:
        return line
    return STATE.sub(lambda it: f"\x1b[{COLOURS[(it.lastindex or 1) - 1]}m{it[0]}\x1b[0m", line, 1)

"""What `%dist_why` shows: the last failure, with all that is known of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.errors import AgentLost, NbdistError, WorkerError, name_ranks, word_exit
from nbdist.notebook.draw.blocks import LINES, RED, bold, dim, panel, traceback_html
from nbdist.notebook.draw.summary import error_text, traceback_text
from nbdist.wire.outputs import Died, Failure
from nbdist.world.running import RunningCell
from nbdist.world.sgr import strip

NOTHING = "nothing has failed so far"

TRACEBACK_LINES, WIDTH = 1000, 2000


@dataclass(frozen=True, slots=True)
class Why:
    """One failure: `title` says who, when and what; `body` is a traceback, or last lines.

    `followed` has a line for each group of ranks that failed too.
    """

    title: str
    body: str = ""
    followed: tuple[str, ...] = ()
    log: str = ""

    @property
    def text(self) -> str:
        """For text/plain."""
        return "\n".join(filter(None, [self.title, strip(self.body), *self.followed, self._log]))

    @property
    def html(self) -> str:
        """The same, for a page."""
        body = traceback_html(self.body, TRACEBACK_LINES, WIDTH) if self.body else ""
        ends = "".join(f"<div>{dim(line)}</div>" for line in (*self.followed, self._log) if line)
        style = f"border-left:3px solid {RED};padding-left:8px;margin:3px 0;{LINES}"
        box = f'<div style="{style}">{body}{ends}</div>' if body or ends else ""
        return panel(f"<div>{bold(self.title)}</div>", box)

    @property
    def _log(self) -> str:
        return f"all of its lines: {self.log}" if self.log else ""


def nothing() -> tuple[str, str]:
    """The HTML and the text where nothing has failed."""
    return panel(dim(NOTHING)), NOTHING


def why_of(running: RunningCell, error: NbdistError, logs: Mapping[int, str]) -> Why | None:
    """Why the cell failed; None where no rank did."""
    if isinstance(error, AgentLost):
        return Why(f"{_clock(time.time())} · {error}")
    if not isinstance(error, WorkerError):
        return None
    rank, errors = error.rank, running.transcript.errors
    first = errors[rank]
    where = f"rank {rank} on {error.host} (pid {error.pid})"
    number = running.cell.execution_count
    when = f"{running.seconds_until(first.time_ns):.1f} s into "
    when += f"Cell In[{number}]" if number else "the cell"
    title = f"{_clock(first.time_ns / 1e9)} · {where} · {when} · {error_text(first)}"
    same = set(running.transcript.same_error(rank)) - {rank}
    followed = [f"{name_ranks(same)}: the same"] if same else []
    others: dict[str, list[int]] = {}
    for other in sorted(errors.keys() - same - {rank}):
        others.setdefault(error_text(errors[other]), []).append(other)
    followed += [f"{name_ranks(ranks)}: {text}" for text, ranks in others.items()]
    return Why(title, _body(first), tuple(followed), logs.get(rank, ""))


def why_died(rank: int, host: str, died: Died, log: str) -> Why:
    """Why a rank was replaced that ran no cell."""
    who = f"rank {rank} on {host}" + (f" (pid {died.pid})" if died.pid else "")
    said = f"the process {word_exit(died.exit_code)} while no cell was running"
    return Why(f"{_clock(died.time_ns / 1e9)} · {who} · {said}", _body(died), (), log)


def _body(error: Failure | Died) -> str:
    if isinstance(error, Failure):
        return traceback_text(error)
    if not error.last_lines:
        return "it had written nothing"
    return "\n".join(["its last lines:", *error.last_lines])


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

"""What `%dist_why` shows: the last failure, with all that is known of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.errors import AgentLost, NbdistError, WorkerError
from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.rank_transcript import RankTranscript
from nbdist.output.screen import Line
from nbdist.output.transcript import said_by
from nbdist.output.wording import (
    LINES,
    RED,
    barred,
    bold,
    dim,
    error_text,
    fold_ranks,
    line,
    panel,
    traceback_html,
    traceback_text,
)
from nbdist.words import name_ranks
from nbdist.world.running import RunningTask

TRACEBACK_LINES, WIDTH = 1000, 2000
LAST_LINES = 20


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
        ends = "".join(line(dim(text)) for text in (*self.followed, self._log))
        box = barred(body + ends, RED, f";{LINES}") if body or ends else ""
        return panel(line(bold(self.title)), box)

    @property
    def _log(self) -> str:
        return f"all of its lines: {self.log}" if self.log else ""


def why_of(running: RunningTask, error: NbdistError, logs: Mapping[int, str]) -> Why | None:
    """Find why a cell failed; None where no rank did."""
    if isinstance(error, AgentLost):
        return Why(f"{_clock(time.time())} · {error}")
    if not isinstance(error, WorkerError):
        return None
    rank, errors = error.rank, running.transcript.errors
    first = errors[rank]
    where = f"rank {rank} on {error.host} (pid {error.pid})"
    number = running.task.execution_count
    when = f"{running.seconds_until(first.time_ns):.1f} s into "
    when += f"Cell In[{number}]" if number else "the cell"
    title = f"{_clock(first.time_ns / 1e9)} · {where} · {when} · {error_text(first)}"
    transcript = running.transcript
    alike = set(transcript.alike_error(rank)) - {rank}
    same = {other for other in alike if said_by(errors[other]) == said_by(first)}
    followed = [f"{name_ranks(same)}: the same"] if same else []
    mentioned = same | {rank}
    if (folded := transcript.folded_error(sorted(alike - same))) is not None:
        followed.append(f"{name_ranks(alike - same)}: {error_text(folded)}")
        mentioned |= alike
    others = fold_ranks({other: error_text(errors[other]) for other in errors.keys() - mentioned})
    followed += [f"{name_ranks(ranks)}: {text}" for text, ranks in others.items()]
    return Why(title, _body(first, transcript[rank]), tuple(followed), logs.get(rank, ""))


def why_died(rank: int, host: str, died: Died, log: str) -> Why:
    """Word why a rank was replaced that ran no cell."""
    who = f"rank {rank} on {host}" + (f" (pid {died.pid})" if died.pid else "")
    end = f"the process {idle_end(died)}"
    return Why(f"{_clock(died.time_ns / 1e9)} · {who} · {end}", _body(died), (), log)


def idle_end(died: Died) -> str:
    """Word how a process ended whose rank ran no cell, or one that was stopped before."""
    if died.by_stop:
        return died.end
    why = f": {died.why}" if died.why else ""
    return f"{died.end} while no cell was running{why}"


def _body(error: RankError, shown: RankTranscript | None = None) -> str:
    """Return its traceback or last lines; of a machine that is lost those that were shown."""
    if isinstance(error, Failure):
        return traceback_text(error)
    lines = error.last_lines
    if shown is not None and not lines:
        lines = tuple(each.text for each in shown.tail(LAST_LINES) if isinstance(each, Line))
    return "\n".join(["its last lines:", *lines]) if lines else "it had printed nothing"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

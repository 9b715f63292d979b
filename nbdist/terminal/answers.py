"""What `nbdist mcp` says of a world, as text: tasks, stacks and logs; bounded, no secrets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.transcript import follows
from nbdist.output.wording import error_text, fold_ranks
from nbdist.terminal.worlds import printable, table, title
from nbdist.wire.views import LogTail, Place, Stack, TaskSeen, WorldInfo
from nbdist.words import aligned, count, name_ranks, one_line
from nbdist.world import hangs
from nbdist.world.result import log_lines, logs_text

MOST_CHARACTERS, LONGEST_LINE = 16_000, 400
"""Characters of an answer, and of a line: an assistant pays for each of them."""

MOST_ROWS = 64


def bounded(text: str, *, keep_end: bool = False) -> str:
    """Cut what is too long, and say how much was left out, and how to get it."""
    lines = [
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}… (line cut)"
        for line in map(printable, text.splitlines())
    ]
    kept: list[str] = []
    size = 0
    for line in reversed(lines) if keep_end else lines:
        size += len(line) + 1
        if size > MOST_CHARACTERS:
            break
        kept.append(line)
    kept = kept[::-1] if keep_end else kept
    if (more := len(lines) - len(kept)) > 0:
        said = f"({count(more, 'line')} left out: ask for fewer ranks or lines)"
        kept = [said, *kept] if keep_end else [*kept, said]
    return "\n".join(kept)


# --- secrets ----------------------------------------------------------------------------------

WORDS = (
    *("TOKEN(?!IZ)", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "API_?KEY", "ACCESS_?KEY"),
    *("PRIVATE_?KEY", "CREDENTIAL", "AUTH(?!OR)"),
)
SECRET = re.compile("|".join(WORDS), re.IGNORECASE)
"""A part of the name of an environment variable whose value stays hidden."""

ASSIGNED = re.compile(
    rf"((?:\b[A-Z0-9_]*(?:{SECRET.pattern})[A-Z0-9_]*|\b(?:password|passwd|secret|api_key|"
    r"(?:access|auth|hf|api)_token))[\"']?\s*[=:]\s*[\"']?)([^\s\"',;]{4,})"
)
"""Capitals, as variables of the environment have: `max_tokens=4096` is no secret."""

KNOWN = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|xox[abp]-|AKIA|glpat-|eyJ[\w-]{10,}\.)[\w.-]{12,}"
)
"""What tokens of common services begin with."""

HIDDEN, SHORTEST = "<hidden>", 6


def secrets_of(pids: Iterable[int]) -> set[str]:
    """Return the values of environment variables of these processes that look like secrets."""
    environs = [os.environb.items()]
    for pid in pids:
        with suppress(OSError):
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            environs.append({k: v for k, _, v in (each.partition(b"=") for each in pairs)}.items())
    return {
        os.fsdecode(value)
        for environ in environs
        for name, value in environ
        if len(value) >= SHORTEST and SECRET.search(os.fsdecode(name))
    }


def masked(text: str, secrets: Iterable[str]) -> str:
    """Hide these values, and what looks like a token or is assigned to the name of one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return KNOWN.sub(HIDDEN, ASSIGNED.sub(rf"\1{HIDDEN}", text))


# --- worlds, and what their ranks do ------------------------------------------------------------


def status_text(seen: WorldInfo, cpu: Mapping[int, float]) -> str:
    """Say which world it is, what each rank does, and for whom ranks wait."""
    headings, *rows = table(seen, cpu) or [("no workers yet",)]
    more = [f"({count(len(rows) - MOST_ROWS, 'more rank')})"] if len(rows) > MOST_ROWS else []
    places = {each.rank: each.place for each in seen.ranks if each.place is not None}
    idle = [each.rank for each in seen.ranks if each.state == "idle"]
    return "\n".join(
        [
            title(seen),
            f"state: {seen.state}" + (f" · runs: {seen.cell}" if seen.cell else ""),
            *aligned([headings, *rows[:MOST_ROWS]]),
            *more,
            *_waits(places, idle),
        ]
    )


def _waits(places: Mapping[int, Place], idle: Collection[int]) -> Iterator[str]:
    """Say for whom ranks wait, where some do."""
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
    """Write the Python stack of each rank, equal ones once."""
    stacks = [*stacks]
    pids = {stack.rank: str(stack.pid) for stack in stacks}

    def who(ranks: Iterable[int]) -> str:
        return f"{name_ranks(ranks)} (pid {', '.join(pids[rank] for rank in [*ranks][:8])})"

    return "\n".join(hangs.stacks_text(hangs.alike(stacks), who)) or "no ranks"


def last_lines(logs: Sequence[LogTail], pattern: re.Pattern[str] | None, most: int) -> str:
    """Write the last lines of each rank, equal ones once; without colours."""
    if logs and not any(each.file for each in logs):
        return "these workers have no log files (NBDIST_LOG_DIR is empty)"
    ends = (each._replace(lines=tuple(log_lines(each, pattern)[-most:])) for each in logs)
    return "\n".join(logs_text(ends)) or "no lines"


# --- why a task failed, or what it waits for ------------------------------------------------------


def success_text(task: TaskSeen) -> str:
    """Say that a task has ended well, as far as is known."""
    return f"{_named(task)} did not fail; the last failure was before it:"


def _named(task: TaskSeen) -> str:
    cell = f"Cell In[{task.cell}]" if task.cell else "a task"
    return f"{cell} ({one_line(task.title, 80)}), run by {name_ranks(task.ranks)} of {task.size},"


def failure_text(task: TaskSeen) -> str:
    """Say which rank failed first, when and why, and what followed from it on the others."""
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
            lines.append("its last lines:" if error.last_lines else "it had printed nothing")
        lines += map(strip, error.last_lines if isinstance(error, Died) else error.traceback)
    others = {r: _after(r, e, released) for r, e in errors.items() if r != first or not own}
    lines += [f"{name_ranks(ranks)}: {said}" for said, ranks in fold_ranks(others).items()]
    return "\n".join(lines)


def _after(rank: int, error: RankError, released: Mapping[int, Place]) -> str:
    if isinstance(error, Failure) and (rank in released or error.connections == "ended"):
        return error_text(hangs.in_one_line(error, released.get(rank), None))
    return error_text(error)

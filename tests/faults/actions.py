"""Random actions in a notebook, each followed by a look at every variable of every rank.

    python -m tests.faults.actions --seed 7 --actions 100
    python -m tests.faults.actions --seed 77 --actions 100 --busy 4

What a user does, in an IPython shell: cells that bind, change and delete variables, fail, wait for
what never comes, are stopped, or run in the background beside others; variables sent, gathered,
scattered, copied, saved and restored; ranks that die or are restarted, more ranks and fewer.  After
each action all ranks have to have what `tests.faults.oracle` says, in the same processes as before,
and nbdist has to have named what was lost.  The first action after which any of this is untrue is
printed with its seed and step, and ends the program with exit code 1.  The program also fails if
notebook, agent and fork server have more memory, descriptors, threads or processes at the end than
after the first actions.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from glob import glob
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import psutil
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.agent.fork_server import makes_idle_imports
from nbdist.errors import RanksReleased, UsageError, WorkerDied
from nbdist.output.ansi import strip
from nbdist.topology import parse_ranks
from nbdist.words import format_ranks
from tests.faults.oracle import KINDS, Oracle, kind_with, names_of
from tests.faults.stops import spinning
from tests.traces import command_line
from tests.waiting import once, press_stop, wait_until_at_rest

RANKS, MOST_RANKS = 4, 5

SETTLED = 30
"""Number of actions after which nothing may grow: most kinds of actions have happened by then."""

POOLED = 2
"""Threads by which the agent's pool may grow: one reads a rank's stack, others count memory or look
at GPUs.  How many of them exist is chance, and never more than three."""

VALUES = range(100, 100_000, 100)
"""Values of new variables, so far apart that they stay different after some changes."""

LOOK = (
    "%%distributed -o found\n"
    "(lambda one: dist.all_reduce(one) or {'pid': __import__('os').getpid(), 'sum': one.item(), "
    f"**{{kind: eval(read, globals()) for kind, read in { {k: v.read for k, v in KINDS.items()} }"
    ".items() if kind in globals()}})(torch.ones(1))"
)

WAITS = (
    "time.sleep(600)",
    "while True: pass",
    "if rank == 0: time.sleep(600)\ndist.barrier()",
    "if rank != 0: dist.all_reduce(torch.ones(9))\ntime.sleep(600)",
)

COLLECTIVES = (
    "dist.all_reduce(torch.ones(9))",
    "dist.all_reduce(torch.ones(2_000_000))",
    "dist.barrier()",
    "dist.all_gather_object([None] * world_size, rank)",
    "dist.recv(torch.ones(1), (rank + 1) % world_size)",
)
"""Calls in which ranks wait for a rank that does not come."""

REPLACED = re.compile(r"the notebook's `(\w+)` \(\w+\) replaces the ranks'")
KEPT = re.compile(r"`(\w+)[^`]*` was \w+ on the ranks since it was sent, and in the notebook")

MAY_BE_REPLACED = {"model", "give"}
"""Kinds that may be replaced without a change: an old model's optimizer, a pushed function."""

LOST = re.compile(r"anks? ([\d,-]+) w\w+ restarted and \w+ variables(?: \(([^)]*)\))? are gone")


class Violation(Exception):
    """A rank, a process or a message is not as the oracle says."""


class Holdings(NamedTuple):
    """Resources of the processes that outlive every fault, added up."""

    descriptors: int
    threads: int
    processes: int
    megabytes: float

    def has_grown_since(self, before: Holdings) -> bool:
        """Whether there is more growth than by a new connection and two threads of a thread pool.

        Memory goes up and down: 16 MiB in three processes are no growth.
        """
        return (
            self.megabytes > before.megabytes + 16
            or self.descriptors > before.descriptors + 3
            or self.threads > before.threads + POOLED
            or self.processes > before.processes
        )

    @classmethod
    def now(cls, workers: Container[int]) -> Holdings:
        """Measure this process, which is the notebook, and all its descendants but the workers."""
        started = psutil.Process().children(recursive=True)
        lasting = [psutil.Process(), *(each for each in started if each.pid not in workers)]
        if makes_idle_imports():  # idle imports take more memory than a leak
            for each in lasting:
                if "nbdist.agent.fork_server" in command_line(each):
                    wait_until_at_rest(each)
        return cls(
            sum(process.num_fds() for process in lasting),
            sum(process.num_threads() for process in lasting),
            len(lasting),
            round(sum(map(_anonymous_kib, lasting)) / 2**10, 1),
        )


def _anonymous_kib(process: psutil.Process) -> int:
    """Return a process's anonymous memory, shared or not: forks change the unshared part."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


class Notebook:
    """A shell with nbdist, its output since the last look, and the oracle."""

    def __init__(self, dice: random.Random, folder: str) -> None:
        self.dice, self.folder, self.said = dice, folder, ""
        self.oracle = Oracle([{} for _ in range(RANKS)], [0] * RANKS)
        self.before: Oracle | None = None  # for an action that may do nothing
        config = Config(HistoryManager={"enabled": False})
        self.shell: Any = InteractiveShell(config=config)  # type: ignore[no-untyped-call]
        self.run("import torch, torch._dynamo\n%load_ext nbdist")  # as the first optimizer does
        self.run(f"%dist_init -n {RANKS}")

    def run(self, source: str, *errors: type[BaseException]) -> None:
        """Run a cell of the notebook, which must end as `errors` say, by default without one."""
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            done = self.shell.run_cell(source)
        error = done.error_before_exec or done.error_in_exec
        self.said += f"{source}\n{strip(text.getvalue())}{type(error).__name__}: {error}\n"
        may_be_stopped = (KeyboardInterrupt,) if self.before else ()
        wanted = (*(errors or (NoneType,)), *may_be_stopped)
        self.require(isinstance(error, wanted), f"{error!r} instead of {wanted}")

    def cell(self, on: Sequence[int], source: str, *errors: type[BaseException]) -> None:
        """Run a distributed cell on the ranks `on`."""
        imports = "import os, signal, time\n"
        self.run(f"%%distributed -r {format_ranks(on)}\n{imports}{source}", *errors)

    def require(self, is_so: object, what: str) -> None:
        """Raise Violation, with the output since the last look, unless `is_so` is true."""
        if not is_so:
            raise Violation(f"{what}\n--- said:\n{self.said}")

    def look(self) -> None:
        """Compare all variables of all ranks with the oracle's, and losses with the messages."""
        before, self.before = self.before, None
        self.run(LOOK)
        found = [{**each} for each in self.shell.user_ns["found"]]
        pids, sums = [each.pop("pid") for each in found], {each.pop("sum") for each in found}
        for oracle in filter(None, (self.oracle, before)):
            oracle.begin(oracle.everyone)
        if before and found == before.values:
            self.oracle = before
        oracle = self.oracle
        self.require(sums == {len(found)} == {len(oracle.ranks)}, f"{sums} of {len(found)} ranks")
        are_same = [was in (0, pid) for was, pid in zip(oracle.pids, pids, strict=True)]
        self.require(all(are_same), f"processes {pids} instead of {oracle.pids}")
        wanted, other = oracle.values, before and before.values
        self.require(found == wanted, f"{found}\n--- instead of {wanted}\n--- or {other}")
        told = {
            rank: {*re.findall(r"\w+", lost[2] or "")}
            for lost in LOST.finditer(self.said)
            for rank in parse_ranks(lost[1], MOST_RANKS)
        }
        is_told = told.keys() == oracle.lost.keys() and all(
            names <= told[rank] or "more" in told[rank] for rank, names in oracle.lost.items()
        )
        self.require(is_told, f"said to be lost: {told} instead of {oracle.lost}")
        if before is None:
            replaced = {*map(kind_with, REPLACED.findall(self.said))}
            is_told = oracle.replaced <= replaced <= oracle.replaced | MAY_BE_REPLACED
            self.require(is_told, f"said to replace: {replaced} instead of {oracle.replaced}")
            kept = {*map(kind_with, KEPT.findall(self.said))}
            self.require(kept == oracle.kept, f"said to be kept: {kept} instead of {oracle.kept}")
        oracle.lost, oracle.replaced, oracle.kept = {}, set(), set()
        oracle.pids, self.said = pids, ""

    def holdings(self) -> Holdings:
        """Measure the processes that outlive every fault, with as many ranks as at first."""
        if (now := len(self.oracle.ranks)) != RANKS:
            self.run(f"%dist_scale {RANKS}")
            self.oracle.scale(RANKS, range(min(RANKS, now)))
        self.look()
        return Holdings.now(self.oracle.pids)

    # --- dice -----------------------------------------------------------------------------

    def some(self) -> list[int]:
        """Choose all ranks, or a random part of them."""
        everyone = self.oracle.everyone
        many = self.dice.choice((len(everyone), self.dice.randint(1, len(everyone))))
        return sorted(self.dice.sample(everyone, many))

    def kinds(self) -> list[str]:
        """Choose up to three kinds of variables."""
        return self.dice.sample([*KINDS], self.dice.randint(1, 3))

    def is_so(self) -> bool:
        """Decide by chance, with equal odds."""
        return self.dice.random() < 0.5

    # --- actions --------------------------------------------------------------------------

    def bind(self) -> None:
        on, kinds, value = self.some(), self.kinds(), self.dice.choice(VALUES)
        self.cell(on, "\n".join(KINDS[kind].bind.format(v=f"({value} + rank)") for kind in kinds))
        for kind in kinds:
            self.oracle.give(kind, {rank: [value + rank] * KINDS[kind].size for rank in on})

    def changing(self, on: Sequence[int], kinds: Sequence[str] = ()) -> str:
        """Return lines of a cell that change variables on these ranks, and change the oracle's."""
        kinds = kinds or self.kinds()
        self.oracle.change(kinds, on)
        return lines_to_change(kinds)

    def change(self) -> None:
        on = self.some()
        self.cell(on, self.changing(on))

    def forget(self) -> None:
        on, kinds = self.some(), self.kinds()
        lines = (f"if {kind!r} in globals(): del {', '.join(names_of([kind]))}" for kind in kinds)
        self.cell(on, "\n".join(lines))
        self.oracle.forget(kinds, on)

    def bind_here(self) -> None:
        kind, value = self.dice.choice([*KINDS]), self.dice.choice(VALUES)
        how, now = KINDS[kind], self.oracle.here.get(kind)
        if now is None or self.is_so():
            self.run(how.bind.format(v=value))
            self.oracle.bind_here(kind, [value] * how.size)
        elif self.is_so():
            self.run(how.change)
            changed = [number + 1 for number in now.value]
            self.oracle.bind_here(kind, changed, in_place=how.changes_in_place)
            self.oracle.read_here(kind)
        else:
            self.run(f"del {', '.join(names_of([kind]))}")
            self.oracle.bind_here(kind, None)

    def push(self) -> None:
        on, kind = self.some(), self.dice.choice([*KINDS])
        is_here = kind in self.oracle.here
        line = f"%dist_push {' '.join(names_of([kind]))} -r {format_ranks(on)}"
        self.run(line, NoneType if is_here else UsageError)
        if is_here:
            self.oracle.push(kind, on)

    def gather(self) -> None:
        on, kind = self.some(), self.dice.choice([*KINDS])
        what = KINDS[kind].read if kind == "model" else kind
        has = [self.oracle.values[rank].get(kind) for rank in on]
        line = f"%dist_gather {what} --as got -r {format_ranks(on)}"
        self.run(line, NoneType if all(has) else UsageError)
        if all(has):
            got = self.shell.user_ns["got"] if len(on) > 1 else [self.shell.user_ns["got"]]
            read = kind if kind == "model" else KINDS[kind].read
            found = [eval(read, {kind: each}) for each in got]
            self.require(found == has, f"gathered {found} instead of {has}")

    def scatter(self) -> None:
        value, size = self.dice.choice(VALUES), len(self.oracle.ranks)
        self.run(
            f"whole = list(range({value}, {value + 2 * size}))\n%dist_scatter whole --as items"
        )
        first = {rank: value + 2 * rank for rank in range(size)}
        self.oracle.give("items", {rank: [number, number + 1] for rank, number in first.items()})

    def sync(self) -> None:
        source, kind = self.dice.choice(self.oracle.everyone), self.dice.choice([*KINDS])
        to_all = self.is_so()
        given = self.oracle.values[source].get(kind)
        names = " ".join(names_of([kind]))
        line = f"%dist_sync {names} --from {source}{' -r all' if to_all else ''}"
        self.run(line, NoneType if given else UsageError)
        wants = [r for r, has in enumerate(self.oracle.ranks) if to_all or kind not in has]
        if given and {*wants} - {source}:  # the source then owns the variable, too
            self.oracle.sync(kind, source, {*wants} - {source})

    def raises(self) -> None:
        on = self.oracle.everyone
        rank, changing = self.dice.choice(on), self.changing(on)
        lines = f"if rank == {rank}: raise ValueError('bad')\n{self.dice.choice(COLLECTIVES)}"
        self.cell(on, changing + lines, ValueError)

    def skips(self) -> None:
        on = self.oracle.everyone
        changing, rank = self.changing(on), self.dice.choice(on)
        waits = self.dice.choice(COLLECTIVES)
        self.cell(on, f"{changing}if rank != {rank}: {waits}", RanksReleased)

    def dies(self) -> None:
        on = self.oracle.everyone
        dead = self.dice.sample(on, self.dice.choice((1, 1, 2)))
        how = self.dice.choice(("os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"))
        ends = f"if rank in {dead}:\n    time.sleep({self.dice.choice((0, 0.01, 0.2))}); {how}\n"
        self.cell(on, self.changing(on) + ends + self.dice.choice(COLLECTIVES), WorkerDied)
        self.oracle.lose(dead)

    def dies_while_idle(self) -> None:
        rank = self.dice.choice(self.oracle.everyone)
        os.kill(self.oracle.pids[rank], signal.SIGKILL)
        self.run("%distributed pass", NoneType, WorkerDied)
        self.oracle.lose([rank])

    def stop(self) -> None:
        on, gate = self.oracle.everyone, f"{self.folder}/{time.monotonic_ns()}-"
        come = f"open(f'{gate}{{rank}}', 'w').close()\n"
        with stopped_when(lambda: len(glob(f"{gate}*")) == len(on)):
            wait = self.dice.choice(WAITS)
            self.cell(on, self.changing(on) + come + wait, KeyboardInterrupt)
        self.require("No variables were lost" in self.said, "Stop does not say what is kept")

    def stop_command(self) -> None:
        """Whenever Stop comes during a command, all ranks bind the variable, or no rank does."""
        self.before, due = self.oracle.copy(), time.monotonic() + self.dice.random() / 20
        with stopped_when(lambda: time.monotonic() > due):
            self.dice.choice((self.push, self.scatter, self.sync, self.restore))()

    def restart(self) -> None:
        on = self.dice.choice((self.oracle.everyone, [self.dice.choice(self.oracle.everyone)]))
        is_all = len(on) > 1
        keep = [k for k in self.kinds() if all(k in self.oracle.ranks[rank] for rank in on)]
        kept = f" --keep {','.join(names_of(keep))}" if keep else ""
        self.run(f"%dist_restart{'' if is_all else f' -r {on[0]}'}{kept}")
        if is_all:  # the message says that all is cleared
            self.oracle.start_anew(keep)
        else:
            self.oracle.lose(on, keep, at_rest=True)

    def scale(self) -> None:
        now = len(self.oracle.ranks)
        size = self.dice.choice([size for size in range(2, MOST_RANKS + 1) if size != now])
        stay, option = [*range(min(size, now))], f"{size}"
        if size < now and self.is_so():
            stay = sorted(self.dice.sample(range(now), size))
            option = f"-r {format_ranks(stay)}"
        self.run(f"%dist_scale {option}")
        self.oracle.scale(size, stay)

    def snapshot(self) -> None:
        is_saved = self.oracle.snapshot()
        self.run("%dist_snapshot --name kept", NoneType if is_saved else UsageError)

    def restore(self) -> None:
        size, source = len(self.oracle.saved), self.dice.choice((None, None, 0, 1))
        is_right = size == len(self.oracle.ranks) if source is None else source < size
        option = "" if source is None else f" --from {source}"
        self.run(f"%dist_restore --name kept{option}", NoneType if is_right else UsageError)
        if is_right:
            self.oracle.restore(source)

    def job(self) -> None:
        on, kinds, gate = self.some(), self.kinds(), f"{self.folder}/{time.monotonic_ns()}-"
        self.oracle.use(kinds, on)
        before, changing = self.oracle.copy(), self.changing(on, kinds)
        waiting = f"import os, time\nwhile not os.path.exists({gate!r}): time.sleep(0.01)\n"
        self.run(f"%%distributed --no-wait -o job -r {format_ranks(on)}\n{waiting}{changing}")
        self.run("sum(range(9))")
        if self.is_so():
            self.run("%dist_interrupt")
            self.oracle = before
        else:
            with open(gate, "w"):
                self.run(self.dice.choice(("job.wait()", "pass")))

    def beside(self) -> None:
        """Run a job on some ranks, and cells on the others that may fail, wait in vain, or die."""
        everyone, gate = self.oracle.everyone, f"{self.folder}/{time.monotonic_ns()}-"
        busy = sorted(self.dice.sample(everyone, self.dice.randint(1, len(everyone) - 1)))
        others = [rank for rank in everyone if rank not in busy]
        kinds = self.kinds()
        self.oracle.use(kinds, busy)
        changing = lines_to_change(kinds)
        waiting = f"import os, time\nwhile not os.path.exists({gate!r}): time.sleep(0.01)\n"
        self.run(f"%%distributed --no-wait -o job -r {format_ranks(busy)}\n{waiting}{changing}")
        is_stopped = self.is_so()
        self.cell(others, self.changing(others))
        dead = self._end_beside(others)
        if is_stopped:
            self.run("%dist_interrupt")
        else:
            with open(gate, "w"):
                self.run("job.wait()")
            # Only now: nbdist does not know what a running job will bind or change.
            self.oracle.count_up(kinds, busy)
        self.run("%distributed pass")
        if dead:
            self.oracle.lose(dead)

    def _end_beside(self, others: Sequence[int]) -> list[int]:
        """Run a last cell on ranks beside a job; return the ranks that have died in it."""
        rank = self.dice.choice(others)
        match self.dice.choice(("succeed", "raise", "wait", "die")):
            case "succeed":
                self.cell(others, self.changing(others))
            case "raise":
                lines = f"if rank == {rank}: raise ValueError('bad')\n"
                self.cell(others, self.changing(others) + lines, ValueError)
            case "wait":
                waits = self.dice.choice(COLLECTIVES)
                self.cell(others, self.changing(others) + waits, RanksReleased)
            case "die":
                self.cell(others, f"if rank == {rank}: os._exit(3)", WorkerDied)
                return [rank]
        return []


NAMED = (
    "bind bind change change forget bind_here bind_here push gather scatter sync raises skips dies "
    "dies_while_idle stop stop_command restart scale snapshot restore job beside beside"
)
ACTIONS: list[Callable[[Notebook], None]] = [getattr(Notebook, name) for name in NAMED.split()]


def lines_to_change(kinds: Sequence[str]) -> str:
    """Return lines of a cell that change the variables of some kinds that a rank has."""
    return "".join(f"if {kind!r} in globals(): {KINDS[kind].change}\n" for kind in kinds)


@contextmanager
def stopped_when(is_due: Callable[[], bool]) -> Iterator[None]:
    """Press Stop once `is_due` is true and a command of nbdist runs, which handles Stop itself."""

    def runs() -> bool:
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler

    with suppress(KeyboardInterrupt), once(lambda: is_due() and runs(), press_stop):
        yield  # a Stop may come just after the command


def act(seed: int, actions: int, folder: str) -> Counter[str]:
    """Do `actions` actions, each followed by a look; return how often each action was done."""
    dice, done = random.Random(seed), Counter[str]()
    notebook = Notebook(dice, folder)
    try:
        notebook.look()
        for step in range(actions):
            if step == min(SETTLED, actions // 2):
                settled = notebook.holdings()
            action = dice.choice(ACTIONS)
            try:
                action(notebook)
                notebook.look()
            except Violation as violation:
                where = f"--- seed {seed}, step {step}: {action.__name__}"
                raise Violation(f"{violation}{where}") from None
            done[action.__name__] += 1
        end = notebook.holdings()
        sys.stdout.write(f"{settled}\n{end}\n")
        if end.has_grown_since(settled):
            raise Violation("something grew")
    finally:
        notebook.shell.run_cell("%unload_ext nbdist")
    return done


def main() -> None:
    """Print the actions and how long they took; exit with code 1 after a violation."""
    parser = argparse.ArgumentParser("python -m tests.faults.actions", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--actions", type=int, default=100)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside")
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}, {options.actions} actions, {RANKS} ranks\n")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, spinning(options.busy):
        os.environ |= {"IPYTHONDIR": folder, "NBDIST_SNAPSHOT_DIR": folder, "NBDIST_LOG_DIR": ""}
        try:
            done = act(options.seed, options.actions, folder)
        except Violation as violation:
            sys.exit(str(violation))
    seconds = time.monotonic() - started
    sys.stdout.write(f"{dict(done)}\n{seconds / max(1, options.actions):.2f} s each\n")


if __name__ == "__main__":
    main()

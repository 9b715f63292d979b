"""Compares random programs of both sides with a plain kernel, in values and identities.

    python -m tests.objects.oracle --steps 100000 --seed 1 -n 3 --seconds 600

prints how many statements were compared and how many programs differ, and the first program that
does, with all statements left out that it does not need.  With `--both` the notebook also changes
what the ranks have changed: theirs must stay, and a line must say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

from tests.objects.kept_programs import programs
from tests.objects.random_programs import (
    CLASSES,
    HELPERS,
    HERE,
    NAMES,
    PRELUDE,
    Step,
    program,
    replayed,
)

LENGTH = 40  # statements of a program
PROGRAMS = 25  # number of programs after which the ranks are restarted
CHUNK = 15.0  # seconds for which a cell of the notebook compares programs
HINT = re.compile(r"%dist_push")
FAR_BEHIND = 8  # lines of a difference that are shown


@dataclass
class Report:
    """The numbers of compared statements and programs, and the differences by program."""

    steps: int = 0
    programs: int = 0
    conflicts: int = 0
    next: int = 0
    seconds: float = 0.0
    differences: dict[str, str] = field(default_factory=dict)


# --- in the notebook's kernel -----------------------------------------------------------------


class Driver:
    """Runs the statements of programs in this kernel and on its ranks."""

    def __init__(self, ranks: int, *, in_one_place: bool = False) -> None:
        from IPython.core.getipython import get_ipython

        self.shell: Any = get_ipython()  # type: ignore[no-untyped-call]
        self.ranks = ranks
        self.in_one_place = in_one_place
        self.restart()

    def restart(self) -> None:
        """Start new workers, and forget the variables."""
        self._forget()
        self._magic("line", "dist_restart", f"-n {self.ranks}")
        self._here(PRELUDE)
        self._magic("cell", "distributed", "", PRELUDE)

    def difference(self, steps: Sequence[Step]) -> tuple[str, int]:
        """Run a program; return the first difference of the ranks, and the number of conflicts."""
        self._forget()
        self._run(Step(HERE, CLASSES))
        wanted, left_out = replayed(steps, self.ranks), set[int]()
        if len(wanted) < len(steps):
            return f"step {len(wanted)}: {steps[len(wanted)]}\nit is not legal", 0
        for number, step in enumerate(steps):
            if number == len(wanted):  # the statement needs a change that was left out
                break
            try:
                found, text = self._run(step)
            except Exception as error:  # noqa: BLE001 (whatever the statement raises)
                return f"step {number}: {step}\nraises {type(error).__name__}: {error}", 0
            if not step.conflicts:
                said = f"shows a line that is not true:\n{text}" if HINT.search(text) else ""
                said = said or _difference(wanted[number], found)
                if said:
                    return f"step {number}: {step}\n{said}", 0
                continue
            without = _without(steps, {*left_out, number})
            apart = replayed(without, self.ranks)
            if not _difference(apart[number], found):
                if not HINT.search(text):
                    return f"step {number}: {step}\nthe notebook's change is lost without a line", 0
                left_out.add(number)
                wanted = apart
            elif said := _difference(wanted[number], found):
                theirs = _difference(apart[number], found)
                return f"step {number}: {step}\nthe ranks' change is lost:\n{theirs}\n{said}", 0
        return "", sum(step.conflicts for step in steps)

    def _run(self, step: Step) -> tuple[list[str], str]:
        """Run a statement on its side; return the ranks' descriptions, and the shown text."""
        source = step.source
        if step.side == HERE and not self.in_one_place:
            self._here(source)
            source = ""
            if not step.told:
                return [], ""
        asked = ", ".join(f"{name}={name}" for name in step.told)
        text = self._magic("cell", "distributed", "-o told_", f"{source}\ndescribe({asked})")
        told = self.shell.user_ns["told_"]
        return [told[rank] for rank in range(self.ranks)], text

    def _forget(self) -> None:
        names = [name for name in (*NAMES, *HELPERS) if name in self.shell.user_ns]
        if names:
            self._here(f"del {', '.join(names)}")
        away = f"[globals().pop(each, None) for each in {[*NAMES, *HELPERS]}] and None"
        self._magic("cell", "distributed", "", away)

    def _here(self, source: str) -> None:
        from IPython.utils.capture import capture_output

        with capture_output():
            done = self.shell.run_cell(source, store_history=False)
        done.raise_error()

    def _magic(self, kind: str, name: str, line: str, *cell: str) -> str:
        from IPython.utils.capture import capture_output

        with capture_output() as shown:
            if kind == "line":
                self.shell.run_line_magic(name, line)
            else:
                self.shell.run_cell_magic(name, line, *cell)
        texts = (each.data.get("text/plain", "") for each in shown.outputs)
        return "\n".join([shown.stdout, shown.stderr, *texts])

    # --- many programs ------------------------------------------------------------------------

    def compare(self, seed: str, first: int, steps: int, *, both: bool) -> Report:
        """Compare programs for `CHUNK` seconds, or until `steps` statements were compared."""
        report, begin = Report(next=first), time.monotonic()
        while report.steps < steps and time.monotonic() - begin < CHUNK:
            name = f"{seed}:{report.next}"
            report.next += 1
            if report.next % PROGRAMS == 0:
                self.restart()
            written = program(name, self.ranks, LENGTH, both=both)
            said, conflicts = self.difference(written)
            report.steps += len(written)
            report.programs += 1
            report.conflicts += conflicts
            if said:
                report.differences[name] = said
                self.restart()
        report.seconds = time.monotonic() - begin
        return report

    def smallest(self, steps: list[Step], seconds: float = 40.0) -> tuple[list[Step], str]:
        """Leave out all statements without which the program still differs."""
        until, said = time.monotonic() + seconds, self._again(steps)
        if not said:
            return steps, "It does not differ by itself: what programs before it left is needed."
        steps = steps[: int(said.split(maxsplit=2)[1].strip(":")) + 1]
        silent = [*(replace(each, told=()) for each in steps[:-1]), steps[-1]]
        if not any(each.conflicts for each in steps[:-1]) and (now := self._again(silent)):
            steps, said = silent, now
        size = len(steps) // 2
        while size and time.monotonic() < until:
            for start in range(len(steps) - 1, -1, -max(1, size // 2)):
                fewer = _asking([*steps[: max(0, start - size + 1)], *steps[start + 1 :]])
                if fewer != steps and (now := self._again(fewer)):
                    steps, said = fewer, now
                    break
            else:
                size //= 2
        for number, step in enumerate(steps):
            for name in step.told if time.monotonic() < until else ():
                told = tuple(each for each in steps[number].told if each != name)
                fewer = [*steps]
                fewer[number] = replace(steps[number], told=told)
                if now := self._again(fewer):
                    steps, said = fewer, now
        return steps, said

    def _again(self, steps: Sequence[Step]) -> str:
        if len(replayed(steps, self.ranks)) < len(steps):
            return ""
        self.restart()
        return self.difference(steps)[0]


def _without(steps: Sequence[Step], numbers: set[int]) -> list[Step]:
    """Return the program with `None` in the place of some statements."""
    return [
        Step(each.side, "None", told=each.told) if number in numbers else each
        for number, each in enumerate(steps)
    ]


def _asking(steps: Sequence[Step]) -> list[Step]:
    """Return the program without questions for variables that are not bound."""
    bound, asking = {*HELPERS}, []
    for step in steps:
        bound = bound - {*step.binds} if step.source.startswith("del ") else {*bound, *step.binds}
        asking.append(replace(step, told=tuple(name for name in step.told if name in bound)))
    return asking


def _difference(wanted: Sequence[str], found: Sequence[str]) -> str:
    for rank, (right, seen) in enumerate(zip(wanted, found, strict=False)):
        if right != seen:
            lines = unified_diff(right.splitlines(), seen.splitlines(), "right", "seen", n=1)
            return f"on rank {rank}:\n" + "\n".join([*lines][2 : 2 + 2 * FAR_BEHIND])
    return ""


def compare(driver: Driver, seed: str, first: int, steps: int, *, both: bool) -> str:
    """Compare programs; return the report as JSON."""
    return json.dumps(vars(driver.compare(seed, first, steps, both=both)))


def differs(driver: Driver, heading: str) -> str:
    """Return how the kept program under `heading` differs; "" if it does not differ."""
    return driver.difference(programs()[heading])[0]


def explain(driver: Driver, name: str, *, both: bool) -> str:
    """Return the smallest part of the program `name`, "seed:number", that still differs."""
    steps, said = driver.smallest(program(name, driver.ranks, LENGTH, both=both))
    return "\n".join([*map(str, steps), said])


# --- in the process of a test -----------------------------------------------------------------


class Oracle:
    """Compares programs in a real notebook, by a `Driver` that runs in the notebook's kernel."""

    def __init__(
        self, notebook: Any, ranks: int, *, both: bool = False, in_one_place: bool = False
    ) -> None:
        self.notebook, self.both = notebook, both
        notebook.run("from tests.objects import oracle")
        made = notebook.run(f"driver = oracle.Driver({ranks}, in_one_place={in_one_place})")
        assert made.errors == [], made.seen

    def run(self, seed: str, steps: int, seconds: float = 600.0) -> Report:
        """Compare programs until `steps` statements were compared, or for `seconds`."""
        whole, until = Report(), time.monotonic() + seconds
        while whole.steps < steps and time.monotonic() < until:
            call = f"compare(driver, {seed!r}, {whole.next}, {steps - whole.steps}"
            part = Report(**json.loads(self._call(f"{call}, both={self.both})")))
            whole.steps += part.steps
            whole.programs += part.programs
            whole.conflicts += part.conflicts
            whole.seconds += part.seconds
            whole.next = part.next
            whole.differences |= part.differences
        return whole

    def explain(self, name: str) -> str:
        """Return the smallest part of the program `name`, "seed:number", that still differs."""
        return self._call(f"explain(driver, {name!r}, both={self.both})")

    def differs(self, heading: str) -> str:
        """Return how the kept program under `heading` differs; "" if it does not differ."""
        return self._call(f"differs(driver, {heading!r})")

    def _call(self, call: str) -> str:
        return str(self.notebook.value(f"oracle.{call}"))


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Compare programs as the command line says, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--in-one-place", action="store_true", help="all on the ranks")
    parser.add_argument("--explain", help="the seed of a program, such as 1:17")
    parser.add_argument("-n", type=int, default=3, dest="ranks")
    options = parser.parse_args()
    home = tempfile.mkdtemp(prefix="nbo-")
    for name in ("XDG_RUNTIME_DIR", "IPYTHONDIR"):
        Path(home, name).mkdir(mode=0o700)
        os.environ[name] = str(Path(home, name))

    from tests.notebook.front_end import Notebook

    with closing(Notebook("%load_ext nbdist", f"%dist_init -n {options.ranks}")) as notebook:
        oracle = Oracle(
            notebook, options.ranks, both=options.both, in_one_place=options.in_one_place
        )
        if options.explain:
            say(oracle.explain(options.explain))
            return 0
        report = oracle.run(options.seed, options.steps, options.seconds)
        pace = report.steps / report.seconds if report.seconds else 0.0
        say(f"{report.steps} steps in {report.programs} programs, {pace:.0f} each second")
        say(f"{report.conflicts} conflicts, {len(report.differences)} programs differ")
        say(" ".join(report.differences))
        for name in [*report.differences][:1]:
            say(f"\n{name}:\n{report.differences[name]}\n\nthe smallest:")
            say(oracle.explain(name))
    return bool(report.differences)


if __name__ == "__main__":
    sys.exit(main())

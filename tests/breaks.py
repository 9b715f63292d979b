"""`python -m tests.breaks`: which of the deliberate breaks in `breaks.txt` do the tests find?

Each is made in a copy of the tree, where those tests run first that are nearest to it.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.traces import with_variable

SMOKE = (
    "test_api.py",
    "faults/test_deaths.py",
    "attacks/test_stop.py",
    "faults/test_step_stops.py",
    "notebook/test_faults.py",
    "notebook/test_magics.py",
)
"""Modules of tests that run last for breaks of the worker, agent, world and notebook."""

LONGEST = 450
"""Seconds after which a run of pytest is killed, so that its remaining tests do not run."""

HANG = 100
"""Seconds after which a test counts as hanging."""

MARK = "NBDIST_BREAKS"
"""An environment variable of all processes of a run, by which they are found and killed."""

_ROW = re.compile(r"([\w/]+\.py) \| (.*)")
_WRONG = re.compile(r"(?:FAILED|ERROR) (tests/\S+(?:::.*?)?)(?: - .*)?")


class Break(NamedTuple):
    """A deliberate break: in a file below `nbdist/`, `after` replaces the only `before`.

    `module` is the path of a module of tests that runs first, "" for none.
    """

    number: int
    file: str
    before: str
    after: str
    module: str

    @property
    def room(self) -> str:
        """The folder below `tests/` that has the tests of the file."""
        return str(Path(self.file).parent)


class Found(NamedTuple):
    """The test that has found a break, "" for none, and the seconds that this took."""

    test: str
    seconds: float


def all_breaks() -> list[Break]:
    """Read all breaks from `breaks.txt`."""
    rows = list[tuple[str, dict[str, list[str]]]]()
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if found := _ROW.fullmatch(line):
            rows.append((found[1], {"|": [found[2]], ">": [], "@": []}))
        elif line and line[0] in "|>@":
            rows[-1][1][line[0]].append(line[2:])
    texts = ((file, *map("\n".join, parts.values())) for file, parts in rows)
    return [Break(number, *each) for number, each in enumerate(texts, 1)]


def check(tree: Path, breaks: list[Break]) -> None:
    """Exit with an error unless each `before` is in its file once, and `after` is valid there."""
    wrong = []
    for each in breaks:
        if not (tree / each.module).exists():
            wrong.append(f"{each.number} {each.file}: there is no {each.module}")
        text = (tree / "nbdist" / each.file).read_text()
        if (times := text.count(each.before)) != 1:
            wrong.append(f"{each.number} {each.file}: {times} times: {each.before}")
            continue
        try:
            compile(text.replace(each.before, each.after), each.file, "exec")
        except SyntaxError as error:
            wrong.append(f"{each.number} {each.file}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))


class Copy:
    """A copy of the tree, whose `nbdist` the tests import instead of an installed one."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.path = folder / "tree"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=tree, text=True).split("\0"):
            if name and (tree / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, self.path / name)
        self._mark = uuid.uuid4().hex

    def find(self, one: Break) -> Found:
        """Make a break in the copy, and look for a test that fails because of the break."""
        file = self.path / "nbdist" / one.file
        text, began, tests = file.read_text(), time.monotonic(), self._tests_for(one)
        while tests:
            file.write_text(text.replace(one.before, one.after))
            test = self._run(tests)
            file.write_text(text)
            # The test may also fail without the break: some tests need more than a copy.
            if not test or not self._run([test]):
                return Found(test, time.monotonic() - began)
            tests = tests[tests.index(test.partition("::")[0]) + 1 :]
        return Found("", time.monotonic() - began)

    def _tests_for(self, one: Break) -> list[str]:
        """Modules of tests: the row's, the file's own, those that import it, its room's, SMOKE."""
        tests = self.path / "tests"
        texts = {each: each.read_text() for each in sorted(tests.rglob("test_*.py"))}
        module = "nbdist." + one.file.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        direct = re.compile(rf"{module}\b|from {package} import [^#]*\b{name}\b")
        near = tests / one.room / f"test_{name}.py"
        about = [each for each, text in texts.items() if each == near or direct.search(text)]
        room = [each for each in texts if each.parent == tests / one.room and one.room != "."]
        found = [each for each in room if "Notebook(" not in texts[each]]
        # First the file's own tests, then those of its room; short modules before long ones.
        about.sort(key=lambda each: (each != near, each.parent != near.parent, len(texts[each])))
        if one.room.partition("/")[0] in ("worker", "agent", "world", "notebook"):
            found += [tests / each for each in SMOKE]
        first = [self.path / one.module] if one.module else []
        modules = dict.fromkeys([*first, *about, *found])
        return [str(each.relative_to(self.path)) for each in modules]

    def _run(self, tests: list[str]) -> str:
        """Return the first test that fails, hangs or ends pytest, "" if none does in time."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "--all"]
        command += ["-p", "no:randomly", "-p", "no:cacheprovider", f"--timeout={HANG}", *tests]
        environ = {**os.environ, "PYTHONPATH": str(self.path), MARK: self._mark}
        with tempfile.TemporaryFile("w+") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
            run = subprocess.Popen(
                command, cwd=self.path, env=environ, start_new_session=True, **streams
            )
            with suppress(subprocess.TimeoutExpired):
                run.wait(LONGEST)
            is_over = run.poll() is None
            self._end_all()
            code = run.wait()
            said.seek(0)
            wrong = [found[1] for line in said if (found := _WRONG.fullmatch(line.rstrip()))]
        if is_over or code in (0, 5) or wrong:  # 5: pytest found no test
            return wrong[0] if wrong else ""
        return tests[0]

    def _end_all(self) -> None:
        while found := with_variable(MARK, self._mark):
            for pid in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def main() -> None:
    """Make the chosen breaks, and print which tests have found them."""
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description=__doc__)
    parser.add_argument("--only", default="", help="numbers, with commas between")
    parser.add_argument("--jobs", type=int, default=1, help="breaks at a time (1)")
    parser.add_argument("--tree", type=Path, default=Path(), help="the tree to break (this)")
    options = parser.parse_args()
    breaks, tree = all_breaks(), options.tree.resolve()
    check(tree, breaks)
    only = {int(each) for each in options.only.split(",") if each}
    breaks = [each for each in breaks if not only or each.number in only]
    with (
        tempfile.TemporaryDirectory(prefix="nbb-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(tree, Path(folder, str(number))))

        def find(one: Break) -> Found:
            copy = copies.get()
            said = copy.find(one)
            copies.put(copy)
            by = f"found by {said.test}" if said.test else "NOT FOUND"
            first = " ".join(one.before.split())[:40]
            sys.stdout.write(f"{one.number:3} {said.seconds:5.0f} s  {one.file} | {first}: {by}\n")
            sys.stdout.flush()
            return said

        found = [*pool.map(find, breaks)]
    asked = Counter(each.file.partition("/")[0] for each in breaks)
    missed = [each for each, said in zip(breaks, found, strict=True) if not said.test]
    met = asked - Counter(each.file.partition("/")[0] for each in missed)
    parts = ", ".join(f"{room} {met[room]} of {asked[room]}" for room in asked)
    seconds, numbers = sum(each.seconds for each in found), [each.number for each in missed]
    said = f"{len(found) - len(missed)} of {len(found)} found in {seconds:.0f} s ({parts})"
    sys.stdout.write(f"{said}; not found: {numbers}\n")


if __name__ == "__main__":
    main()

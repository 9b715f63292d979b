"""`python -m tests.matrix`: each row in a fresh environment; see `tests/matrix/__init__.py`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tests.matrix.rows import ROWS, Result, Row, Verdict, load, read, table
from tests.waiting import SOON

INSTALL_TIMEOUT = 1800.0
"""Seconds for an installation: torch's CUDA build is a download of 3 GB."""

FOREIGN = ("NBDIST_", "JUPYTER_", "IPYTHON", "PYTHON", "TORCHELASTIC_", "VIRTUAL_ENV")
"""Beginnings of variables that belong to this run's surroundings, and are not passed on."""

VERSIONS = """
import importlib.metadata, json, platform
found = {d.metadata["Name"].lower().replace("_", "-"): d.version
         for d in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""


class NotThere(Exception):
    """A row needs a Python that this machine lacks."""


class Environment:
    """A virtual environment, made by uv if it is installed, else by venv and pip."""

    def __init__(self, folder: Path, log: IO[str]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._log = log
        self._uv = shutil.which("uv")

    def make(self, version: str) -> None:
        """Make the environment with a Python such as 3.13.  NotThere if no such Python is found."""
        try:
            if self._uv:
                self.run([self._uv, "venv", "--python", version, str(self.folder)], 300)
            else:
                self.run([_python(version), "-m", "venv", str(self.folder)], 300)
        except subprocess.SubprocessError as error:
            raise NotThere(f"no Python {version} was to be had") from error

    def install(self, *arguments: str) -> None:
        """Install packages as `pip install` does.  subprocess.SubprocessError after a failure."""
        if self._uv:
            command = [self._uv, "pip", "install", "--no-cache", "--python", str(self.python)]
        else:
            command = [str(self.python), "-m", "pip", "install", "--no-cache-dir"]
        self.run([*command, *arguments], INSTALL_TIMEOUT)

    def versions(self) -> dict[str, str]:
        """Return the versions of all installed packages, and of Python."""
        command = [str(self.python), "-c", VERSIONS]
        said = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True)
        return dict(json.loads(said.stdout))

    def run(self, command: Sequence[str], timeout: float) -> None:
        """Run a command, its output in the log.  subprocess.SubprocessError after a failure."""
        self._log.write(f"$ {' '.join(command)}\n")
        self._log.flush()
        environ = {name: value for name, value in os.environ.items() if not _is_foreign(name)}
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environ,
            timeout=timeout,
            check=True,
        )

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_foreign(name: str) -> bool:
    return name.startswith(FOREIGN) or name == "PIP_CONSTRAINT"


def _python(version: str) -> str:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{version}"):
        return found
    raise NotThere(f"no python{version} is on the PATH")


ROOT = Path(__file__).parents[2]
SUITE_TIMEOUT = 900.0
TOOLS = ("pytest>=8", "pytest-timeout>=2.3")

# Warnings are errors in this repository, but not in a row, whose Jupyter may be old.
PYTEST = ("-m", "pytest", "-o", "filterwarnings=default", "-p", "no:cacheprovider")


def main() -> int:
    """Run the chosen rows; return 0 if all of them went well."""
    options = _options()
    if options.list:
        rows = [{"name": row.name, "python": row.python} for row in options.rows]
        sys.stdout.write(f"{json.dumps(rows)}\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
        out = options.out or Path(scratch, "out")
        out.mkdir(parents=True, exist_ok=True)
        rows = [] if options.table else options.rows
        well = [_run(row, Path(scratch), out) for row in rows]
        sys.stdout.write(f"{table(load(out))}\n")
    return 0 if all(well) else 1


def _run(row: Row, scratch: Path, out: Path) -> bool:
    """Run a row in an environment that is deleted afterwards; return whether all went well."""
    _say(f"{row.name}: Python {row.python}, {', '.join(row.requirements)}")
    log = out / f"{row.name}.log"
    with log.open("w") as file:
        environment = Environment(scratch / row.name, file)
        try:
            result = _try(row, environment, out, file)
        except NotThere as error:
            result = _result(row, notes=[f"not run: {error}"])
        except subprocess.SubprocessError as error:
            result = _result(row, notes=[f"the environment could not be made: {error}"])
        finally:
            environment.delete()
    result.save(out)
    for line in result.notes:
        _say(f"{row.name}: {line}")
    _say(f"{row.name}: {'well' if result.went_well else f'NOT WELL, see {log}'}")
    return result.went_well


def _try(row: Row, environment: Environment, out: Path, log: IO[str]) -> Result:
    environment.make(row.python)
    if row.is_refused:
        return _try_refused(row, environment, log)
    changed = _install(row, environment)
    versions = environment.versions()
    report = out / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    tests = [*PYTEST, f"--junitxml={report}", str(ROOT / "tests/matrix/core.py")]
    try:
        environment.run([str(environment.python), *tests], SUITE_TIMEOUT)
    except subprocess.CalledProcessError:
        pass  # The report says which tests have failed.
    except subprocess.TimeoutExpired as error:
        changed.append(f"the suite did not come to its end: {error}")
    verdicts, notes = read(report)
    changed += moved(environment)
    worst = max(verdicts.values())
    well = worst == Verdict.PASSED and not changed
    return _result(row, versions, verdicts, [*changed, *notes], went_well=well)


def _install(row: Row, environment: Environment) -> list[str]:
    """Fill the environment; return which packages nbdist's installation has changed wrongly."""
    if not row.keeps_all:
        environment.install("-e", str(ROOT), *row.requirements, *TOOLS)
        return []
    environment.install(*row.requirements, *TOOLS)
    before = environment.versions()
    environment.install("-e", str(ROOT))
    after = environment.versions()
    return [
        f"installing nbdist changes {name}: {version} -> {after.get(name, 'none')}"
        for name, version in before.items()
        if after.get(name) != version
    ]


def moved(environment: Environment) -> list[str]:
    """Return a note if private names are not where nbdist looks for them; the log has the names."""
    try:
        environment.run([str(environment.python), str(ROOT / "tests/matrix/contract.py")], SOON)
    except subprocess.CalledProcessError:
        return ["private names of torch's have moved: the log has them"]
    return []


def _try_refused(row: Row, environment: Environment, log: IO[str]) -> Result:
    """Try a torch that nbdist's requirements exclude, which `%load_ext` must refuse."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [each for each in needed if not each.startswith("torch")]
    environment.install(*row.requirements, *others)
    environment.install("--no-deps", "-e", str(ROOT))
    command = [str(environment.python), "-m", "IPython", "-c", "%load_ext nbdist"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = re.sub(r"\x1b\[[0-9;]*m", "", f"{done.stdout}{done.stderr}").strip()
    log.write(f"{said}\n")
    release = environment.versions()["torch"].partition("+")[0]
    refusal = next((line for line in said.splitlines() if "torch" in line and release in line), "")
    note = f"refused at `%load_ext`: {refusal}" if refusal else f"not refused: {said[-300:]}"
    return _result(row, environment.versions(), notes=[note], went_well=bool(refusal))


def _result(
    row: Row,
    versions: dict[str, str] | None = None,
    verdicts: dict[str, Verdict] | None = None,
    notes: list[str] | None = None,
    *,
    went_well: bool = False,
) -> Result:
    date = datetime.now(UTC).date().isoformat()
    return Result(row.name, date, versions or {}, verdicts or {}, notes or (), went_well)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.matrix", description=__doc__)
    parser.add_argument("--rows", type=_rows, default=ROWS, help="some: colab,newest")
    parser.add_argument("--out", type=Path, help="a folder for logs and results; it adds to them")
    parser.add_argument("--table", action="store_true", help="only print what --out has")
    parser.add_argument("--list", action="store_true", help="the rows and their Pythons, as JSON")
    return parser.parse_args()


def _rows(text: str) -> list[Row]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        rows = ", ".join(known)
        raise argparse.ArgumentTypeError(f"no row {', '.join(unknown)}; rows: {rows}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())

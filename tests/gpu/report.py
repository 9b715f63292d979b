"""What a run of the suite is about, and how it went, as `report.json` and `report.md`.

Besides, what an installed nbdist has beside its code, for a checkout that is not installed:
launchers and commands are found through entry points, which are read from a distribution's
metadata.  Building one would take hatchling; they are two text files.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.lab import smi

PACKAGES = ("ipykernel", "ipython", "jupyter_client", "pyzmq", "cloudpickle", "psutil", "pytest")

TORCH = """
import torch
print(torch.__version__)
print(torch.version.cuda or "none")
print(".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none")
"""

ASK_TIMEOUT = 120.0


def machine_facts(environ: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Looked up without torch or CUDA in this process."""
    torch, cuda, nccl = _torch(environ)
    gpus = smi("--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "nbdist": _commit(),
        "torch": torch,
        "CUDA": cuda,
        "NCCL": nccl,
        "GPUs (name, MiB, driver, compute mode, MIG)": gpus or ["none"],
        "Python": f"{platform.python_version()}, {sys.executable}",
        "kernel": platform.release(),
        "cores, memory": f"{len(os.sched_getaffinity(0))}, {memory:.0f} GiB",
        "packages": [f"{name} {_version(name)}" for name in PACKAGES],
    }


def _torch(environ: Mapping[str, str]) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=ASK_TIMEOUT,
        check=False,
    )
    lines = answer.stdout.split()
    last = (answer.stderr.strip().splitlines() or [""])[-1]
    return lines if len(lines) == 3 else [f"cannot be imported: {last}", "", ""]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _commit() -> str:
    """The checkout's, where git is there and it is one."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT,
            check=False,
        )
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


def write_metadata(project: Path, folder: Path) -> Path:
    """Make `nbdist-*.dist-info` in a folder that is going to be on `sys.path`; where it is."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    made = folder / f"nbdist-{about['version']}.dist-info"
    made.mkdir()
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (made / "METADATA").write_text(head, encoding="utf-8")
    groups = {"console_scripts": about["scripts"], **about["entry-points"]}
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    ]
    (made / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
    return made


ORDER = ("failed", "error", "cut off", "not run", "passed", "skipped")


@dataclass
class Result:
    """How one test ended; `figures` is what it measured."""

    file: str
    test: str
    outcome: str = "not run"
    seconds: float = 0.0
    note: str = ""
    figures: dict[str, str] = field(default_factory=dict)


def results_of(file: str, said: Iterable[str], why: str) -> list[Result]:
    """What `tests.gpu.recording` has said of a file, and why it has said no more."""
    results = {"": Result(file, "")}
    begun = ""
    for line in map(json.loads, said):
        if "tests" in line:
            results = {test: Result(file, test) for test in line["tests"]}
        elif "begun" in line:
            begun = line["begun"]
        else:
            _take(results[line["test"]], line)
    for test, result in results.items():
        if result.outcome == "not run":
            result.outcome = "cut off" if test and test == begun else "not run"
            result.note = why
    return [*results.values()]


def _take(result: Result, said: dict[str, Any]) -> None:
    result.seconds += said["seconds"]
    result.figures.update(said["figures"])
    if said["when"] == "call" or result.outcome == "not run":
        result.outcome, result.note = said["outcome"], said["note"]
    if said["when"] != "call" and said["outcome"] == "failed":
        result.outcome, result.note = "error", f"{said['when']}: {said['note']}"


@dataclass
class Report:
    """All results of a run, and what it was about."""

    device: str
    limit: float
    facts: Mapping[str, str | list[str]]
    results: list[Result] = field(default_factory=list)
    begun: float = field(default_factory=time.time)

    @property
    def counts(self) -> Counter[str]:
        """How many tests ended in which way."""
        return Counter(result.outcome for result in self.results)

    @property
    def is_good(self) -> bool:
        """Nothing failed, and nothing is missing."""
        return bool(self.results) and not set(self.counts) - {"passed", "skipped"}

    def write(self, folder: Path) -> None:
        """Write `report.json` and `report.md`."""
        report = {
            "device": self.device,
            "limit": self.limit,
            "begun": self._time,
            "seconds": round(time.time() - self.begun, 1),
            "counts": self.counts,
            "facts": dict(self.facts),
            "tests": [asdict(result) for result in self.results],
        }
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.as_markdown(), encoding="utf-8")

    @property
    def _time(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.begun))

    def summary(self) -> str:
        """A line with the counts, and one for each test that did not do well."""
        seconds = time.time() - self.begun
        counts = ", ".join(f"{self.counts[name]} {name}" for name in ORDER if self.counts[name])
        bad = [r for r in self.results if r.outcome not in ("passed", "skipped")]
        lines = [f"{counts or 'nothing was run'} in {seconds:.0f} s on {self.device}"]
        lines += [f"{r.outcome}: {r.file} {r.test} {_last_line(r.note)}".rstrip() for r in bad]
        return "\n".join(lines) + "\n"

    def as_markdown(self) -> str:
        """The report for people."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"# nbdist on {self.device}, {self._time}\n"
        yield self.summary().partition("\n")[0] + ".\n"
        yield "| fact | |\n|---|---|"
        for name, value in self.facts.items():
            text = "; ".join(value) if isinstance(value, list) else value
            yield f"| {name} | {_cell(text)} |"
        figures = [(r, name, value) for r in self.results for name, value in r.figures.items()]
        if figures:
            yield "\n| figure | value | test |\n|---|---|---|"
            for result, name, value in figures:
                yield f"| {_cell(name)} | {_cell(value)} | {_cell(result.test)} |"
        for outcome in ORDER:
            found = [r for r in self.results if r.outcome == outcome]
            if found:
                yield f"\n## {outcome}: {len(found)}\n"
                yield "| file | test | s | |\n|---|---|---|---|"
            for r in found:
                note = _cell(_last_line(r.note))
                yield f"| {r.file} | {_cell(r.test)} | {r.seconds:.1f} | {note} |"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E  ")] or text.splitlines()
    return lines[-1].removeprefix("E").strip()[:300] if lines else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""`python -m tests.gpu --out FOLDER`: run the suite on GPUs, and write a report.

Each file of tests is a pytest of its own, so that one that crashes takes nothing else along,
the most telling ones first; what looks at all of the GPU's memory runs alone, the others beside
each other where there are cores enough.  `report.md` is written anew after each of these stages.
Needs torch, and what README.md beside this names.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.lab import smi

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# One after the other; the longest of a stage first, else the most telling.
STAGES = (
    ("test_ground",),
    ("test_freeing", "test_stop"),
    ("test_kills",),
    ("test_lasting", "test_training", "test_watchdogs", "test_nccl_alone"),
    ("test_gather",),
)
FILES = tuple(name for stage in STAGES for name in stage)
CORES_PER_FILE, MOST_AT_ONCE = 5, 3

LIMIT = 540.0
"""Seconds for all: below ten minutes, with the ending."""

END_GRACE = 10.0
"""Seconds that a pytest has to end its worlds when time is over."""

USUAL = (0, 1, 5)
"""How pytest ends after it has run all tests of a file, some of which failed, or none."""

TICK, ASK_TIMEOUT = 0.2, 120.0
PACKAGES = ("ipykernel", "ipython", "jupyter_client", "pyzmq", "cloudpickle", "psutil", "pytest")

TORCH = """
import torch
print(torch.__version__, torch.version.cuda or "none", end=" ")
print(".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none")
"""


def main() -> int:
    """Return 0 when nothing failed and all that was asked for was run."""
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # What ends this process ends what it has started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    over = threading.Event()
    timer = threading.Timer(options.limit, over.set)
    timer.daemon = True
    timer.start()
    # Not a name that nbdist takes for a runtime folder which somebody has left.
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as folder:
        write_metadata(ROOT / "pyproject.toml", Path(folder))
        environ = _environ(options.device, folder)
        report = Report(options.device, machine_facts(environ))
        for stage in STAGES:
            names = [name for name in stage if name in options.only]
            with ThreadPoolExecutor(options.jobs) as pool:
                runs = [pool.submit(_run, name, out, options.k, environ, over) for name in names]
                try:
                    wait(runs)
                except KeyboardInterrupt:
                    over.set()
            for run in runs:
                report.results += run.result()
            (out / "report.md").write_text("\n".join([*report.lines(), ""]), encoding="utf-8")
    sys.stdout.write(report.summary())
    return 0 if report.is_good else 1


def _run(
    name: str, out: Path, wanted: str, environ: dict[str, str], over: threading.Event
) -> list[Result]:
    """Run one file; what its tests have said."""
    report = out / f"{name}.xml"
    report.unlink(missing_ok=True)
    if over.is_set():
        return results_of(name, report, "no time was left")
    command = [sys.executable, "-m", "pytest", str(HERE / f"{name}.py"), "-q"]
    # What libraries warn of on a machine that we do not know is no failure.
    command += ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default"]
    command += [f"--junitxml={report.absolute()}"]
    with (out / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["-k", wanted] if wanted else [])],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while (is_cut := process.poll() is None) and not over.wait(TICK):
            pass
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_GRACE)
    if is_cut:
        return results_of(name, report, "no time was left")
    is_usual = process.returncode in USUAL
    return results_of(name, report, "" if is_usual else f"pytest ended by {process.returncode}")


def _environ(device: str, folder: str) -> dict[str, str]:
    """The environment of all tests: nbdist is the checkout, also without being installed."""
    path = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "NBDIST_TEST_DEVICE": device,
        "PYTHONUNBUFFERED": "1",
        # Other plugins than ours may be there, for another version of pytest.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Processes with a CUDA context take a while to end.
        "NBDIST_LEAK_TIMEOUT": "20",
        **hidden,
    }


def _options() -> argparse.Namespace:
    jobs = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_PER_FILE))
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", required=True, help="the folder for the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=_names, default=FILES, help="files: ground,stop")
    parser.add_argument("--jobs", type=int, default=jobs, help="files at once (by the cores)")
    parser.add_argument("-k", default="", help="as pytest has it")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for all ({LIMIT:.0f})")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(f"test_{name.strip().removeprefix('test_')}" for name in text.split(","))
    if unknown := [name for name in names if name not in FILES]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(FILES)}")
    return names


# --- what the run is about ----------------------------------------------------------------


def machine_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Look the machine up without torch or CUDA in this process."""
    torch, error = _ask(sys.executable, "-W", "ignore", "-c", TORCH, env=dict(environ))
    last = (error.strip().splitlines() or [""])[-1]
    gpus = smi("--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    there = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {
        "nbdist": _ask("git", "describe", "--always", "--dirty", cwd=HERE)[0] or "unknown",
        "torch, CUDA, NCCL": torch or f"cannot be imported: {last}",
        "GPUs (name, MiB, driver, compute mode, MIG)": "; ".join(gpus) or "none",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "kernel": platform.release(),
        "cores, memory": f"{len(os.sched_getaffinity(0))}, {memory:.0f} GiB",
        "packages": "; ".join(f"{name} {there.get(name, 'missing')}" for name in PACKAGES),
    }


def _ask(*command: str, **options: Any) -> tuple[str, str]:
    """Run a program; what it says, and its errors."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=False, **options
        )
    except OSError as error:
        return "", str(error)
    return answer.stdout.strip(), answer.stderr


def write_metadata(project: Path, folder: Path) -> None:
    """Make `nbdist-*.dist-info` in a folder that is going to be on `sys.path`.

    In it are the entry points of launchers and commands, which an installed nbdist has beside its
    code, and a checkout has not.  Building one would take hatchling; they are two text files.
    """
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


# --- how it went --------------------------------------------------------------------------

ORDER = ("failed", "error", "cut off", "passed", "skipped")
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
"""By what a test's entry in pytest's report has in it."""


@dataclass(frozen=True)
class Result:
    """How one test ended, "" for what its file did; `figures` is what it measured."""

    file: str
    test: str
    outcome: str
    seconds: float = 0.0
    note: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


def results_of(file: str, report: Path, why: str = "") -> list[Result]:
    """Return what a file's tests have said, and why they have said no more."""
    results = []
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        bad = next((each for each in case if each.tag in OUTCOMES), None)
        outcome = "passed" if bad is None else OUTCOMES[bad.tag]
        note = "" if bad is None else " ".join(bad.get("message", "").split())[:300]
        figures = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        name, seconds = case.get("name", ""), float(case.get("time", "0"))
        results.append(Result(file, name, outcome, seconds, note, figures))
    return [*results, Result(file, "", "cut off", note=why)] if why else results


@dataclass
class Report:
    """All results of a run, and what it was about."""

    device: str
    facts: Mapping[str, str]
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

    def summary(self) -> str:
        """A line with the counts, and one for each test that did not do well."""
        counts = ", ".join(f"{self.counts[name]} {name}" for name in ORDER if self.counts[name])
        bad = [r for r in self.results if r.outcome not in ("passed", "skipped")]
        seconds = time.time() - self.begun
        lines = [f"{counts or 'nothing was run'} in {seconds:.0f} s on {self.device}"]
        lines += [f"{r.outcome}: {r.file} {r.test} {r.note}".rstrip() for r in bad]
        return "\n".join(lines) + "\n"

    def lines(self) -> Iterator[str]:
        """The report for people."""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.begun))
        yield f"# nbdist on {self.device}, {at}\n"
        yield self.summary().partition("\n")[0] + ".\n"
        yield "| fact | |\n|---|---|"
        yield from (_row(name, value) for name, value in self.facts.items())
        figures = [(n, value, r.test) for r in self.results for n, value in r.figures.items()]
        if figures:
            yield "\n| figure | value | test |\n|---|---|---|"
            yield from (_row(*figure) for figure in figures)
        for outcome in ORDER:
            if found := [r for r in self.results if r.outcome == outcome]:
                yield f"\n## {outcome}: {len(found)}\n"
                yield "| file | test | s | |\n|---|---|---|---|"
            yield from (_row(r.file, r.test, f"{r.seconds:.1f}", r.note) for r in found)


def _row(*cells: str) -> str:
    escaped = (each.replace("|", "\\|").replace("\n", " ") for each in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    sys.exit(main())

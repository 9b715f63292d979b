"""`python -m tests.gpu --out FOLDER`: run the suite on GPUs, and write a report.

Each file of tests is a pytest of its own, so that one that crashes takes nothing else along,
the most telling ones first; what looks at all of the GPU's memory runs alone, the others beside
each other where there are cores enough.  `report.md` is written anew after each of these stages;
what each test has said is in a file's own `.jsonl` at once (`conftest.py`).  Needs torch, and
what README.md beside this names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.lab import smi

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# Stages run in this order; the longest file of a stage is first, else the most telling file.
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
"""Seconds for all tests: less than ten minutes, with the time to end them."""

END_GRACE = 10.0
"""Seconds that a pytest has to end its worlds when time is over."""

TICK, ASK_TIMEOUT = 0.2, 120.0
PACKAGES = ("ipykernel", "ipython", "jupyter_client", "pyzmq", "cloudpickle", "psutil", "pytest")

TORCH = """
import torch
print(torch.__version__, torch.version.cuda or "none", end=" ")
print(".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none")
"""


def main() -> int:
    """Run the chosen files; return 0 if all their tests ran and none failed."""
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # SIGTERM acts like Ctrl-C, so that the processes of this command end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    over = threading.Event()
    timer = threading.Timer(options.limit, over.set)
    timer.daemon = True
    timer.start()
    environ = _environ(options.device)
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
    """Run a file of tests, and return their results."""
    if over.is_set():
        return results_of(name, [], "no time was left")
    said = out / f"{name}.jsonl"
    said.write_text("")
    command = [sys.executable, "-m", "pytest", str(HERE / f"{name}.py"), "-q"]
    # Warnings of libraries on an unknown machine are no failures.
    command += ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default"]
    with (out / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, *(["-k", wanted] if wanted else [])],
            cwd=ROOT,
            env={**environ, "NBDIST_REPORT_FILE": str(said.absolute())},
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
    why = "no time was left" if is_cut else f"pytest ended with code {process.returncode}"
    return results_of(name, said.read_text().splitlines(), why)


def _environ(device: str) -> dict[str, str]:
    """Return the environment of all tests, in which nbdist is imported from the checkout."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "NBDIST_TEST_DEVICE": device,
        "PYTHONUNBUFFERED": "1",
        # A machine may have other plugins, for another version of pytest.
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


# --- facts about the machine --------------------------------------------------------------


def machine_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """Collect facts about the machine without torch or CUDA in this process."""
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
    """Run a program, and return its output and its errors."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=False, **options
        )
    except OSError as error:
        return "", str(error)
    return answer.stdout.strip(), answer.stderr


# --- the results -------------------------------------------------------------------------

ORDER = ("failed", "error", "cut off", "not run", "passed", "skipped")


@dataclass
class Result:
    """How a test ended; `figures` are its measurements."""

    file: str
    test: str
    outcome: str = "not run"
    seconds: float = 0.0
    note: str = ""
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The last line of the test's error, or why the test was skipped."""
        lines = self.note.splitlines()
        last = [each for each in lines if each.startswith("E  ")] or lines or [""]
        return last[-1].removeprefix("E").strip()[:300]


def results_of(file: str, said: Iterable[str], why: str) -> list[Result]:
    """Return the results of a file's tests; `why` is the note of tests without a result."""
    results, begun = {"": Result(file, "")}, ""
    for line in map(json.loads, said):
        if "tests" in line:
            results = {test: Result(file, test) for test in line["tests"]}
        elif "begun" in line:
            begun = line["begun"]
        else:
            result, is_call = results[line["test"]], line["when"] == "call"
            result.seconds += line["seconds"]
            result.figures.update(line["figures"])
            if is_call or result.outcome == "not run":
                result.outcome, result.note = line["outcome"], line["note"]
            if not is_call and line["outcome"] == "failed":
                result.outcome, result.note = "error", f"{line['when']}: {line['note']}"
    for test, result in results.items():
        if result.outcome == "not run":
            result.outcome = "cut off" if test and test == begun else "not run"
            result.note = why
    return [*results.values()]


@dataclass
class Report:
    """All results of a run, with the device and facts about the machine."""

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
        """Whether no test failed, and no test is missing."""
        return bool(self.results) and not set(self.counts) - {"passed", "skipped"}

    def summary(self) -> str:
        """Return a line with the counts, and a line for each test that failed or did not run."""
        counts = ", ".join(f"{self.counts[name]} {name}" for name in ORDER if self.counts[name])
        bad = [r for r in self.results if r.outcome not in ("passed", "skipped")]
        seconds = time.time() - self.begun
        lines = [f"{counts or 'nothing was run'} in {seconds:.0f} s on {self.device}"]
        lines += [f"{r.outcome}: {r.file} {r.test} {r.line}".rstrip() for r in bad]
        return "\n".join(lines) + "\n"

    def lines(self) -> Iterator[str]:
        """Yield the parts of the report in Markdown."""
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
            yield from (_row(r.file, r.test, f"{r.seconds:.1f}", r.line) for r in found)


def _row(*cells: str) -> str:
    escaped = (each.replace("|", "\\|").replace("\n", " ") for each in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    sys.exit(main())

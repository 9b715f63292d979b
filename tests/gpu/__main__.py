"""`python -m tests.gpu --out FOLDER`: run the suite on GPUs, and write a report.

Each file of tests is a pytest of its own, so that one that crashes takes nothing else along,
the most telling ones first; what looks at all of the GPU's memory runs alone, the others beside
each other where there are cores enough.  `report.json` and `report.md` are written anew after
each of these stages; what each test has said is in a file's own `.jsonl` at once.  Needs torch, and
what README.md beside this names.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from tests.gpu.report import Report, Result, machine_facts, results_of, write_metadata

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

TICK = 0.2


class Deadline:
    """When time is over for all that runs; several threads look at it."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __repr__(self) -> str:
        return f"<Deadline in {self.left:.0f} s>"

    @property
    def left(self) -> float:
        """Seconds, 0 or less when it has passed."""
        return self._at - time.monotonic()

    def passes(self) -> None:
        """Time is over now."""
        self._at = time.monotonic()


def main() -> int:
    """0 when nothing failed and all that was asked for was run."""
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # What ends this process ends what it has started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = Deadline(options.limit)
    # Not a name that nbdist takes for a runtime folder which somebody has left.
    with tempfile.TemporaryDirectory(prefix="gpu-tests-") as metadata:
        write_metadata(ROOT / "pyproject.toml", Path(metadata))
        environ = _environ(options.device, metadata)
        report = Report(options.device, options.limit, machine_facts(environ))
        for stage in STAGES:
            names = [name for name in stage if name in options.only]
            with ThreadPoolExecutor(options.jobs) as pool:
                runs = [
                    pool.submit(_run, name, out, options.k, environ, deadline) for name in names
                ]
                try:
                    wait(runs)
                except KeyboardInterrupt:
                    deadline.passes()
            for run in runs:
                report.results += run.result()
            report.write(out)
    sys.stdout.write(report.summary())
    return 0 if report.is_good else 1


def _run(
    name: str, out: Path, wanted: str, environ: dict[str, str], deadline: Deadline
) -> list[Result]:
    """Run one file; what its tests have said."""
    if deadline.left <= 0:
        return results_of(name, [], "no time was left")
    said = out / f"{name}.jsonl"
    said.write_text("")
    with (out / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", str(HERE / f"{name}.py")),
                *("-p", "pytest_timeout", "-p", "tests.gpu.recording", "-p", "no:cacheprovider"),
                # What libraries warn of on a machine that we do not know is no failure.
                *("-q", "-W", "default"),
                *(["-k", wanted] if wanted else []),
            ],
            cwd=ROOT,
            env={**environ, "NBDIST_REPORT_FILE": str(said)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None and deadline.left > 0:
            time.sleep(TICK)
        is_over = process.poll() is None
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_GRACE)
    why = "no time was left" if is_over else f"pytest ended with code {process.returncode}"
    return results_of(name, said.read_text().splitlines(), why)


def _environ(device: str, metadata: str) -> dict[str, str]:
    """The environment of all tests: nbdist is the checkout, also without being installed."""
    path = [metadata, str(ROOT), os.environ.get("PYTHONPATH", "")]
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
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", required=True, help="the folder for the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=_names, default=FILES, help="files: ground,stop")
    parser.add_argument(
        "--jobs", type=int, default=_jobs(), help="files at once (default: by the cores)"
    )
    parser.add_argument("-k", default="", help="as pytest has it")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help=f"seconds for all (default {LIMIT:.0f})"
    )
    return parser.parse_args()


def _jobs() -> int:
    return max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_PER_FILE))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(f"test_{name.strip().removeprefix('test_')}" for name in text.split(","))
    if unknown := [name for name in names if name not in FILES]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(FILES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

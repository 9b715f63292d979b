"""`python -m tests.gpu --out FOLDER`: run the suite on GPUs, and write a report.

Each file of tests is a pytest of its own, so that one that crashes takes nothing else along,
the most telling ones first.  `report.json` and `report.md` are written anew after each test:
whoever is cut off has what there is.  Needs torch, and what README.md beside this names.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.facts import machine_facts
from tests.gpu.metadata import write_metadata
from tests.gpu.report import Report

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# The most telling first.
FILES = (
    "test_ground",
    "test_nccl_alone",
    "test_freeing",
    "test_stop",
    "test_memory",
    "test_training",
    "test_gather",
    "test_policies",
    "test_generations",
)

LIMIT = 520.0
"""Seconds for all: below nine minutes, with the ending."""

END_GRACE = 10.0
"""Seconds that a pytest has to end its worlds when time is over."""

TICK = 1.0


def main() -> int:
    """0 when nothing failed and all that was asked for was run."""
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # What ends this process ends what it has started, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="nbdist-gpu-") as metadata:
        write_metadata(ROOT / "pyproject.toml", Path(metadata))
        environ = _environ(options.device, metadata)
        report = Report(out, options.device, options.limit, machine_facts(environ))
        report.write()
        for name in options.only:
            report.begin(name)
            _run(name, options, environ, deadline, report)
            report.write()
    sys.stdout.write(report.summary())
    return 0 if report.is_good else 1


def _run(
    name: str, options: argparse.Namespace, environ: dict[str, str], deadline: float, report: Report
) -> None:
    """Run one file, and take what its pytest says into the report."""
    if time.monotonic() > deadline:
        report.not_run(name, "no time was left")
        return
    reading, writing = os.pipe()
    log = report.folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", str(HERE / f"{name}.py")),
                *("-p", "tests.gpu.recording", "-p", "no:cacheprovider", "-q"),
                *(["-k", options.k] if options.k else []),
            ],
            cwd=ROOT,
            env={**environ, "NBDIST_REPORT_FD": str(writing)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        try:
            for line in _lines(reading, deadline):
                report.take(name, line)
                report.write()
        finally:
            os.close(reading)
            code = _end(process, wait=END_GRACE if time.monotonic() < deadline else 0.0)
    report.ended(name, code, cut=time.monotonic() >= deadline)


def _lines(source: int, deadline: float) -> Iterator[str]:
    """What pytest says, until it ends or time is over."""
    rest = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([source], [], [], min(TICK, left))[0]:
            continue
        more = os.read(source, 65536)
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from (line.decode() for line in lines)


def _end(process: subprocess.Popen[bytes], wait: float) -> int:
    """Its exit code; one that does not end by itself is interrupted, then killed."""
    for number, grace in ((0, wait), (signal.SIGINT, END_GRACE), (signal.SIGKILL, END_GRACE)):
        if number and process.poll() is None:
            os.killpg(process.pid, number)
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def _environ(device: str, metadata: str) -> dict[str, str]:
    """The environment of all tests: nbdist is the checkout, also without being installed."""
    path = [metadata, str(ROOT), os.environ.get("PYTHONPATH", "")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "NBDIST_TEST_DEVICE": device,
        "PYTHONUNBUFFERED": "1",
        **hidden,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", required=True, help="the folder for the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=_names, default=FILES, help="files: ground,stop")
    parser.add_argument("-k", default="", help="as pytest has it")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help=f"seconds for all (default {LIMIT:.0f})"
    )
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(f"test_{name.strip().removeprefix('test_')}" for name in text.split(","))
    if unknown := [name for name in names if name not in FILES]:
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(FILES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

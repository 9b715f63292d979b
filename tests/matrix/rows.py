"""Rows of the matrix: their versions, the core suite's verdicts, and the manual's table."""

from __future__ import annotations

import enum
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

OLDEST_TORCH = (2, 7)
"""The oldest torch with which nbdist runs; `%load_ext` refuses older versions."""


@dataclass(frozen=True)
class Row:
    """An environment of the matrix: its Python and its pinned packages."""

    name: str
    python: str
    pins: Mapping[str, str] = field(default_factory=dict)
    keeps_all: bool = False
    """Whether installing nbdist may change no package that is there already, pinned or not."""

    @property
    def is_refused(self) -> bool:
        """Whether this torch is too old: `%load_ext` must say so, and nothing else is tried."""
        release = self.pins.get("torch", "").split(".")[:2]
        return len(release) == 2 and tuple(map(int, release)) < OLDEST_TORCH

    @property
    def requirements(self) -> list[str]:
        """The pinned packages as pip takes them, or else just torch."""
        return [f"{name}=={version}" for name, version in self.pins.items()] or ["torch"]


def _jupyter(ipykernel: str, ipython: str, jupyter_client: str) -> dict[str, str]:
    return {"ipykernel": ipykernel, "ipython": ipython, "jupyter_client": jupyter_client}


COLAB = {
    **_jupyter("6.17.1", "7.34.0", "7.4.9"),
    "pyzmq": "26.2.1",
    "tornado": "6.5.7",
    "traitlets": "5.7.1",
    "psutil": "5.9.5",
    "cloudpickle": "3.1.2",
    "numpy": "2.1.3",
    "notebook": "6.5.7",
    "torch": "2.11.0",
}
"""The versions in Colab's image, from which Kaggle's is built."""

ROWS = (
    Row("newest", "3.13"),
    Row("colab", "3.13", COLAB, keeps_all=True),
    Row("torch-2.15", "3.11", {"torch": "2.15.*", **_jupyter("6.29.5", "8.*", "8.6.*")}),
    Row("torch-2.14", "3.12", {"torch": "2.14.*"}),
    Row("torch-2.13", "3.11", {"torch": "2.13.*"}),
    Row("torch-2.12", "3.13", {"torch": "2.12.*", **_jupyter("6.29.5", "9.*", "8.*")}),
    Row("torch-2.11", "3.11", {"torch": "2.11.*", **_jupyter("6.17.1", "8.*", "7.4.9")}),
    Row("torch-2.10", "3.12", {"torch": "2.10.*", **_jupyter("6.29.5", "7.34.0", "8.*")}),
    Row("torch-2.9", "3.12", {"torch": "2.9.*", **_jupyter("6.17.1", "7.34.0", "7.4.9")}),
    Row("torch-2.8", "3.11", {"torch": "2.8.*", **_jupyter("6.29.5", "8.*", "7.4.9")}),
    Row("torch-2.7", "3.11", {"torch": "2.7.*", **_jupyter("6.29.5", "8.*", "8.*")}),
    Row("torch-2.6", "3.11", {"torch": "2.6.*"}),
    Row("python-3.14", "3.14"),
)

HEADS = ["start", "names", "output", "raise", "skip", "kill", "heal"]
HEADS += ["DDP", "FSDP2", "scale", "restart", "Stop", "snapshot", "end"]
COLUMNS = {head.lower(): head for head in HEADS}
"""By the name of each test in core.py, a capability, the head of its column."""


class Verdict(enum.IntEnum):
    """Verdicts from best to worst: if a capability has several tests, the worst counts."""

    PASSED = 0
    FAILED = 1
    NOT_RUN = 2


def read(report: Path) -> tuple[dict[str, Verdict], list[str]]:
    """Return the verdict on each capability, and a note on each failure."""
    found: dict[str, Verdict] = {}
    notes = []
    if report.exists():  # Otherwise pytest has not come to its end.
        for case in ET.parse(report).iter("testcase"):
            name = case.get("name", "").removeprefix("test_").partition("[")[0]
            verdict, notice = _judge(case)
            found[name] = max(verdict, found.get(name, verdict))
            notes += [f"{COLUMNS.get(name, name)} {said}" for said in notice]
    return {name: found.get(name, Verdict.NOT_RUN) for name in COLUMNS}, [*dict.fromkeys(notes)]


def _judge(case: ET.Element) -> tuple[Verdict, list[str]]:
    if bad := [*case.iter("failure"), *case.iter("error")]:
        return Verdict.FAILED, [f"fails: {_line(each.get('message', ''))}" for each in bad]
    if case.find("skipped") is not None:
        return Verdict.NOT_RUN, []
    return Verdict.PASSED, []


def _line(message: str) -> str:
    """Return the beginning of a message, in one line that fits below a table."""
    return " ".join(message.split())[:300]


SHOWN = ("python", "torch", "ipykernel", "ipython", "jupyter-client")
ABOUT = ("row", "Python", "torch", "ipykernel", "IPython", "jupyter_client")

SIGNS = {Verdict.PASSED: "ok", Verdict.FAILED: "**fails**", Verdict.NOT_RUN: "-"}


@dataclass(frozen=True)
class Result:
    """The result of a row: its day, the installed versions, verdicts and notes."""

    row: str
    date: str
    versions: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    notes: Sequence[str] = ()
    went_well: bool = False
    """Whether all tests passed and no name or package moved, or an old torch was refused."""

    def save(self, folder: Path) -> None:
        (folder / f"{self.row}.json").write_text(json.dumps(asdict(self), indent=1))


def load(folder: Path) -> list[Result]:
    """Return all results of the folder, in the order of the rows."""
    found = []
    for row in ROWS:
        file = folder / f"{row.name}.json"
        if file.exists():
            fields = json.loads(file.read_text())
            verdicts = {name: Verdict(value) for name, value in fields.pop("verdicts").items()}
            found.append(Result(verdicts=verdicts, **fields))
    return found


def table(results: Iterable[Result]) -> str:
    """Return Markdown with a line per row, a column per capability, and the notes below."""
    results = [*results]
    heads = [*ABOUT, *HEADS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    notes = [f"- {result.row}: {note}" for result in results for note in result.notes]
    dates = sorted({result.date for result in results})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return "\n".join([*lines, "", f"Run {days}.", *(["", *notes] if notes else [])])


def _cells(result: Result) -> Iterator[str]:
    yield result.row
    for name in SHOWN:
        yield result.versions.get(name, "-")
    for name in COLUMNS:
        yield SIGNS[result.verdicts.get(name, Verdict.NOT_RUN)]

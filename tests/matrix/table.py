"""The README's table, from what the rows have left in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.matrix.rows import ROWS
from tests.matrix.verdicts import COLUMNS, Verdict

SHOWN = ("python", "torch", "ipykernel", "ipython", "jupyter-client")
HEADS = ("row", "Python", "torch", "ipykernel", "IPython", "jupyter_client")

SIGNS = {
    Verdict.PASSED: "ok",
    Verdict.DEGRADED: "(ok)",
    Verdict.FAILED: "**fails**",
    Verdict.NOT_RUN: "-",
}


@dataclass(frozen=True)
class Result:
    """How a row went: the day, the versions that were there, and what works with them."""

    row: str
    date: str
    versions: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    notes: Sequence[str] = ()
    went_well: bool = False
    """Nothing failed, and what was to be tried was; for an old torch: it was refused."""

    def save(self, folder: Path) -> None:
        (folder / f"{self.row}.json").write_text(json.dumps(asdict(self), indent=1))


def load(folder: Path) -> list[Result]:
    """All results of the folder, in the order of the rows."""
    found = []
    for row in ROWS:
        file = folder / f"{row.name}.json"
        if file.exists():
            fields = json.loads(file.read_text())
            verdicts = {name: Verdict(value) for name, value in fields.pop("verdicts").items()}
            found.append(Result(verdicts=verdicts, **fields))
    return found


def table(results: Iterable[Result]) -> str:
    """Markdown: a line per row, a column per capability, and the notes below."""
    results = [*results]
    heads = [*HEADS, *COLUMNS.values()]
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

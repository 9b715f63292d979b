"""The matrix itself: its rows, its table, and the private names of torch that nbdist needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from tests.matrix import contract
from tests.matrix.__main__ import Environment, moved
from tests.matrix.rows import COLUMNS, OLDEST_TORCH, ROWS, Result, Row, Verdict, load, read, table
from tests.sources import sources
from tests.test_names import uses_in
from tests.waiting import SOON

CORE = Path(__file__).parent / "core.py"

SUITE = """
import pytest

def test_start(): pass
def test_names(): pass
@pytest.mark.parametrize("way", ["left", "right"])
def test_stop(way): assert way == "left", "gone astray"
@pytest.fixture
def broken():
    yield
    raise OSError("left behind")
def test_end(broken): pass
"""


def test_every_torch_has_a_row() -> None:
    """The rows have every torch from the oldest supported version to 2.15, and a refused one."""
    pinned = [row.pins["torch"].split(".")[1] for row in ROWS if row.name.startswith("torch-")]
    assert sorted(map(int, pinned)) == [*range(OLDEST_TORCH[1] - 1, 16)]
    assert [row.name for row in ROWS if row.is_refused] == ["torch-2.6"]
    assert not Row("newest", "3.13").is_refused


def test_every_column_has_its_test() -> None:
    """The tests in core.py and the columns of the table are the same, in the same order."""
    source = CORE.read_text()
    named = [line[9:].partition("(")[0] for line in source.splitlines() if line[:9] == "def test_"]
    assert named == [*COLUMNS]


def test_a_report_gives_verdicts_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of a capability's tests counts, and each failure is noted in words."""
    (tmp_path / "test_it.py").write_text(SUITE)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=SOON)
    verdicts, notes = read(tmp_path / "report.xml")
    assert {name: verdict for name, verdict in verdicts.items() if verdict != Verdict.NOT_RUN} == {
        "start": Verdict.PASSED,
        "names": Verdict.PASSED,
        "stop": Verdict.FAILED,
        "end": Verdict.FAILED,
    }
    stop, end = notes
    assert stop.startswith("Stop fails: AssertionError: gone astray")
    assert end.startswith("end fails: failed on teardown")
    assert "left behind" in end


def test_the_table_has_ordered_rows_and_notes(tmp_path: Path) -> None:
    """The table has the results of a folder in the order of the rows, and days and notes below."""
    verdicts = {**dict.fromkeys(COLUMNS, Verdict.PASSED), "kill": Verdict.FAILED}
    Result("torch-2.8", "2026-11-22", {}, verdicts, ["kill fails: x"]).save(tmp_path)
    Result("newest", "2026-11-21", {"python": "3.13.0"}).save(tmp_path)
    _, _, first, second, *below = table(load(tmp_path)).splitlines()
    assert first.startswith("| newest | 3.13.0 | - |")
    assert " ok | **fails** | ok |" in second
    assert below == ["", "Run 2026-11-21 to 2026-11-22.", "", "- torch-2.8: kill fails: x"]


OWN = {
    "_replace",  # of named tuples
    "_NamedFuncPointer",  # of ctypes
    "_ZTVN4c10d16ProcessGroupGloo8RecvWorkE",  # the contract asks `can_end_receives` for both
    "_ZN4c10d16ProcessGroupGloo8RecvWork5abortEv",
    "_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E",  # and `open_calls` for this symbol
}


def test_all_is_where_the_seam_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No private name of groups, backends, Flight Recorder, "nccl", DDP or FSDP2 has moved.

    If a name has moved, the row gets a note, and its log has the output of the contract.
    """
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    log = tmp_path / "log"
    with log.open("w") as file:
        assert moved(Environment(Path(sys.prefix), file)) == [], log.read_text()
        (tmp_path / "bin").mkdir()
        python = tmp_path / "bin" / "python"
        python.write_text("#!/bin/sh\necho ProcessGroup.lacks; exit 1\n")
        python.chmod(0o755)
        assert len(moved(Environment(tmp_path, file))) == 1
    said = log.read_text()
    assert ": 0 names moved\n" in said
    assert "\nProcessGroup.lacks\n" in said


@pytest.mark.unit
def test_what_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing function is named; names of NCCL are not missed in a torch without NCCL."""
    assert [*contract.names()] == []
    monkeypatch.delattr(c10d, "_register_process_group")
    monkeypatch.delattr(c10d, "ErrorType")
    monkeypatch.setattr(contract, "HAS_NCCL", value=False)
    assert [*contract.names()] == ["c10d._register_process_group"]


@pytest.mark.unit
def test_a_check_that_fails_is_named() -> None:
    """If a check raises, its error is named after its earlier findings."""

    def broken():  # type: ignore[no-untyped-def]
        yield "FSDPState._is_root"
        raise AttributeError("no _get_fsdp_state")

    found = [*contract.told(broken)]
    assert found == ["FSDPState._is_root", "broken: AttributeError: no _get_fsdp_state"]


@pytest.mark.unit
@pytest.mark.parametrize("name", ["torch", "nccl", "models"])
def test_the_seam_uses_nothing_else(name: str) -> None:
    """Each private name in `nbdist.worker.compat` is in the contract."""
    source = Path(contract.__file__).read_text()
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    known = {*re.findall(r"\w+", " ".join(map(str, texts)))} | {*re.findall(r"\w+", source)}
    file = f"worker/compat/{name}.py"
    used = {use.name.rpartition(".")[2] for use in uses_in(file, sources()[file])}
    assert used - known - OWN == set()

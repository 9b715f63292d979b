"""Tests of `tests.matrix.contract`, with the torch that is here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from tests.matrix import contract
from tests.sources import sources
from tests.test_private_names import uses_in
from tests.waiting import SOON

SEAM = ("torch", "nccl", "models")
OWN = {"_replace"}  # a named tuple's


def test_all_is_where_the_seam_looks() -> None:
    """Groups, their backends, what Flight Recorder writes, what "nccl" is, DDP and FSDP2."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.matrix.contract"],
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )
    assert answer.stdout.endswith(": 0 names moved\n"), answer.stdout + answer.stderr
    assert answer.returncode == 0


@pytest.mark.unit
def test_what_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, or what it is in."""
    assert [*contract.names()] == []
    monkeypatch.delattr(c10d, "_register_process_group")
    monkeypatch.delattr(c10d, "ErrorType")
    monkeypatch.setattr(contract, "HAS_NCCL", value=False)
    assert [*contract.names()] == ["_distributed_c10d._register_process_group"]


@pytest.mark.unit
def test_a_check_that_fails_is_named() -> None:
    """With what it has found before."""

    def broken():  # type: ignore[no-untyped-def]
        yield "FSDPState._is_root"
        raise AttributeError("no _get_fsdp_state")

    found = [*contract.told(broken)]
    assert found == ["FSDPState._is_root", "broken: AttributeError: no _get_fsdp_state"]


@pytest.mark.unit
@pytest.mark.parametrize("name", SEAM)
def test_the_seam_uses_nothing_else(name: str) -> None:
    """Each private name in it is in the contract."""
    source = Path(contract.__file__).read_text()
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    known = {*re.findall(r"\w+", " ".join(map(str, texts)))} | {*re.findall(r"\w+", source)}
    file = f"worker/compat/{name}.py"
    used = {use.name.rpartition(".")[2] for use in uses_in(file, sources()[file])}
    assert used - known - OWN == set()

"""Tests of `nbdist.tools.profile`."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.tools import profile
from nbdist.wire.ops import TracePart


def part(text: str) -> TracePart:
    return TracePart(zlib.compress(text.encode()), len(text), 1)


PARTS = {0: part('{"a": 1}'), 1: TracePart(problem="too large"), 2: part('{"b": 2}')}


def test_one_trace_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON; compressed where it is large, and the next one may take its place."""
    path = tmp_path / "t.json"
    assert profile.write(profile.check_path(str(path)), PARTS) == path
    assert json.loads(path.read_text())["traceEvents"] == [{"a": 1}, {"b": 2}]
    monkeypatch.setattr(profile, "LARGE", 10)
    large = profile.write(profile.check_path(str(path)), PARTS)
    assert large.name == "t.json.gz"
    assert json.loads(gzip.decompress(large.read_bytes()))["traceEvents"] == [{"a": 1}, {"b": 2}]
    assert profile.check_path(str(large)) == large
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.json", "t.json.gz"]


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_other_files_stay(tmp_path: Path, name: str) -> None:
    """What is no trace of ours is not written over."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="already exists"):
        profile.check_path(str(tmp_path / "x.json"))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """One line, and nothing is left."""
    (tmp_path / "x.json").mkdir()
    with pytest.raises(UsageError, match="--profile"):
        profile.write(tmp_path / "x.json", PARTS)
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]

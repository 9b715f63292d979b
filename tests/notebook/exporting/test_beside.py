"""Tests of `nbdist.notebook.exporting.beside`: files that are read without nbdist."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.notebook.exporting.beside import File, file_of, sharing

Names = dict[str, Any]


def read(file: File, folder: Path, names: Names) -> Names:
    """Write it, and run the line that reads it where only that much is known."""
    assert file.write(folder, names) == (folder / file.name).stat().st_size
    known: Names = {"DATA": folder, "np": np, "torch": torch, "pickle": pickle}
    exec(file.code, known)
    assert file.module in known
    return known


def made(*names: str, **values: Any) -> File:
    found = file_of(names or [*values], values)
    assert isinstance(found, File), found
    return found


def test_arrays(tmp_path: Path) -> None:
    """As numpy has them; arrays of objects as a pickle."""
    names = {"x": np.arange(6.0).reshape(2, 3), "y": np.array([{}, None])}
    known = read(made(x=names["x"]), tmp_path, names)
    assert (known["x"] == names["x"]).all()
    assert made(x=names["x"]).code == 'x = np.load(DATA / "x.npy")'
    assert made(y=names["y"]).kind == "pkl"
    assert read(made(y=names["y"]), tmp_path, names)["y"].tolist() == [{}, None]


def test_tensors(tmp_path: Path) -> None:
    """Plain ones are read as such, without trust; a module needs it."""
    names = {"table": {"a": torch.ones(2)}, "net": torch.nn.Linear(2, 2)}
    plain, whole = made(table=names["table"]), made(net=names["net"])
    assert plain.code == 'table = torch.load(DATA / "table.pt", map_location="cpu")'
    assert read(plain, tmp_path, names)["table"]["a"].tolist() == [1, 1]
    assert whole.code.endswith('map_location="cpu", weights_only=False)')
    assert torch.equal(read(whole, tmp_path, names)["net"].weight, names["net"].weight)


def test_what_shares_objects_is_in_one_file(tmp_path: Path) -> None:
    """A model and its optimizer still share parameters."""
    net = torch.nn.Linear(2, 2)
    names = {"net": net, "x": [1, 2], "opt": torch.optim.SGD(net.parameters()), "view": net.weight}
    assert sorted(map(sorted, sharing(names, names))) == [["net", "opt", "view"], ["x"]]
    known = read(made("net", "opt", **names), tmp_path, names)
    assert known["opt"].param_groups[0]["params"][0] is known["net"].weight


def test_classes_of_the_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are named: the script has to define them before the file is read."""
    main = types.ModuleType("__main__")
    exec("class Point:\n    def __init__(self): self.x = 1\ndef f(): pass", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    names = {"points": [main.Point()], "both": (main.Point(), torch.ones(1)), "call": main.f}
    assert made(points=names["points"]).needs == {"Point"}
    assert made(both=names["both"]).needs == {"Point"}
    assert made(call=names["call"]).needs == {"f"}
    assert read(made(points=names["points"]), tmp_path, names)["points"][0].x == 1


def test_what_cannot_be_saved() -> None:
    """The reason is pickle's."""
    assert "cannot pickle" in str(file_of(["lock"], {"lock": threading.Lock()}))

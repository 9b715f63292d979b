"""Tests of `nbdist.wire.kinds`: which values people want to hear of first."""

from __future__ import annotations

import pytest
import torch

from nbdist.wire import kinds


def test_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules, optimizers, tensors, and all else; without torch there is nothing but that."""
    module = torch.nn.Linear(1, 1)
    values = [[module], torch.ones(1), torch.optim.SGD(module.parameters()), module]
    found = [kinds.OTHER, kinds.TENSOR, kinds.OPTIMIZER, kinds.MODULE]
    assert [kinds.kind_of(value) for value in values] == found
    monkeypatch.delitem(kinds.sys.modules, "torch")
    assert kinds.kind_of(module) == kinds.OTHER

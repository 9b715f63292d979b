"""Tests of `nbdist.worker.remedies`: what an error says of what there is to do about it."""

from __future__ import annotations

import pytest
import torch

from nbdist.worker.remedies import remedies
from tests.worker.test_memory_use import shell_with


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("lss + 1", ["Did you mean `loss`?"]),
        ("pritn(loss)", ["Did you mean `print`?"]),
        ("xyz", []),
        ("raise NameError('lss')", []),
        ("loss.cpy()", []),
        (
            "loss.cuda()",
            ["There is no GPU here: `.to(device)` instead of `.cuda()`; `device` is cpu."],
        ),
    ],
)
def test_hints(source: str, said: list[str]) -> None:
    """A name that is like one of the rank's, and the device that there is."""
    if torch.cuda.is_available() and "cuda" in source:
        pytest.skip("there is a GPU")
    names = {"loss": torch.ones(1), "device": torch.device("cpu"), "torch": torch}
    with pytest.raises(Exception) as caught:  # noqa: PT011 (this is what is asked)
        exec(source, names)
    assert remedies(shell_with(**names), 0, caught.value) == said

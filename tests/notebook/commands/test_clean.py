"""`%dist_clean` in a notebook, and how long starts are told there."""

from __future__ import annotations

import re

import pytest

from nbdist.notebook.commands.run import freed_rows
from nbdist.wire.ops import Cleaned
from tests.notebook.front_end import Notebook, Outcome

MEGABYTE = 2**20


def table(outcome: Outcome) -> list[list[str]]:
    """The lines below the head, in columns."""
    return [re.split(r"\s{2,}", line) for line in outcome.text.splitlines()[1:]]


def freed(outcome: Outcome, ranks: set[str]) -> float:
    """How many MiB less these ranks have afterwards, the least of them."""
    first, *lines = table(outcome)
    assert first == ["ranks", "memory before", "after"]
    assert {rank for line in lines for rank in line[0].replace("-", ",").split(",")} == ranks
    mib = [[float(re.sub(" MiB$", "", text)) for text in line[1:]] for line in lines]
    return min(before - after for before, after in mib)


@pytest.mark.shared_world
def test_clean(kernel: Notebook) -> None:
    """What a traceback and `Out` hold unseen is let go; variables stay; new errors are told."""
    assert "WorldNotStarted" in kernel.run("%dist_clean").error
    hold = "torch.empty(200 * 2**20, dtype=torch.uint8).fill_(1)"
    assert kernel.run(f"%%distributed -n 2\nkept = [rank]\n{hold}").errors == []
    failing = f"%%distributed\ndef f():\n    big = {hold}\n    1 / 0\nf()"
    assert "ZeroDivisionError" in kernel.run(failing).error
    cleaned = kernel.run("%dist_clean")
    assert cleaned.text.startswith("ranks 0-1 · ")
    assert freed(cleaned, {"0", "1"}) >= 380
    assert "ZeroDivisionError" in kernel.run(failing).error
    assert freed(kernel.run("%dist_clean -r 1"), {"1"}) >= 180
    assert freed(kernel.run("%dist_clean"), {"0", "1"}) >= -10
    assert kernel.run("%%distributed\nassert kept == [rank]").errors == []
    assert "BadRanks" in kernel.run("%dist_clean -r 7").error


def test_equal_rows_are_one() -> None:
    """Ranks with the same numbers share a row; GPUs have columns where there are any."""
    alike, other = Cleaned((240 * MEGABYTE, 43 * MEGABYTE)), Cleaned((2**30, 43 * MEGABYTE))
    assert freed_rows(
        {0: alike, 1: other, 2: Cleaned((238 * MEGABYTE, 43 * MEGABYTE)), 3: alike}
    ) == [
        ("ranks", "memory before", "after"),
        ("0,2-3", "240 MiB", "43 MiB"),
        ("1", "1.0 GiB", "43 MiB"),
    ]
    on_gpu = Cleaned((0, 0), (3 * 2**30, 2**30), (4 * 2**30, 2**30))
    assert freed_rows({0: on_gpu}) == [
        ("ranks", "memory before", "after", "GPU tensors before", "after",
         "GPU held by torch before", "after"),
        ("0", "0 MiB", "0 MiB", "3.0 GiB", "1.0 GiB", "4.0 GiB", "1.0 GiB"),
    ]  # fmt: skip

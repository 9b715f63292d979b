"""Tests of `nbdist.output.folding`: texts that differ in numbers as one text with sets."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.output.fingerprint import normal
from nbdist.output.folding import fold


def unfold(text: str, ranks: int) -> list[str]:
    """What each rank has said."""
    parts = re.split(r"(0x)?\{([^}]*)\}", text)
    said = [parts[0]] * ranks
    for start, body, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        values = [value for run in body.split(",") for value in _values(run)]
        assert len(values) == ranks
        said = [f"{own}{start or ''}{v}{rest}" for own, v in zip(said, values, strict=True)]
    return said


def _values(run: str) -> list[str]:
    if "*" in run:
        value, _, times = run.partition("*")
        return [value] * int(times)
    first, _, last = run.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if last else [run]


@pytest.mark.parametrize(
    ("texts", "folded"),
    [
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "cuda:{0-3}"),
        (["pid 7996", "pid 7999"], "pid {7996,7999}"),
        (["missing key 1", "missing key 3"], "missing key {1,3}"),
        (["cuda:0", "cuda:0", "cuda:1", "cuda:1"], "cuda:{0*2,1*2}"),
        (["cuda:3", "cuda:0"], "cuda:{3,0}"),
        (["<M at 0x7fa0>", "<M at 0x7fb0>"], "<M at 0x{7fa0,7fb0}>"),
        (["h:7:9 [0] NCCL", "h:8:9 [1] NCCL"], "h:{7-8}:9 [{0-1}] NCCL"),
        (["pid 099", "pid 100"], "pid {099-100}"),
        (["step 3"] * 4, "step 3"),
        (["step 3", "stop 3"], None),
    ],
)
def test_sets(texts: list[str], folded: str | None) -> None:
    """The differing places are sets in the order of the ranks; texts that differ are not one."""
    assert fold(texts) == folded
    if folded is not None:
        assert unfold(folded, len(texts)) == texts


def test_a_set_is_bounded() -> None:
    """Of a thousand numbers without an order so many are shown as can be read."""
    folded = fold([f"pid {rank * rank}" for rank in range(1000)])
    assert folded is not None
    assert folded.endswith(",3969,4096,…}")


PLACES = st.sampled_from(
    ["cuda:{0}", "GPU {0}", "pid {0}", "pid={0}", "0x7f{0:06x}", "n:{0}:{0} [{0}] NCCL INFO"]
)
WORDS = st.text(st.sampled_from("ab :.,\0n0x19[]<>\n"), max_size=6)
TEMPLATES = st.lists(st.tuples(WORDS, PLACES), max_size=3)
NUMBERS = st.lists(st.integers(0, 12), min_size=2, max_size=6)


@settings(deadline=None, database=None, derandomize=True)
@given(TEMPLATES, WORDS, NUMBERS)
def test_what_is_alike_can_be_folded(
    template: list[tuple[str, str]], end: str, numbers: list[int]
) -> None:
    """Whatever counts as alike is one text, from which each rank's can be had again."""
    texts = ["".join(f"{w} {p.format(n)} " for w, p in template) + end for n in numbers]
    if len({normal(text) for text in texts}) == 1:
        folded = fold(texts)
        assert folded is not None
        assert unfold(folded, len(texts)) == texts

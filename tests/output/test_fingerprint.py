"""Tests of `nbdist.output.fingerprint`: when what two ranks have said counts as alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.output.events import Died, Failure
from nbdist.output.fingerprint import Digest, error_keys, key_of, normal, without_bars
from nbdist.output.folding import fold


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<M at 0x7fa000>", "<M at 0x7fb111>"),
        ("on cuda:0", "on cuda:7"),
        ("GPU 0 has", "GPU 1 has"),
        ("(pid=4000)", "(pid=4001)"),
        ("process 17", "process 18"),
        ("node:12:34 [0] NCCL INFO", "node:15:36 [1] NCCL INFO"),
    ],
)
def test_what_may_differ(one: str, other: str) -> None:
    """Addresses, devices and processes are ranks' own; the exact key knows them apart."""
    assert normal(one) == normal(other)
    assert key_of(one).alike == key_of(other).alike
    assert key_of(one).exact != key_of(other).exact


@pytest.mark.parametrize(
    ("one", "other"), [("rank 0", "rank 1"), ("0xg", "0xh"), ("cudas:0", "cudas:1"), ("1", "2")]
)
def test_what_may_not(one: str, other: str) -> None:
    """All other numbers are said, and differ."""
    assert normal(one) != normal(other)


LINES = st.lists(st.tuples(st.text(max_size=5), st.sampled_from([b"\0", b"\1"])), max_size=9)


@settings(deadline=None, database=None, derandomize=True, max_examples=30)
@given(LINES, st.integers(0, 9))
def test_lines_may_come_in_blocks(lines: list[tuple[str, bytes]], cut: int) -> None:
    """Text has one key, in how many blocks it was taken in, and so has a copy."""
    digests = []
    for blocks in ([lines], [lines[:cut], lines[cut:]]):
        digest = Digest()
        for block in blocks:
            digest = digest.copy()
            text = "".join(f"{line}\n" for line, _ in block)
            digest.add(text, b"".join(origin for _, origin in block))
        digests.append(digest.key)
    assert digests[0] == digests[1]


def failure(message: str, line: int = 2, name: str = "ValueError") -> Failure:
    return Failure(name, message, (f"Cell In[1], line {line}", f"{name}: {message}"), 1)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (failure("bad"), failure("bad"), True),
        (failure("rank 3 is bad"), failure("rank 5 is bad"), True),
        (failure("5 shards"), failure("5 shards"), True),
        (failure("17 shards"), failure("18 shards"), False),
        (failure("bad"), failure("bad", line=3), False),
        (failure("bad"), failure("bad", name="KeyError"), False),
        (failure("", name="KeyboardInterrupt"), failure("", name="KeyboardInterrupt"), True),
        (Died(-9, 1), Died(-9, 2), True),
        (Died(-9, 1), Died(1, 1), False),
        (None, None, True),
        (None, Died(1, 1), False),
    ],
)
def test_errors(one: Failure | Died | None, other: Failure | Died | None, alike: bool) -> None:  # noqa: FBT001
    """Errors of ranks 3 and 5 are alike but for each one's own number."""
    assert (not set(error_keys(3, one)).isdisjoint(error_keys(5, other))) is alike


@settings(deadline=None, database=None, derandomize=True)
@given(st.text(st.sampled_from("\0n:cuda0 pid1")), st.text(st.sampled_from("\0n:cuda0 pid1")))
def test_what_cannot_be_folded_is_not_alike(one: str, other: str) -> None:
    """Nothing that a text has in itself makes it look like another one."""
    assert normal(one) != normal(other) or fold([one, other]) is not None


def test_bars_may_differ() -> None:
    """Lines that are progress bars count by their names, all others as they are."""
    one, other = (f"a 5%|b\ntrain: 50%|##  | 5/9 [00:0{n}<00:02, {n}it/s]\nx" for n in (3, 4))
    assert key_of(one).but_bars == key_of(other).but_bars
    assert key_of(one).alike == key_of(other).alike
    assert key_of(one).exact != key_of(other).exact
    for unlike in (one.replace("train", "test"), one.replace("a 5%", "a 6%"), f"{one}y"):
        assert key_of(one).but_bars != key_of(unlike).but_bars
    assert without_bars(one).split("\n")[::2] == ["a 5%|b", "x"]

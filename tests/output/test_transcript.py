"""Tests of `nbdist.output.transcript` (and `track`, `sameness`): one cell on N ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import Died, Display, Done, Failure, Output, Update
from nbdist.output.fingerprint import normal
from nbdist.output.screen import Line
from nbdist.output.transcript import Transcript, fold
from tests.output.lab import out


def failure(message: str, time_ns: int, name: str = "ValueError", line: int = 5) -> Failure:
    lines = ("-----", f"\x1b[36mCell In[1], line {line}\x1b[39m\nraise it", f"{name}: {message}")
    return Failure(name, message, lines, time_ns)


def ran(ranks: int, said: Callable[[int], list[Output]]) -> Transcript:
    """A transcript in which every rank has said something; none has finished."""
    transcript = Transcript(range(ranks))
    transcript.start(0.0)
    for rank in range(ranks):
        for output in said(rank):
            transcript.receive(rank, output, 1.0)
    return transcript


def groups(transcript: Transcript) -> list[tuple[int, ...]]:
    return [group.ranks for group in transcript.groups()]


def figure(name: str, display_id: str | None = None) -> Display:
    return Display({"text/plain": name}, {}, display_id)


# --- states and times -------------------------------------------------------------------


def test_states() -> None:
    """A rank waits, runs, and ends in the state that its last output tells."""
    transcript = Transcript([0, 1, 2, 3, 4])
    assert transcript.looks() == {"waiting": 5}
    transcript.start(10.0)
    assert transcript.looks() == {"running": 5}
    transcript.receive(0, Done("ok", 1.5), 12.0)
    transcript.receive(1, failure("x", 5), 12.0)
    assert transcript[1].state == "failed"
    assert not transcript.is_finished
    transcript.receive(1, Done("error", 2.0), 12.5)
    transcript.receive(2, Died(-9, 6), 13.0)
    transcript.receive(3, Done("aborted", 0.0), 13.0)
    assert not transcript.is_finished
    transcript.receive(4, Done("ok", 4.0), 14.0)
    assert transcript.is_finished
    assert [track.state for track in transcript] == ["ok", "failed", "died", "aborted", "ok"]
    assert transcript.failed == (1, 2)
    # Time runs until the last rank has finished; each rank's seconds are its own.
    transcript = Transcript([0, 1])
    assert transcript.elapsed(5.0) == 0.0
    transcript.start(10.0)
    assert transcript.elapsed(12.0) == 2.0
    transcript.receive(0, Done("ok", 1.5), 12.0)
    transcript.receive(1, Died(-9, 1), 13.0)
    assert transcript.elapsed(99.0) == 3.0
    assert (transcript[0].seconds, transcript[1].seconds) == (1.5, 3.0)


# --- equal ranks ------------------------------------------------------------------------


def test_addresses_devices_processes() -> None:
    """Of more than a few lines the same but for addresses, devices and pids is shown once."""
    said = "<M at 0x7f00000000{0:02x}> cuda:{0} pid={1}\n"
    few = ran(3, lambda rank: [out(said.format(rank, 400 + rank))])
    assert groups(few) == [(0,), (1,), (2,)]
    many = ran(3, lambda rank: [out(said.format(rank, 400 + rank) * 9)])
    assert groups(many) == [(0, 1, 2)]
    (group,) = many.groups()
    assert group.likeness == "places"
    assert group.tail(1) == [
        Line(
            "<M at 0x{7f0000000000,7f0000000001,7f0000000002}> cuda:{0-2} pid={400-402}",
            stderr=False,
        )
    ]
    assert ran(3, lambda rank: [out("x\n")]).groups()[0].likeness == "same"


def test_displays_count() -> None:
    """Equal text does not make ranks equal if their displays differ."""
    transcript = ran(4, lambda rank: [out("a\n"), figure("odd" if rank % 2 else "even")])
    assert groups(transcript) == [(0, 2), (1, 3)]
    transcript.receive(1, Update({"text/plain": "?"}, {}, "no such id"), 1.0)
    assert groups(transcript) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "message",
    ["bad shard {rank}", "rank {rank} of 8.", "on cuda:{rank}", "5 shards, not 3", "plain"],
)
def test_equal_errors(message: str) -> None:
    """Errors are alike if only the rank's own number differs, wherever it stands."""
    transcript = ran(6, lambda rank: [failure(message.format(rank=rank), 100 - rank)])
    assert groups(transcript) == [(0, 1, 2, 3, 4, 5)]
    (group,) = transcript.groups()
    assert group.shown.rank == 5  # the first one
    assert isinstance(group.error, Failure)
    assert group.error.message == message.format(rank="{0-5}")
    assert group.error.traceback[-1].endswith(f"ValueError: {group.error.message}")
    assert (group.likeness == "same") is ("{rank}" not in message)
    assert transcript.alike_error(2) == (0, 1, 2, 3, 4, 5)


# --- failures ---------------------------------------------------------------------------


def test_root_cause() -> None:
    """The earliest failure is the cause, to the nanosecond, whichever arrived first."""
    lost = failure("Connection closed by peer [127.0.0.1]:9", 1_000_000_002, "RuntimeError")
    lost = lost._replace(connections="ended")
    transcript = Transcript(range(5))
    assert transcript.root_cause() is None
    transcript.receive(0, lost, 1.0)
    transcript.receive(3, failure("bad", 1_000_000_001), 1.0)
    transcript.receive(1, lost._replace(time_ns=1_000_000_003), 1.0)
    transcript.receive(4, Died(-9, 1_000_000_009), 1.0)
    cause = transcript.root_cause()
    assert cause is not None
    assert cause[0] == 3
    assert set(transcript.errors) == {0, 1, 3, 4}
    assert transcript.alike_error(0) == (0, 1)
    parts = {group.ranks: group.part for group in transcript.groups()}
    assert parts == {(0, 1): "other", (2,): "none", (3,): "first", (4,): "other"}
    # That one of the user's own connections has ended follows from nothing.
    transcript = Transcript(range(2))
    transcript.receive(0, failure("Connection reset by peer", 5, "ConnectionResetError"), 1.0)
    transcript.receive(1, failure("bad", 9), 1.0)
    cause = transcript.root_cause()
    assert cause is not None
    assert cause[0] == 0


def test_stop_hits_anywhere() -> None:
    """Ranks that Stop has ended in the same line of the cell are the same."""
    transcript = Transcript(range(3))
    for rank, (line, frame) in enumerate([(5, "wait"), (5, "all_reduce"), (4, "sleep")]):
        traceback = (
            f"Cell In[3], line {line}\n",
            f"File torch.py, in {frame}",
            "KeyboardInterrupt",
        )
        transcript.receive(rank, Failure("KeyboardInterrupt", "", traceback, rank), 1.0)
    assert groups(transcript) == [(0, 1), (2,)]


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


@given(TEMPLATES, WORDS, NUMBERS)
def test_what_is_alike_can_be_folded(template, end, numbers):
    """Whatever counts as alike is one text, from which each rank's can be had again."""
    texts = ["".join(f"{w} {p.format(n)} " for w, p in template) + end for n in numbers]
    if len({normal(text) for text in texts}) == 1:
        folded = fold(texts)
        assert folded is not None
        assert unfold(folded, len(texts)) == texts

"""Tests of `nbdist.output.transcript`: the outputs of a cell on several ranks."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import Died, DisplayUpdate, Done, Failure, Output
from nbdist.output.fingerprint import normal
from nbdist.output.screen import ScreenLine
from nbdist.output.transcript import Transcript, fold, fold_lines, later_errors_text
from tests.output.lab import (
    drawing,
    err,
    failure,
    final_html,
    final_text,
    make,
    out,
    running,
    unfold,
)


def groups(transcript: Transcript) -> list[tuple[int, ...]]:
    return [group.ranks for group in transcript.groups()]


def test_a_rank_has_the_state_of_its_last_message() -> None:
    """A rank waits, runs, and ends in the state that follows from its last message."""
    transcript = Transcript(range(5))
    assert transcript.count_display_states() == {"waiting": 5}
    assert transcript.elapsed(5.0) == 0.0
    transcript.start(10.0)
    assert transcript.count_display_states() == {"running": 5}
    assert transcript.elapsed(12.0) == 2.0
    transcript.receive(0, Done("ok", 1.5), 12.0)
    transcript.receive(1, failure("x", 5), 12.0)
    assert transcript[1].state == "failed"
    transcript.receive(1, Done("error", 2.0), 12.5)
    transcript.receive(2, Died(-9, 6), 13.0)
    transcript.receive(3, Done("aborted", 0.0), 13.0)
    assert not transcript.is_finished
    transcript.receive(4, Done("ok", 4.0), 14.0)
    assert transcript.is_finished
    assert [track.state for track in transcript] == ["ok", "failed", "died", "aborted", "ok"]
    assert transcript.failed == (1, 2)
    # Time runs until the last rank has finished; each rank's seconds are its own.
    assert transcript.elapsed(99.0) == 4.0
    assert [track.seconds for track in transcript] == [1.5, 2.0, 3.0, 0.0, 4.0]


def test_running_ranks_of_ended_workers_are_aborted() -> None:
    """If the workers end, ranks that still run are aborted, and the cell's time stops."""
    transcript = running(3, lambda rank: [out("x\n")])
    transcript.receive(0, Done("ok", 1.0), 1.0)
    transcript.abort(5.0)
    assert transcript.count_display_states() == {"ok": 1, "aborted": 2}
    assert (transcript.is_finished, transcript.elapsed(99.0)) == (True, 5.0)


# --- equal ranks --------------------------------------------------------------------------------


def test_long_outputs_with_other_addresses_are_merged() -> None:
    """Long outputs that are equal but for addresses, devices and pids are shown once."""
    said = "<M at 0x7f00000000{0:02x}> cuda:{0} pid={1}\n"
    few = running(3, lambda rank: [out(said.format(rank, 400 + rank))])
    assert groups(few) == [(0,), (1,), (2,)]
    many = running(3, lambda rank: [out(said.format(rank, 400 + rank) * 9)])
    (group,) = many.groups()
    assert (group.ranks, group.likeness) == ((0, 1, 2), "same except for {…}")
    folded = "<M at 0x{7f0000000000,7f0000000001,7f0000000002}> cuda:{0-2} pid={400-402}"
    assert group.last == ScreenLine(folded, stderr=False)
    assert running(3, lambda rank: [out("x\n")]).groups()[0].likeness == "same"
    # Equal text does not make ranks equal if their displays differ.
    transcript = running(4, lambda rank: [out("a\n"), drawing("odd" if rank % 2 else "even")])
    assert groups(transcript) == [(0, 2), (1, 3)]
    transcript.receive(1, DisplayUpdate({"text/plain": "?"}, {}, "no such id"), 1.0)
    assert groups(transcript) == [(0, 2), (1, 3)]


LOGGED = {
    "basic": ("%(asctime)s %(levelname)s %(message)s", None),
    "hydra": ("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s", None),
    "transformers": ("%(asctime)s - %(levelname)s - %(message)s", "%m/%d/%Y %H:%M:%S"),
    "ISO": ("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%S+00:00"),
    "clock": ("%(message)s at %(asctime)s.", "%H:%M:%S"),
    "torch": ("W%(asctime)s.%(msecs)03d000 %(process)d t/run.py:7] %(message)s", "%m%d %H:%M:%S"),
}


def logged(style: str, message: str, seconds: float) -> str:
    """Return a line of `logging` for a moment `seconds` after the epoch."""
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", "process": int(seconds)})
    record.created, record.msecs = seconds, 1000 * (seconds % 1)
    return logging.Formatter(*LOGGED[style]).format(record) + "\n"


@pytest.mark.parametrize("style", LOGGED)
def test_lines_that_differ_in_times_are_merged(style: str) -> None:
    """Ranks whose lines differ in times alone are merged, also while some ranks are ahead.

    The header says that times differ, unless the lines are equal. The earliest and the latest time
    are shown.
    """

    def lines(rank: int, count: int, message: str = "step {}") -> list[Output]:
        # Each line is 1.1 s after the line before, and each rank 3 s after the rank before.
        return [
            err(logged(style, message.format(n), 9e8 + 1.1 * n + 3 * rank)) for n in range(count)
        ]

    for transcript in (
        make(4, lambda rank: lines(rank, 3)),
        running(4, lambda rank: lines(rank, 30)),
    ):
        (group,) = transcript.groups()
        assert (group.ranks, group.likeness) == ((0, 1, 2, 3), "same except for times")
        earliest, latest = (transcript[rank].tail(1)[0] for rank in (0, 3))
        assert group.last == fold_lines([earliest, latest])
        assert re.search(r"\{([^{}]+) to (?!\1)[^{}]+\}", group.last.text)
    ahead = running(4, lambda rank: lines(rank, 1 + rank % 2))
    (group,) = ahead.groups(is_live=True)
    firsts = [ahead[rank].tail(2)[0] for rank in (0, 3)]
    assert (group.likeness, group.last) == ("same except for times", fold_lines(firsts))
    assert group.ahead == [((1, 3), fold_lines([ahead[rank].tail(1)[0] for rank in (1, 3)]))]
    (group,) = make(4, lambda _: lines(0, 3)).groups()
    assert group.likeness == "same"
    # Every other difference is shown.
    assert groups(make(4, lambda rank: lines(rank, 1, f"loss {rank}"))) == [(0,), (1,), (2,), (3,)]
    (group,) = make(4, lambda rank: lines(rank, 9, f"loss {rank}")).groups()
    assert group.likeness == "same except for {…}"
    assert "loss {0-3}" in group.last.text
    assert re.search(r"\{([^{}]+) to (?!\1)[^{}]+\}", group.last.text)
    # Ranges of times are shown also if each rank has printed a single line, and in HTML.
    for count in (1, 2):
        said = make(4, lambda rank, count=count: lines(rank, count))
        assert said[0].tail(1) != said[1].tail(1)
        assert "── ranks 0-3 (same except for times) ──" in final_text(said)
        assert " to " in final_html(said)


def test_durations_ratios_and_addresses_are_no_times() -> None:
    """Ranks that differ in durations, ratios or addresses are shown apart."""
    for text in ("took 0:00:0{}", "1{}:16", "host:1{}:22:33", "[::{}:10:20]"):
        said = make(4, lambda rank, text=text: [out(f"{text.format(rank)}\n")])
        assert len(groups(said)) == 4, text


@pytest.mark.parametrize(
    "message", ["bad shard {rank}", "rank {rank} of 8.", "on cuda:{rank}", "5 shards, not 3"]
)
def test_errors_that_differ_in_rank_numbers_are_merged(message: str) -> None:
    """Errors are alike if only the rank's own number differs, wherever the number stands."""
    transcript = running(6, lambda rank: [failure(message.format(rank=rank), 100 - rank)])
    (group,) = transcript.groups()
    assert group.ranks == (0, 1, 2, 3, 4, 5)
    assert group.shown.rank == 5  # the rank that failed first
    assert isinstance(group.error, Failure)
    assert group.error.message == message.format(rank="{0-5}")
    assert group.error.traceback[-1].endswith(f"E: {group.error.message}")
    assert (group.likeness == "same") is ("{rank}" not in message)
    assert transcript.alike_error(2) == (0, 1, 2, 3, 4, 5)
    others = f"E: {message.format(rank='{0-4}')}" if "{rank}" in message else "the same"
    assert later_errors_text(transcript.errors, 5) == [f"ranks 0-4: {others}"]


def test_ranks_stopped_in_the_same_line_are_merged() -> None:
    """Ranks that Stop has interrupted in the same line of the cell are in the same group."""
    places = [(5, "wait"), (5, "all_reduce"), (4, "sleep")]
    tracebacks = [(f"Cell In[3], line {line}\n", f"File t.py, in {at}", "") for line, at in places]
    stopped = running(3, lambda rank: [Failure("KeyboardInterrupt", "", tracebacks[rank], rank)])
    assert groups(stopped) == [(0, 1), (2,)]
    assert stopped.groups()[0].likeness == "stopped in the same line"
    # In a script no line of the cell is known.
    scripts = [(f"File train.py:{line}, in {name}",) for line, name in ((5, "step"), (9, "load"))]
    stopped = running(2, lambda rank: [Failure("KeyboardInterrupt", "", scripts[rank], rank)])
    assert [group.likeness for group in stopped.groups()] == ["stopped"]


# --- failures -----------------------------------------------------------------------------------


def test_the_earliest_failure_is_the_cause() -> None:
    """The earliest failure is the cause, to the nanosecond, whichever failure arrived first."""
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
    # The end of a connection of the user's own can be the cause.
    own = [failure("reset by peer", 5, "ConnectionResetError"), failure("bad", 9)]
    cause = running(2, lambda rank: [own[rank]]).root_cause()
    assert cause is not None
    assert cause[0] == 0


# --- sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "folded"),
    [
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "cuda:{0-3}"),
        (["pid 7996", "pid 7999"], "pid {7996,7999}"),
        (["missing key 1", "missing key 3"], "missing key {1,3}"),
        (["cuda:0", "cuda:0", "cuda:1", "cuda:1"], "cuda:{0*2,1*2}"),
        (["loss 1.5", "loss 1.4", "loss 1.4", "loss 1.3"], "loss {1.5, 1.4, 1.4, 1.3}"),
        (["loss 1.5", "loss 1.4", "loss 1.4", "loss 1.4"], "loss {1.5, 1.4*3}"),
        (["cuda:3", "cuda:0"], "cuda:{3,0}"),
        (["<M at 0x7fa0>", "<M at 0x7fb0>"], "<M at 0x{7fa0,7fb0}>"),
        (["h:7:9 [0] NCCL", "h:8:9 [1] NCCL"], "h:{7-8}:9 [{0-1}] NCCL"),
        (["pid 099", "pid 100"], "pid {099-100}"),
        (["step 3"] * 4, "step 3"),
        (["step 3", "stop 3"], None),
    ],
)
def test_numbers_that_differ_become_sets(texts: list[str], folded: str | None) -> None:
    """Numbers that differ become sets in rank order; other differences prevent the folding."""
    assert fold(texts) == folded
    if folded is not None:
        assert unfold(folded, len(texts)) == texts
    # Of a thousand numbers without an order only the first are shown.
    assert str(fold([f"pid {rank * rank}" for rank in range(1000)])).endswith(",3969,4096,…}")
    texts = [*(f"at {rank}.5" for rank in range(20)), "at 0x7fa0"]
    assert unfold(str(fold(texts)), len(texts)) == texts


def test_times_that_differ_become_a_range() -> None:
    """Times that differ become a range from the earliest to the latest, also in colours."""
    for text, folded in (
        ("at 10:11:1{0} on a", "at {10:11:12 to 10:11:15} on a"),
        ("2026-11-28 10:11:1{0} {0}", "2026-11-28 {10:11:12 to 10:11:15} {2,5,3}"),
        ("\x1b[32m10:11:1{0}\x1b[0m {0}", "\x1b[32m{10:11:12 to 10:11:15}\x1b[0m {2,5,3}"),
    ):
        assert fold([text.format(second) for second in (2, 5, 3)]) == folded


PLACES = st.sampled_from(
    ["cuda:{0}", "GPU {0}", "pid {0}", "pid={0}", "0x7f{0:06x}", "n:{0}:{0} [{0}] NCCL INFO"]
)
WORDS = st.text(st.sampled_from("ab :.,\0n0x19[]<>\ncuda pid"), max_size=6)
TEMPLATES = st.lists(st.tuples(WORDS, PLACES), max_size=3)
NUMBERS = st.lists(st.integers(0, 12), min_size=2, max_size=6)


@given(TEMPLATES, WORDS, NUMBERS)
def test_alike_texts_can_be_folded_and_unfolded(template, end, numbers):
    """Alike texts fold to a text from which the text of each rank can be restored."""
    texts = ["".join(f"{w} {p.format(n)} " for w, p in template) + end for n in numbers]
    if len({normal(text) for text in texts}) == 1:
        folded = fold(texts)
        assert folded is not None
        assert unfold(folded, len(texts)) == texts

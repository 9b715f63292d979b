"""Tests that folding loses nothing: all output of a rank can be restored from its panel."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm.std import tqdm

from nbdist.output.ansi import strip
from nbdist.output.chart import curves_text, number_text
from nbdist.output.curves import Curves
from nbdist.output.events import IGNORES_STOP, Died, Done, Text, Tracked
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.screen import ScreenLine
from nbdist.output.text import PlainLines, panel_text
from nbdist.output.transcript import Transcript, spread
from nbdist.output.wording import error_text, seconds_text
from nbdist.topology import parse_ranks
from nbdist.worker import tracking
from tests.output.lab import (
    err,
    failure,
    final_html,
    final_text,
    live_html,
    live_text,
    make,
    out,
    running,
    unfold,
)

Said = list[list[str]]
"""The lines of each rank."""

HEADER = re.compile(r"── ranks? ([\d,-]+)")
LINE = st.sampled_from(
    ["loss 0.5", "cuda:{}", "GPU {} of 2", "pid {}", "a model at 0x7f{:06x} on cuda:{}", "done"]
)

some = settings(max_examples=40)


@st.composite
def cells(draw: st.DrawFn) -> Said:
    """Draw ranks with nearly equal lines, whose numbers differ by rank or not."""
    lines = draw(st.lists(LINE, min_size=1, max_size=9))
    number = st.integers(0, 20)
    said = []
    for _ in range(draw(st.integers(1, 20))):
        numbers = draw(st.tuples(number, number))
        said.append([line.format(*numbers) for line in lines])
        if not draw(st.integers(0, 9)):
            said[-1].append("more")
    return said


def printed(lines: list[str]) -> Text:
    return out("".join(f"{line}\n" for line in lines))


def of_each(ranks: list[int], lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield each rank of `ranks` with its own lines, from the folded lines below their header."""
    unfolded = [unfold(line, len(ranks)) for line in lines]
    for index, rank in enumerate(ranks):
        yield rank, [line[index] for line in unfolded]


def in_text(text: str, ranks: int) -> dict[int, list[str]]:
    _head, *parts = re.split(r"^(?=── )", text, flags=re.MULTILINE)
    found: dict[int, list[str]] = {}
    for part in parts:
        header, *lines = part.rstrip("\n").split("\n")
        if "(bars)" in header:
            continue
        for rank, own in of_each([*parse_ranks(HEADER.match(header)[1], ranks)], lines):  # type: ignore[index]
            found.setdefault(rank, []).extend(own)
    return found


def in_html(html: str, ranks: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for part in re.split(r"(?=<details|<tr|<div style=\"border-left)", html)[1:]:
        names = re.search(r"ranks? ([\d,-]+)", part)
        assert names is not None
        if "more rank" in part:
            continue
        body = re.split(r"</summary>|</td>|</div>", part, maxsplit=1)[1]
        plain = unescape(re.sub(r"<[^>]*>", "", re.sub(r"</(div|pre)>", "\n", body)))
        lines = [line for line in plain.split("\n") if line]
        for rank, own in of_each([*parse_ranks(names[1], ranks)], lines):
            found.setdefault(rank, []).extend(own)
    return found


@some
@given(cells())
def test_every_line_is_in_panel_and_plain_mode(said: Said) -> None:
    """Each line of each rank is in the panel, in its text, and in plain mode."""
    expected = dict(enumerate(said))
    ended = make(len(said), lambda rank: [printed(said[rank])])
    assert in_text(final_text(ended), len(said)) == expected
    assert in_html(final_html(ended), len(said)) == expected
    found: dict[int, list[str]] = {rank: [] for rank in expected}
    plain = PlainLines(expected)
    shown = [line for rank in expected for line in plain.receive(rank, printed(said[rank]), 0.0)]
    for line in [*shown, *plain.finish(0.0)]:
        ranks, _, rest = line[1:].partition("] ")
        for each in parse_ranks(ranks, len(said)):
            found[each].append(rest)
    assert found == expected


@some
@given(cells().filter(lambda said: len(said) <= 4))
def test_a_live_panel_has_last_lines_of_each_rank(said: Said) -> None:
    """While the cell runs, the panel has the last lines of each rank, at least six or all."""
    transcript = running(len(said), lambda rank: [printed(said[rank])])
    for found in (
        in_text(live_text(transcript), len(said)),
        in_html(live_html(transcript), len(said)),
    ):
        for rank, lines in enumerate(said):
            assert found[rank] == lines[-len(found[rank]) :]
            assert len(found[rank]) >= min(len(lines), 6)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, str]]]:
    """Draw the text of three ranks, with bars, and chunks of the text in any order of ranks."""
    parts = ["loss 0.5\n", "\r 10%|#   | 1/10 [00:01<00:09]", "\x1b[31mred\x1b[0m\n", "é\n", "x"]
    parts += ["\x1b[A\x1b[2K\rup\n", "\rstep 3/10", "\n", "\r" + " " * 9 + "\r", "cuda:1\n"]
    texts = ["".join(draw(st.lists(st.sampled_from(parts), max_size=12))) for _ in range(3)]
    left, chunks = [*texts], []
    while any(left):
        rank = draw(st.sampled_from([rank for rank, text in enumerate(left) if text]))
        size = draw(st.integers(1, 9))
        chunks.append((rank, left[rank][:size]))
        left[rank] = left[rank][size:]
    return texts, chunks


@some
@given(streams())
def test_chunks_of_ranks_may_come_in_any_order(
    written: tuple[list[str], list[tuple[int, str]]],
) -> None:
    """In whatever order chunks come, a rank's text is as if it had come alone and at once."""
    texts, chunks = written
    at_once = [Transcript([rank]) for rank in range(len(texts))]
    for rank, text in enumerate(texts):
        at_once[rank].receive(rank, Text("stdout", text), 0.0)
    together = Transcript(range(len(texts)))
    for rank, chunk in chunks:
        together.receive(rank, Text("stdout", chunk), 0.0)
        panel_text(live_layout(together, 0.1))
    for rank in range(len(texts)):
        ours = together[rank].tail(99)
        assert ours == at_once[rank][rank].tail(99)
        together.receive(rank, Done("ok", 1.0), 1.0)
    shown = in_text(final_text(together), len(texts))
    for rank in range(len(texts)):
        lines = [
            strip(line.text) for line in together[rank].tail(99) if isinstance(line, ScreenLine)
        ]
        found = shown.get(rank, [])
        assert found == lines[: len(found)]
        assert not any(lines[len(found) :])  # empty lines at the end


BAR = "train: 100%|##########| 5/5 [00:0{}<00:00, {}.5it/s, loss=0.{}]"
FOUND = re.compile(
    r"ranks? ([\d,-]+)  train  \|█+\|        5/5  (?:(\d) s  )?"
    r"([\d.]+)(?: to ([\d.]+))?it/s  loss=(.*)"
)


@some
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=16))
def test_finished_bars_of_ranks_share_a_row(numbers: list[tuple[int, int, int]]) -> None:
    """The row of a bar has the longest time, the ends of all rates, and each rank's postfix."""
    bars = [BAR.format(*each) for each in numbers]
    transcript = make(len(bars), lambda rank: [printed(["loading", bars[rank], "done"])])
    _, header, row, *others = final_text(transcript).split("\n")
    assert header.endswith(" (bars) ──")
    assert others[1:] == ["loading", "done"]
    ranks, took, low, high, loss = FOUND.fullmatch(row.rstrip()).groups()  # type: ignore[union-attr]
    assert parse_ranks(ranks, len(bars)) == tuple(range(len(bars)))
    assert int(took or 0) == max(time for time, _, _ in numbers)
    assert (low, high or low) == tuple(f"{pick(n for _, n, _ in numbers)}.5" for pick in (min, max))
    assert unfold(loss, len(bars)) == [f"0.{n}" for _, _, n in numbers]
    html = re.sub(r"<[^>]*>", " ", final_html(transcript).split("<tr")[1]).split()
    assert {"train", "5/5"} <= {*html}
    assert f"loss={loss} " in unescape(" ".join(html))


@some
@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4))
def test_bars_and_lines_are_kept_apart(steps: list[list[int]]) -> None:
    """No line that a rank prints beside its bar is lost or changed, in whatever stream."""
    transcript = Transcript(range(len(steps)))
    expected: list[list[str]] = []
    for rank, own in enumerate(steps):
        lines = []
        for epoch, every in enumerate(own):
            written = io.StringIO()
            for step in tqdm(range(9), desc=f"epoch {epoch}", file=written, mininterval=0):
                if step % every == 0:
                    lines.append(f"[{step}] of epoch {epoch}")
                    transcript.receive(rank, err(written.getvalue()), 0.0)
                    written.seek(0)
                    written.truncate()
                    if rank % 2:  # a bar and a print can share a stream, and come in one piece
                        written.write(f"{lines[-1]}\n")
                    else:
                        transcript.receive(rank, printed([lines[-1]]), 0.0)
            transcript.receive(rank, err(written.getvalue()), 0.0)
        expected.append(lines)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
        assert [strip(line.text) for line in transcript[rank].tail(99)] == lines  # type: ignore[union-attr]
        ended = [(bar.name, bar.amount) for bar in transcript[rank].bars]
        assert ended == [(f"epoch {epoch}", "9/9") for epoch in range(len(own))]
    shown = in_text(final_text(transcript), len(steps))
    assert [shown.get(rank, []) for rank in range(len(steps))] == expected


LOW = st.integers(0, 3)


@some
@given(st.lists(st.lists(LOW, min_size=2, max_size=3), min_size=1, max_size=40), LOW)
def test_folding_hides_no_difference(numbers: list[list[int]], failed: int) -> None:
    """Two ranks with different output are never in the same group, whether they failed or not."""
    said = [[f"loss {number}" for number in each] for each in numbers]
    errors = [[failure(each[0])] if rank % 4 == failed else [] for rank, each in enumerate(said)]
    text = final_text(make(len(said), lambda rank: [printed(said[rank]), *errors[rank]]))
    shown = in_text(text, len(said))
    assert [shown[rank][: len(lines)] for rank, lines in enumerate(said)] == said


@pytest.mark.parametrize("ranks", [4, 40])
def test_devices_of_ranks_are_rows_or_a_set(ranks: int) -> None:
    """`print(device)` has a row for each of a few ranks, and a set for many ranks."""
    said = [[f"cuda:{rank}"] for rank in range(ranks)]
    transcript = make(ranks, lambda rank: [printed(said[rank])])
    _, *shown = final_text(transcript).split("\n")
    if ranks == 4:
        assert shown == [x for rank in range(4) for x in (f"── rank {rank} ──", f"cuda:{rank}")]
    else:
        assert shown == ["── ranks 0-39 (same except for {…}) ──", "cuda:{0-39}"]
    for html in (final_html(transcript), live_html(transcript)):
        assert in_html(html, ranks) == dict(enumerate(said))


def test_errors_with_other_numbers_have_a_set() -> None:
    """Errors that differ in a number are shown once, with a set and `same except for {…}`."""
    errors = {3: [failure("'missing key 3'", 1)], 1: [failure("'missing key 1'", 2)]}
    transcript = running(4, lambda rank: [out("x\n"), *errors.get(rank, [])])
    _, *shown = final_text(transcript).split("\n")
    expected = ["── ranks 1,3 (same except for {…}) ✗ ──", "x", "-----", "Cell In[1], line 2"]
    expected += ["E: 'missing key {1,3}'", "── ranks 0,2 (same) ──", "x"]
    assert shown == expected
    for text in (final_html(transcript), live_html(transcript), live_text(transcript)):
        assert "E: 'missing key {1,3}'" in text
    # Messages that differ only after many characters are not merged.
    transcript = running(2, lambda rank: [failure("y" * 200_000 + f" rank {rank}")])
    assert len(transcript.groups()) == 2


# --- numbers ------------------------------------------------------------------------------------

LINES = [
    "loss {0}",
    "loss {1}",
    "2026-11-28 10:11:12,2{1:02} INFO loss={0}",
    "[10:11:12.2{1:02}] {0} {1}",
    "train loss {0} val loss {1}",
    "val loss: {1}",
    "seen {1},{2:03} tokens in {0} s",
    "({0}, {1}, {2})",
    "1{1},{2:03}",
]
RANGE = re.compile(r"(?P<name>.+?) (?P<low>[\d.,]+)(?: s)? \(rank (?P<least>\d+)\) to "
                   r"(?P<high>[\d.,]+)(?: s)? \(rank (?P<most>\d+)\)")  # fmt: skip


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(LINES), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30), st.integers(0, 999)), min_size=3),
    st.integers(0, 30),
)
def test_the_ends_of_a_spread_were_printed_last(
    lines: list[str], numbers: list[tuple[int, int, int]], odd: int
) -> None:
    """The ends of each range are numbers that its ranks have printed last under the same name."""
    said = [[line.format(own / 100, *more) for line in lines] for own, *more in numbers]
    for own in said[odd : odd + 1]:
        own.append("and more")
    found = spread(make(len(said), lambda rank: [printed(said[rank])]))
    those = re.match(r"(\d+) of (\d+) ranks: ", found)
    is_of_all = odd >= len(said)
    assert those is None or (int(those[1]), int(those[2])) == (len(said) - 1, len(said))
    assert not found or is_of_all == (those is None)
    for each in filter(None, found.removeprefix(those[0] if those else "").split(" · ")):
        ends = RANGE.fullmatch(each)
        assert ends is not None, each
        pattern = rf"(?<!\w){re.escape(ends['name'])}[ =:]+([\d.,]*\d)"
        printed_last = {
            rank: [
                *re.findall(pattern, "\n".join(own)),
                *re.findall(rf"^{pattern}", "\n".join(own), re.MULTILINE),  # `loss`, not `val loss`
            ][-1]
            for rank, own in enumerate(said)
            if rank != odd
        }
        value_of = {rank: float(text.replace(",", "")) for rank, text in printed_last.items()}
        assert printed_last[int(ends["least"])] == ends["low"]
        assert printed_last[int(ends["most"])] == ends["high"]
        assert value_of[int(ends["least"])] == min(value_of.values())
        assert value_of[int(ends["most"])] == max(value_of.values())


# --- failures -----------------------------------------------------------------------------------

ENDS = {
    "ok": lambda time: out("x\n"),
    "failed": lambda time: failure(f"bad {time // 2}", time),
    "released": lambda time: failure("it waited", time)._replace(connections="ended"),
    "timed out": lambda time: failure("Timed out", time)._replace(connections="timed out"),
    "stopped": lambda time: failure("", time, "KeyboardInterrupt"),
    "died": lambda time: Died(-9, time),
    "ignored Stop": lambda time: Died(-9, time, why=IGNORES_STOP),
}
"""How a rank can end its cell, at a time."""


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([*ENDS]), st.integers(1, 9)), min_size=1, max_size=8))
def test_failed_first_marks_the_earliest_own_failure(ends: list[tuple[str, int]]) -> None:
    """`failed first` marks a rank whose own failure came before the failures of all others."""
    transcript = make(len(ends), lambda rank: [ENDS[ends[rank][0]](ends[rank][1])])
    said = {
        found[1] or str(block.group.ranks[0]): block
        for block in final_layout(transcript).blocks
        for word in block.words
        if (found := re.fullmatch(r"(?:rank (\d+) )?failed first", word))
    }
    own = [(time, rank) for rank, (end, time) in enumerate(ends) if end in ("failed", "died")]
    others = [time for end, time in ends if end in ("stopped", "ignored Stop", "timed out")]
    for rank, block in said.items():
        assert ends[int(rank)][1] == min(own)[0]
        assert ends[int(rank)][1] <= min(others, default=10)
        assert len(block.group.ranks) < sum(end != "ok" for end, _ in ends)
    is_alone = len({end for end, _ in ends} - {"ok"}) == 1
    if own and not others and not is_alone:
        assert len(said) == 1


@some
@given(st.lists(st.sampled_from([*ENDS]), min_size=1, max_size=8))
def test_a_rank_is_shown_with_its_own_end(ends: list[str]) -> None:
    """The end that is shown for a rank is the rank's own, also if the rank is in a group."""
    outputs = [ENDS[end](1) for end in ends]
    layout = final_layout(make(len(ends), lambda rank: [outputs[rank]]))
    for block in layout.blocks:
        assert len({ends[rank] for rank in block.group.ranks}) == 1
        error = block.group.error
        if isinstance(error, Died) and block.failed:
            assert block.failed.partition(" (")[0] == error_text(error).partition(" (")[0]
        if found := re.search(r"\(as on rank (\d+)\)", block.failed):
            assert ends[int(found[1])] == ends[block.group.ranks[0]]


@some
@given(st.lists(st.sampled_from(["ok", "aborted", ""]), min_size=1, max_size=6))
def test_silent_cells_say_how_ranks_ended(ends: list[str]) -> None:
    """A cell without output says how its ranks ended, unless all ranks succeeded."""
    transcript = running(len(ends), lambda rank: [])
    known = {"ok": Done("ok", 1.0), "aborted": Done("aborted", 0.0)}
    for rank, end in enumerate(ends):
        if end in known:
            transcript.receive(rank, known[end], 1.0)
    found = dict(final_layout(transcript, now=1.0).states)
    assert bool(found) == ({*ends} != {"ok"})
    assert found.get("aborted", "∅ 0") == f"∅ {ends.count('aborted')}"


@some
@given(st.lists(st.sampled_from(["ok", "aborted", "failed", ""]), min_size=1, max_size=6))
def test_the_mark_of_a_group_fits_all_ranks(ends: list[str]) -> None:
    """The mark of a group is the mark of all its ranks, or says that some ranks still run."""
    said = [[out("x\n"), *([failure()] if end == "failed" else [])] for end in ends]
    transcript = running(len(ends), said.__getitem__)
    known = {"ok": Done("ok", 1.0), "aborted": Done("aborted", 0.0), "failed": Done("error", 1.0)}
    for rank, end in enumerate(ends):
        if end in known:
            transcript.receive(rank, known[end], 1.0)
    for layout in (live_layout(transcript, 1.0), final_layout(transcript, now=1.0)):
        for block in layout.blocks:
            looks = {transcript[rank].display_state for rank in block.group.ranks}
            look = block.group.shown.display_state
            assert looks == {look} or (look == "running" and looks == {"running", "ok"})
            assert "aborted" not in block.words or looks == {"aborted"}


TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.02, 3.0, 3.04, 60.0])


@some
@given(st.lists(st.tuples(TIMES, st.sampled_from(["ok"] * 9 + ["failed"])), min_size=1, max_size=6))
def test_all_equally_slow_ranks_are_named(ends: list[tuple[float, str]]) -> None:
    """All ranks that look equally slow, or fast, are named, and no rank of a failed cell is."""
    said = [[failure()] if end == "failed" else [out("x\n")] for _, end in ends]
    seconds = [time for time, _ in ends]
    pace = final_layout(make(len(ends), said.__getitem__, seconds=seconds.__getitem__)).pace
    if "failed" in {end for _, end in ends} or max(seconds) - min(seconds) < 0.5:
        assert pace == ""
    for word, end in (("slowest", max(seconds)), ("fastest", min(seconds))) if pace else ():
        found = re.search(rf"{word} ranks? ([\d,-]+) \((.*?)\)", pace)
        assert found is not None
        assert found[2] == seconds_text(end)
        ranks = [rank for rank, time in enumerate(seconds) if seconds_text(time) == found[2]]
        assert [*parse_ranks(found[1], len(ends))] == ranks


# --- curves -------------------------------------------------------------------------------------

HEADLINE = re.compile(
    r"loss (?P<is_median>median )?(?P<median>\S+) · "
    r"(?:mean of (?P<of>\d+) from )?step (?P<step>[\d,]+)(?: on)? · "
    r"(?:(?P<low>\S+) to (?P<high>\S+) on )?"
    r"(?:rank 0|(?:(?P<there>\d+) of )?\d+ ranks)(?P<equal>,? equal)?"
)
LEFT = re.compile(
    r"rank (?P<rank>\d+) left the band from (?P<about>about )?step (?P<step>[\d,]+)"
    r"(?: to (?P<until>[\d,]+), and came back| on): "
    r"at step (?P<at>[\d,]+) it ha[sd] (?P<own>\S+), "
    r"beside a median of (?P<others>\S+) on the others"
)
ODD = re.compile(
    r"(?P<ranks>ranks? [\d,-]+): NaN or infinity (?:first )?(?:at|from) step (?P<step>[\d,]+)"
    r"(?: only|(?P<on> on))?(?:, (?P<numbers>[\d,]+) numbers in all)?"
)


@st.composite
def trainings(draw: st.DrawFn) -> list[list[float]]:
    """Draw numbers that ranks track: mostly equal, with some ranks far away or NaN for a while.

    With this noise no mean of steps lies halfway between two numbers of four digits.
    """
    steps, noise = draw(st.sampled_from([5, 40, 300, 5000])), draw(st.sampled_from([0, 0.0103]))
    step = st.integers(0, steps - 1)
    found = []
    for rank in range(draw(st.integers(1, 6))):
        numbers = [2.0 + noise * ((7 * step + 3 * rank) % 5) for step in range(steps)]
        for value in (9.0, math.nan):
            if draw(st.integers(0, 2)) == 0:
                begin = draw(step)
                end = draw(st.sampled_from([begin + 1, begin + 9, steps]))
                numbers[begin:end] = [value] * len(numbers[begin:end])
        found.append(numbers)
    return found


def tracked_by(ranks: list[list[float]], sent: set[tuple[int, int]]) -> Curves:
    """Return the curves that the notebook makes of the ranks' messages.

    A rank sends a message after each of its steps that is in `sent`, as (rank, step), and at the
    end.
    """
    curves, messages = Curves(), list[dict[str, Any]]()
    for rank, numbers in enumerate(ranks):
        tracking.connect(messages.append)
        tracking.begin_task()
        for step, number in enumerate(numbers):
            tracking.track(loss=number)
            if (rank, step) in sent:
                tracking.flush()
        tracking.flush()
        tracking.connect(None)
        for message in messages:
            curves.add(rank, "task", Tracked(message["curves"], message["counted"]), len(ranks))
        messages.clear()
    return curves


def number_of(text: str) -> int:
    return int(text.replace(",", ""))


SENT = st.sampled_from([3, 150, 997, 2_500, 4_900])

# Rank 1 sends so many steps at once that each of its points is of two steps.
UNLIKE = [[2.0 + 0.0103 * ((7 * step + 3 * rank) % 5) for step in range(300)] for rank in range(2)]


@settings(max_examples=150, deadline=None)
@given(trainings(), st.sets(st.tuples(st.integers(0, 5), SENT), max_size=9))
@example(UNLIKE, {(0, 150)})
def test_sentences_about_curves_are_true(
    ranks: list[list[float]], sent: set[tuple[int, int]]
) -> None:
    """Sentences about curves are true: the range, "equal", which rank has left, the first NaN."""
    # Messages are sent at the chosen steps alone, however fast the machine is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "_due", math.inf)
        patch.setattr(tracking, "TRACK_SEND_INTERVAL", math.inf)
        curves = tracked_by(ranks, {(rank, step % len(ranks[0])) for rank, step in sent})
    head, *said = curves_text(curves).split("\n")
    left = [found.groupdict() for line in said if (found := LEFT.fullmatch(line))]
    odd = [found.groupdict() for line in said if (found := ODD.fullmatch(line))]
    assert len(left) + len(odd) == len([line for line in said if "rank" in line and ":" in line])
    # No sentence ends with a number, which would look like a number beside the picture.
    sentences = [head, *(each.group() for line in said if (each := re.match(".*:.*", line)))]
    assert not [each for each in sentences if re.search(r"(?<!rank )\b\d[\d,.e+-]*$", each)]
    finite = [[each for each in numbers if math.isfinite(each)] for numbers in ranks]
    if any(finite):
        found = HEADLINE.fullmatch(head)
        assert found is not None, head
        assert bool(found["is_median"]) is bool(found["low"])
        # A rank with a NaN among the steps of a mean is left out.
        begin, width = number_of(found["step"]), int(found["of"] or 1)
        parts = [numbers[begin : begin + width] for numbers in ranks]
        there = [sum(part) / len(part) for part in parts if all(map(math.isfinite, part))]
        assert width == 1 or len(ranks[0]) > 40
        if int(found["there"] or len(ranks)) == len(there) > 1:
            ends = {number_text(min(there)), number_text(max(there))}
            assert ends == ({found["low"], found["high"]} if found["low"] else {found["median"]})
        if found["equal"] and not found["there"]:
            assert not any(each["until"] is None for each in left), (head, said)
    for each in left:
        own, begin = ranks[int(each["rank"])], number_of(each["step"])
        assert each["about"] or {own[begin]} != {other[begin] for other in ranks}
        assert math.isfinite(own[number_of(each["at"])]) or len(own) > 40
        last = max(step for step, number in enumerate(own) if math.isfinite(number))
        assert begin <= number_of(each["at"]) <= last
    named = dict[int, dict[str, str | None]]()
    for each in odd:
        named |= dict.fromkeys(parse_ranks(str(each["ranks"]).split()[1], len(ranks)), each)
    assert named.keys() == {rank for rank, each in enumerate(finite) if len(each) < len(ranks[0])}
    for rank, each in named.items():
        steps = [step for step, number in enumerate(ranks[rank]) if math.isnan(number)]
        assert number_of(str(each["step"])) == steps[0]
        if each["on"]:
            assert steps == [*range(steps[0], len(ranks[rank]))]
        else:
            assert number_of(each["numbers"] or "1") == len(steps)

"""Tests of `nbdist.output.curves` and `chart`: tracked numbers are kept, compared and drawn."""

from __future__ import annotations

import math
import random
import re
from base64 import b64decode
from collections.abc import Callable, Iterable
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.errors import UsageError
from nbdist.output import chart
from nbdist.output.chart import bands_of, curves_html, curves_text, live_curves, remarks
from nbdist.output.curves import MAX_CURVE_NAMES, MAX_POINTS, MAX_RUNS, CurvePoint, Curves, Series
from nbdist.output.events import MAX_STEP, Done, Tracked
from tests.output.lab import Panel, final_html, final_text, live_html, make


def point(step: float, value: float) -> CurvePoint:
    """Return a tracked number as a point of a curve."""
    if math.isfinite(value):
        return CurvePoint(step, 1, value, value, value, 0)
    return CurvePoint(step, 0, 0.0, 0.0, 0.0, 1)


def tracked(steps: Iterable[float], value: Callable[[float], float], name: str = "loss") -> Tracked:
    """Return numbers of a name as a rank's message has them."""
    return Tracked({name: tuple(n for s in steps for n in point(s, value(s)))}, {})


def curves_of(
    ranks: int, steps: int, value: Callable[[int, float], float], name: str = "loss"
) -> Curves:
    """Return the curves of a task in which each rank tracked `steps` numbers."""
    curves = Curves()
    for rank in range(ranks):
        said = tracked(range(steps), lambda step, rank=rank: value(rank, step), name)
        curves.add(rank, "task", said, ranks)
    return curves


def falling(rank: int, step: float) -> float:
    """Return a falling loss, with noise of its own on each rank."""
    return 3 * math.exp(-step / 60) + 0.2 * random.Random(f"{rank}-{step}").random()


@given(some.lists(some.floats(width=32), min_size=1))
def test_a_curve_keeps_its_extremes(numbers: list[float]) -> None:
    """A curve whose points were merged still has its lowest and highest number, mean and counts."""
    series = Series(4)
    for step, number in enumerate(numbers):
        series.add(point(step, number))
    points, finite = [*series], [each for each in numbers if math.isfinite(each)]
    assert len(points) <= 4
    assert sum(each.odd for each in points) == len(numbers) - len(finite)
    assert sum(each.finite for each in points) == len(finite)
    assert [*series.columns[0]] == sorted({*series.columns[0]})
    assert points[0].step == 0
    if finite:
        assert min(each.low for each in points if each.finite) == min(finite)
        assert max(each.high for each in points if each.finite) == max(finite)
        mean = sum(each.mean * each.finite for each in points) / len(finite)
        near = 1e-6 * max(map(abs, finite))
        assert mean == pytest.approx(sum(finite) / len(finite), rel=1e-6, abs=near)


LARGE = (MAX_STEP, -MAX_STEP, 5e-324, 1e-300, 1e-9, 1 / 3, 0.0, 1.0)
VALUES = (1.7e308, -1.7e308, 1e308, 5e-324, 0.0, 1.0, math.nan)


@given(some.randoms(use_true_random=False))
def test_extreme_numbers_are_drawn(random: random.Random) -> None:
    """Curves of extreme steps and values can be drawn, and no median is infinite or NaN."""
    curves = Curves()
    for rank in range(random.randint(1, 5)):
        steps = [random.choice(LARGE) * random.random() for _ in range(random.choice((1, 9, 300)))]
        said = tracked(random.choice((steps, sorted(steps))), lambda _: random.choice(VALUES))
        curves.add(rank, "task", said, 5)
    assert curves_html(curves)
    assert curves_text(curves)
    medians = (bands_of(run).medians for run in curves.by_name["loss"].runs.values())
    assert all(each is None or math.isfinite(each) for found in medians for each in found)


def test_the_band_is_of_all_ranks_if_all_are_far_at_times() -> None:
    """If each rank is far from the others at some steps, the band is made from all ranks."""
    curves = curves_of(4, 96, lambda rank, step: 100.0 if step // 24 == rank else step % 2)
    bands = bands_of(curves.by_name["loss"].last)
    assert [each.rank for each in bands.far_ranks] == [0, 1, 2, 3]
    assert len(bands.low) == len(bands.steps)
    assert curves_html(curves)


def test_a_long_curve_is_bounded() -> None:
    """A curve has at most MAX_POINTS points: a full curve is merged to half of its resolution."""
    curves = curves_of(1, 3 * MAX_POINTS, lambda rank, step: step)
    (series,) = curves.by_name["loss"].last.values()
    assert MAX_POINTS // 2 <= len(series) <= MAX_POINTS
    assert series.wide == 4
    assert series.last_step == 3 * MAX_POINTS - 4


def test_a_step_that_goes_back_begins_a_run() -> None:
    """A step that goes back begins a run on each rank by itself; the oldest runs are dropped."""
    curves = curves_of(2, 5, falling)
    for _ in range(MAX_RUNS):
        for rank in (1, 0):
            curves.add(rank, "next", tracked(range(3), math.sqrt), 2)
    curve = curves.by_name["loss"]
    assert len(curve.runs) == MAX_RUNS
    assert all({*run} == {0, 1} for run in curve.runs.values())
    assert [len(each) for each in curve.last.values()] == [3, 3]
    assert "7 earlier runs" in curves_text(curves)


def test_counted_steps_continue_after_earlier_tasks() -> None:
    """The counted steps of a task begin after all earlier steps, at the same step on all ranks."""
    curves = Curves()
    for task, counts in (("a", (5, 3)), ("b", (2, 2))):
        for rank, count in enumerate(counts):
            said = curves.with_continued_steps(
                task, Tracked(tracked(range(count), float).curves, {"loss": count})
            )
            curves.add(rank, task, said, 2)
    late = Tracked({"loss": tuple(point(2, 0.5))}, {"loss": 3})
    curves.add(0, "", curves.with_continued_steps("", late), 2)
    (run,) = curves.by_name["loss"].runs.values()
    assert [*run[0].columns[0]] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [*run[1].columns[0]] == [0, 1, 2, 5, 6]


def test_counted_steps_of_tasks_side_by_side_keep_their_first_step() -> None:
    """Two tasks that track the same name in turns go on where each of them began."""
    curves = Curves()
    firsts = [
        curves.with_continued_steps(
            task, Tracked(tracked(range(count), float).curves, {"loss": count})
        ).curves["loss"][0]
        for task, count in (("a", 3), ("b", 2), ("a", 5), ("b", 4))
    ]
    assert firsts == [0, 3, 0, 3]


@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_a_rank_that_leaves_the_band_is_named(ranks: int) -> None:
    """A remark names the rank that leaves the band, and the step; the band is without the rank."""
    away = lambda rank, step: falling(rank, step) + max(0, step - 100) / 20 * (rank == 1)  # noqa: E731
    curves = curves_of(ranks, 300, away)
    bands = bands_of(curves.by_name["loss"].last)
    (far,) = bands.far_ranks
    assert far.rank == 1
    assert 100 < far.step < 140
    about = "" if far.is_exact else "about "
    said = f"rank 1 left the band from {about}step {far.step:.0f} on: "
    assert remarks(bands)[0].startswith(said)
    assert max(each for each in bands.high[160:] if each is not None) < 1
    assert len({y for _, y in drawn(curves_html(curves), "#e67700")}) > 50
    header = curves_text(curves).splitlines()[2].split()
    assert header == ["step", "median", "others'", "lowest", "others'", "highest", "rank", "1"]


def test_noisy_ranks_are_not_named() -> None:
    """No rank is named in 20 noisy trainings of 4 ranks, or if half of the ranks differ."""
    for seed in range(20):
        found = random.Random(seed)
        curves = curves_of(4, 300, lambda rank, step, found=found: 2 / (1 + step) + found.random())
        assert bands_of(curves.by_name["loss"].last).far_ranks == ()
    halves = curves_of(4, 50, lambda rank, step: rank % 2 + step / 1000)
    assert bands_of(halves.by_name["loss"].last).far_ranks == ()


def test_nan_and_infinity_are_named_by_rank_and_step() -> None:
    """NaN and infinity are reported with ranks and step, and leave a gap in the curve."""
    odd = [math.nan, math.inf, -math.inf]
    curves = curves_of(4, 30, lambda rank, step: odd[rank] if rank < 3 and step >= 20 else step)
    run = curves.by_name["loss"].last
    bands = bands_of(run)
    assert remarks(bands) == ["ranks 0-2: NaN or infinity from step 20 on"]
    assert bands.means[0][19:22] == [19, None, None]
    assert "step 29 · 1 of 4 ranks" in curves_text(curves)
    gap = curves_of(1, 9, lambda rank, step: math.nan if 3 <= step <= 4 else step)
    assert bands_of(gap.by_name["loss"].last).means[0][2:6] == [2, None, None, 5]
    none = curves_of(2, 5, lambda rank, step: math.nan)
    assert curves_text(none) == "loss · 2 ranks\nranks 0-1: NaN or infinity from step 0 on"
    # A single step has no picture either, since its numbers are in the text.
    assert "<img" not in curves_html(none) + curves_html(curves_of(2, 1, falling))


def drawn(html: str, colour: str = "#2f7fe6") -> list[tuple[int, int]]:
    """Return the points of the only picture's line of this colour, by default the median."""
    (image,) = Panel(html).images
    svg = ElementTree.fromstring(b64decode(str(image["src"]).partition("base64,")[2]))
    (path,) = (each.get("d", "") for each in svg if each.get("stroke") == colour)
    found: list[tuple[int, int]] = []
    for command, text in re.findall(r"([Ml])([-\d ]+)", path):
        numbers = [*map(int, text.split())]
        for across, down in zip(numbers[::2], numbers[1::2], strict=True):
            x, y = (0, 0) if command == "M" else found[-1]
            found.append((x + across, y + down))
    assert all(0 <= x <= 961 and 4 <= y <= 276 for x, y in found)
    return found


@pytest.mark.parametrize("size", [1e308, 1e-320, 1.0])
def test_a_picture_spans_the_lowest_and_highest_number(size: float) -> None:
    """The largest number is at the top of a picture, the lowest at its bottom; gaps stay gaps."""
    curves = curves_of(1, 3, lambda rank, step: size * (1, -1, 0)[int(step)])
    assert drawn(curves_html(curves)) == [(0, 4), (480, 276), (960, 140)]
    equal = curves_of(4, 1000, lambda rank, step: size / 4)
    assert {y for _, y in drawn(curves_html(equal))} == {140}
    assert drawn(curves_html(curves_of(4, 1000, lambda rank, step: 1e30 if rank else step)))
    odd = curves_of(4, 5, lambda rank, step: math.nan if step in (1, 3) else size)
    assert {x for x, _ in drawn(curves_html(odd))} == {0, 1, 480, 481, 960, 961}


def test_the_axes_have_ticks() -> None:
    """The axes of a picture show round numbers and steps; whole steps have whole ticks."""
    curves = curves_of(2, 126, lambda rank, step: 3 - step / 50)
    numbers = ["3.0", "2.5", "2.0", "1.5", "1.0", "0.5"]
    assert Panel(curves_html(curves)).lines[2:] == [*numbers, "step", "0", "50", "100"]
    few = curves_of(2, 3, lambda rank, step: 7 - step)
    assert Panel(curves_html(few)).lines[-4:] == ["step", "0", "1", "2"]


def test_positive_numbers_over_a_decade_have_a_logarithmic_axis() -> None:
    """An axis is logarithmic only if all numbers are positive and span a decade."""
    curves = curves_of(2, 5, lambda rank, step: 10 ** -(step / 2))
    assert [y for _, y in drawn(curves_html(curves))] == [4, 72, 140, 208, 276]
    ranks, *labels = Panel(curves_html(curves)).lines[1:]
    assert ranks == "2 ranks equal · log scale"
    assert labels[:5] == ["1", "0.3", "0.1", "0.03", "0.01"]
    for value in (lambda step: 10 ** -(step / 5), lambda step: 10**-step - 1e-4):
        linear = curves_html(curves_of(2, 5, lambda rank, step, value=value: value(step)))
        assert "log scale" not in linear
        high, low = value(0), value(4)
        middle = drawn(linear)[2][1]
        assert middle == pytest.approx(4 + 272 * (high - value(2)) / (high - low), abs=1)
    # A rank that diverges is drawn for one more decade, and the others' curves stay readable.
    diverging = curves_of(4, 99, lambda rank, step: 1.0 + rank / 9 + (rank == 3) * 10 ** (step / 9))
    ys = [y for _, y in drawn(curves_html(diverging), "#e67700")]
    assert (min(ys), ys.count(4) > 40) == (4, True)


def test_only_the_newest_run_is_drawn() -> None:
    """Earlier runs are counted in the text, and their numbers stretch neither axis."""
    curves = curves_of(2, 126, lambda rank, step: 3 - step / 50)
    curves.add(0, "next", tracked(range(51), lambda step: 9 + step / 50), 2)
    newest, ranks, *axes = Panel(curves_html(curves)).lines
    assert (newest, ranks) == ("loss 10 · step 50", "rank 0 · 1 earlier run")
    assert axes == ["10.0", "9.8", "9.6", "9.4", "9.2", "9.0", "step", "0", "20", "40"]


def test_curves_are_below_the_head_of_a_panel() -> None:
    """A panel has curves below its head, also of a silent cell, with escaped names."""
    name = "<b>x</b>\n& more"
    transcript = make(2, lambda rank: [])
    for rank in (0, 1):
        transcript.curves.add(rank, "task", tracked(range(9), float, name), 2)
        transcript.receive(rank, Done("ok", 1.0), 1.2)
    assert Panel(final_html(transcript)).lines[:3] == [
        "2 ranks · 1.2 s",
        "<b>x</b> 8 · step 8",
        "2 ranks equal",
    ]
    assert Panel(live_html(transcript)).images
    assert "<b>" not in final_html(transcript)
    assert final_text(transcript).splitlines()[1:3] == [
        "── tracked ──",
        "<b>x</b> 8 · step 8 · 2 ranks equal",
    ]


def test_equal_ranks_have_a_band_without_width() -> None:
    """The band of equal ranks has no width, and a peak at a single step stays visible."""
    curves = curves_of(3, 3000, lambda rank, step: step + 500 * (step == 1000))
    bands = bands_of(curves.by_name["loss"].last)
    assert bands.low == bands.medians == bands.high
    assert max(each or 0 for each in bands.top[:100]) == 1500
    assert curves_text(curves).splitlines()[0].endswith("· 3 ranks equal")


def test_the_headline_is_of_the_last_common_step() -> None:
    """The headline is of the last common step, or of the newest step if a rank is far behind."""
    for ended, said in (
        (80, "loss 79 · step 79 · 2 ranks equal"),
        (9, "loss 99 · step 99 · 1 of 2 ranks"),
    ):
        curves = curves_of(1, 100, lambda rank, step: step)
        curves.add(1, "task", tracked(range(ended), float), 2)
        assert curves_text(curves).splitlines()[0] == said


def test_many_names_are_bounded() -> None:
    """A world keeps a bounded number of names, and a running cell shows a few pictures."""
    curves = Curves()
    found = random.Random(1)
    for name in range(MAX_CURVE_NAMES + 5):
        for rank in range(4):
            said = tracked(range(400), lambda step: found.random(), f"n{name}")
            curves.add(rank, "task", said, 4)
    assert len(curves.by_name) == MAX_CURVE_NAMES
    assert "64 names are kept; left out: n64, n65, n66, n67, n68" in curves_text(curves)
    html, text = live_curves(curves)
    assert len(html) < chart.MAX_LIVE_CHART_BYTES + 10_000
    assert "58 more names: `%dist_plot NAME` shows one" in html
    # The live picture is drawn again at most twice a second.
    curves.add(0, "task", tracked([400], float, "n0"), 4)
    assert live_curves(curves) == (html, text)
    assert curves_text(curves) != text


def test_an_unknown_name_lists_the_tracked_names() -> None:
    """The error for an unknown name lists the tracked names, or says how to track a number."""
    with pytest.raises(UsageError, match=r"no numbers of `los`\. Nothing was tracked\. `track"):
        Curves().find_curve("los")
    with pytest.raises(UsageError, match=r"Tracked: `loss`\."):
        curves_of(1, 1, falling).find_curve("los")


def test_a_table_has_a_column_for_each_rank() -> None:
    """A table has a column for each rank, a column of runs if there are several, NaN for gaps."""
    curves = curves_of(2, 2, lambda rank, step: math.inf if rank and step else step + rank)
    assert curves.table("loss").fillna(-1).to_dict("list") == {
        "step": [0, 1],
        "rank 0": [0.0, 1.0],
        "rank 1": [1.0, -1.0],
    }
    curves.add(0, "next", tracked([0], float), 2)
    assert [*curves.table("loss")["run"]] == [0, 0, 1]


def test_whole_steps_stay_whole() -> None:
    """The columns of a long curve are at whole steps, unless fractions of steps were tracked."""
    long = curves_of(2, 300, falling)
    steps = bands_of(long.by_name["loss"].last).steps
    assert (steps[0], steps[-1]) == (0, 299)
    assert all(map(float.is_integer, steps))
    assert sorted({*steps}) == steps
    table = curves_text(long).splitlines()[2:]
    assert len(table) == chart.TABLE_STEPS
    assert all(row.split()[0].isdecimal() for row in table)
    halves = Curves()
    halves.add(0, "task", tracked([each / 2 for each in range(9)], float), 1)
    assert bands_of(halves.by_name["loss"].last).steps[:3] == [0, 0.5, 1]

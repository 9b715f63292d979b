"""Tests of `nbdist.output.rank_transcript`: what one rank has said, piece by piece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    Output,
    Skipped,
    Typed,
    Update,
)
from nbdist.output.rank_transcript import MOST_DISPLAYS, RankTranscript, Shown
from nbdist.output.screen import Line
from tests.output.lab import out


def figure(name: str, display_id: str | None = None) -> Display:
    return Display({"text/plain": name}, {}, display_id)


def failure(time_ns: int = 1) -> Failure:
    return Failure("ValueError", "bad", ("a traceback",), time_ns)


def said(*outputs: Output) -> RankTranscript:
    transcript = RankTranscript(0, 10_000)
    for output in outputs:
        transcript.receive(output, 1.0)
    return transcript


def texts(transcript: RankTranscript) -> list[str]:
    found = []
    for item in transcript.tail(100):
        match item:
            case Line(text=text):
                found.append(text)
            case Shown():
                found.append(f"<{item.plain}>")
            case Skipped(lines=lines):
                found.append(f"({lines} skipped)")
    return found


def test_version() -> None:
    """The version changes with what there is to see, and with nothing else."""
    transcript = said()
    versions = [transcript.version]
    for output in (out("a"), figure("f", "id"), Update({}, {}, "id"), Done("ok", 1.0)):
        transcript.receive(output, 1.0)
        versions.append(transcript.version)
    assert len(set(versions)) == len(versions)
    for nothing in (out(""), Update({}, {}, "unknown"), Clear(wait=True)):
        transcript.receive(nothing, 1.0)
        assert transcript.version == versions[-1]


def test_order() -> None:
    """Text, displays and gaps stay in the order in which the rank showed them; two gaps are one."""
    outputs = [out("a\nb"), figure("plot"), out("c\n"), Skipped(9, 3), Skipped(90, 4), out("d\n")]
    transcript = said(*outputs)
    assert texts(transcript) == ["a", "b", "<plot>", "c", "(7 skipped)", "d"]
    assert transcript.line_count == 11
    assert [item.text for item in transcript.tail(1) if isinstance(item, Line)] == ["d"]


def test_displays_left_out() -> None:
    """All that were are counted in one place: the agent's, and those that are too many here."""
    outputs = [figure("a"), Skipped(10, 2, displays=3), figure("b"), Skipped(0, 0, displays=2)]
    found = texts(said(*outputs))
    assert found == ["<a>", "(2 skipped)", "<b>", "<… 5 displays left out; the newest are kept>"]
    transcript = RankTranscript(0, 10_000, most_shown=10_000)
    for number in range(100):
        transcript.receive(out(f"{number}\n"), 1.0)
        transcript.receive(Display({"image/png": f"{number:02}" * 1000}, {}), 1.0)
    assert sum(len(each.display.data.get("image/png", "")) for each in transcript.displays) < 10_000
    kept = len(transcript.displays) - 1
    rows = [item.plain if isinstance(item, Shown) else "line" for item in transcript.tail(1000)]
    note = f"… {100 - kept} displays left out; the newest are kept"
    assert rows.index(note) == rows.index("<image/png>") - 2
    assert rows.count("line") == 100
    transcript.receive(Clear(wait=False), 1.0)
    assert texts(transcript) == []


def in_turns(first: str) -> RankTranscript:
    """Text and displays in turns, so many that most of both are left out."""
    transcript = RankTranscript(0, keep_lines=100, most_shown=10_000)
    for number in range(1000):
        transcript.receive(out(f"{number}\n" if number else first), 1.0)
        if number % 100 == 0:
            transcript.receive(Skipped(20, 2), 1.0)
        transcript.receive(figure("f"), 1.0)
    return transcript


def test_text_and_displays_in_turns() -> None:
    """Text that no display parts any more is one, and differs as it did before."""
    transcript = in_turns("0\n")
    assert len(transcript.pieces) < 2 * len(transcript.displays) + 20
    assert transcript.line_count == 1020
    lines = [item.text for item in transcript.tail(10_000) if isinstance(item, Line)]
    assert 100 <= len(lines) <= 120
    assert lines == [f"{number}" for number in range(1000 - len(lines), 1000)]
    assert transcript.body.exact == in_turns("0\n").body.exact
    assert transcript.body.exact != in_turns("1\n").body.exact


def test_many_small_displays() -> None:
    """So many are kept, however small; and of one that is updated only its newest content."""
    transcript = said(*(figure(f"{number}") for number in range(3 * MOST_DISPLAYS)))
    assert MOST_DISPLAYS // 2 <= len(transcript.displays) <= MOST_DISPLAYS + 1
    transcript = RankTranscript(0, 10_000, most_shown=10_000)
    transcript.receive(figure("first", "id"), 1.0)
    for number in range(100):
        transcript.receive(Update({"text/plain": f"{number}" * 1000}, {}, "id"), 1.0)
    assert texts(transcript) == [f"<{'99' * 1000}>"]


def test_update_in_place() -> None:
    """An update changes every display with its id, where it is."""
    outputs = [figure("one", "x"), out("between\n"), figure("two", "x"), figure("other", "y")]
    transcript = said(*outputs, Update({"text/plain": "new"}, {}, "x"))
    assert texts(transcript) == ["<new>", "between", "<new>", "<other>"]
    assert transcript.has_display("y")
    assert not transcript.has_display("z")
    # `clear_output()` forgets at once, with wait=True only when the next output comes.
    assert texts(said(out("a\n"), Clear(wait=False))) == []
    transcript = said(out("a\n"), Clear(wait=True))
    assert texts(transcript) == ["a"]
    transcript.receive(figure("b"), 2.0)
    assert texts(transcript) == ["<b>"]
    transcript.receive(figure("c"), 2.0)
    assert texts(transcript) == ["<b>", "<c>"]


def test_limit_of_lines() -> None:
    """A rank keeps its last lines, over displays between them; all lines are counted."""
    transcript = RankTranscript(0, keep_lines=100)
    for number in range(300):
        transcript.receive(out(f"{number}\n" * 10), 1.0)
        if number % 10 == 0:
            transcript.receive(figure("f"), 1.0)
    lines = [item for item in transcript.tail(10_000) if isinstance(item, Line)]
    assert 100 <= len(lines) <= 200
    assert lines[-1].text == "299"
    assert transcript.line_count == 3000


def test_silent() -> None:
    """A rank that has shown nothing, or wiped what it has shown, is silent; one that failed not.

    Of a rank that raised and then died the earlier of both is the error.
    """
    transcript = said(failure(5), Died(1, 9))
    assert transcript.state == "died"
    assert isinstance(transcript.error, Failure)
    assert said(Done("ok", 1.0)).is_silent
    assert said(out("50%\r   \r")).is_silent
    assert not said(failure()).is_silent
    assert not said(figure("f")).is_silent


def test_an_error_that_did_not_end_the_cell() -> None:
    """What a callback raised, or a thread after the end, is text like any other."""
    during = said(failure(), Done("ok", 1.0))
    after = said(Done("ok", 1.0), failure())
    for transcript in (during, after):
        assert (transcript.state, transcript.error) == ("ok", None)
        assert transcript.tail(1) == [Line("a traceback", stderr=True)]


def test_what_is_typed() -> None:
    """It is shown after its prompt, which the input box shows until then; Stop leaves neither."""
    asks = InputRequest(1, "name? ")
    transcript = said(out("hi\n"), asks)
    assert (transcript.asks, texts(transcript)) == (asks, ["hi"])
    transcript.receive(Typed("ada"), 1.0)
    assert (transcript.asks, texts(transcript)) == (None, ["hi", "name? ada"])
    transcript.receive(InputRequest(2, "age? "), 1.0)
    transcript.receive(Done("error", 1.0), 1.0)
    assert (transcript.asks, texts(transcript)) == (None, ["hi", "name? ada"])


OUTPUTS = st.lists(
    st.one_of(
        st.sampled_from([out("a\n"), out("b"), out("\rc"), Clear(wait=True), Clear(wait=False)]),
        st.sampled_from([figure("f", "x"), Update({"text/plain": "g"}, {}, "x")]),
        st.just(Skipped(5, 2)),
    ),
    max_size=12,
)


@given(OUTPUTS, OUTPUTS)
def test_bodies_compare_what_is_seen(one: list[Output], other: list[Output]) -> None:
    """Two ranks of which the same is seen are the same, however they came there."""
    first, second = said(*one), said(*other)
    if texts(first) == texts(second):
        assert first.body.exact == second.body.exact

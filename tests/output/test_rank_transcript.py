"""Tests of `nbdist.output.rank_transcript`: the outputs of a rank, piece by piece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    DisplayUpdate,
    Done,
    Failure,
    InputRequest,
    Output,
    Skipped,
    Typed,
)
from nbdist.output.rank_transcript import MAX_DISPLAYS, RankTranscript, RichDisplay
from nbdist.output.screen import ScreenLine
from tests.output.lab import drawing, failure, out


def said(*outputs: Output, **limits: int) -> RankTranscript:
    transcript = RankTranscript(0, **{"keep_lines": 10_000, **limits})
    for output in outputs:
        transcript.receive(output, 1.0)
    return transcript


def texts(transcript: RankTranscript) -> list[str]:
    """Return lines, displays in angle brackets, and gaps, in their order."""
    found = []
    for item in transcript.tail(10_000):
        match item:
            case ScreenLine(text=text):
                found.append(text)
            case RichDisplay():
                found.append(f"<{item.plain}>")
            case Skipped(lines=lines):
                found.append(f"({lines} skipped)")
    return found


def test_pieces_stay_in_the_order_of_the_rank() -> None:
    """Text, displays and gaps stay in the order of the rank; two gaps in a row become a single gap.

    A gap is where the agent has left out outputs.
    """
    gaps = [Skipped(9, 3), Skipped(90, 4)]
    transcript = said(out("a\nb"), drawing("plot"), out("c\n"), *gaps, out("d\n"))
    assert texts(transcript) == ["a", "b", "<plot>", "c", "(7 skipped)", "d"]
    assert transcript.line_count == 11
    assert [item.text for item in transcript.tail(1) if isinstance(item, ScreenLine)] == ["d"]
    # All displays that the agent has left out are counted at a single place.
    gaps = [Skipped(10, 2, displays=3), Skipped(0, 0, displays=2)]
    found = texts(said(drawing("a"), gaps[0], drawing("b"), gaps[1]))
    assert found == ["<a>", "(2 skipped)", "<b>", "<… 5 displays left out; the newest are kept>"]


def test_an_update_changes_displays_in_place() -> None:
    """An update changes every display with its id, and no display moves."""
    outputs = [drawing("one", "x"), out("between\n"), drawing("two", "x"), drawing("other", "y")]
    transcript = said(*outputs, DisplayUpdate({"text/plain": "new"}, {}, "x"))
    assert texts(transcript) == ["<new>", "between", "<new>", "<other>"]
    assert transcript.has_display("y")
    assert not transcript.has_display("z")
    # `clear_output()` forgets at once, with wait=True only when the next output comes.
    assert texts(said(out("a\n"), Clear(wait=False))) == []
    assert texts(said(out("a\n"), Clear(wait=True))) == ["a"]
    waited = said(out("a\n"), Clear(wait=True), drawing("b"))
    assert texts(waited) == ["<b>"]
    waited.receive(drawing("c"), 2.0)
    assert texts(waited) == ["<b>", "<c>"]


# --- bounds -------------------------------------------------------------------------------------


def test_the_newest_of_many_displays_are_kept() -> None:
    """Of many or big displays the newest are kept, with all lines; a note counts the others."""
    pictures = [Display({"image/png": f"{number:02}" * 1000}, {}) for number in range(100)]
    parts = [part for n, picture in enumerate(pictures) for part in (out(f"{n}\n"), picture)]
    transcript = said(*parts, most_shown=10_000)
    assert sum(len(each.display.data.get("image/png", "")) for each in transcript.displays) < 10_000
    rows = texts(transcript)
    note = f"<… {100 - rows.count('<<image/png>>')} displays left out; the newest are kept>"
    assert rows.index(note) == rows.index("<<image/png>>") - 2
    assert len([row for row in rows if row.isdigit()]) == 100
    transcript.receive(Clear(wait=False), 1.0)
    assert texts(transcript) == []
    # Small displays are bounded in number, and an updated display has only its newest content.
    transcript = said(*(drawing(f"{number}") for number in range(3 * MAX_DISPLAYS)))
    assert MAX_DISPLAYS // 2 <= len(transcript.displays) <= MAX_DISPLAYS + 1
    updates = [DisplayUpdate({"text/plain": f"{number}" * 1000}, {}, "id") for number in range(100)]
    transcript = said(drawing("first", "id"), *updates, most_shown=10_000)
    assert texts(transcript) == [f"<{'99' * 1000}>"]


def in_turns(first: str) -> RankTranscript:
    """Return a thousand lines and displays in turns, of which most of both are left out."""
    outputs: list[Output] = []
    for number in range(1000):
        outputs.append(out(f"{number}\n" if number else first))
        outputs += [Skipped(20, 2)] * (number % 100 == 0)
        outputs.append(drawing("f"))
    return said(*outputs, keep_lines=100, most_shown=10_000)


def test_last_lines_are_kept_between_displays() -> None:
    """A rank keeps its last lines across displays, and dropped lines still make ranks differ."""
    transcript = in_turns("0\n")
    assert len(transcript.pieces) < 2 * len(transcript.displays) + 20
    assert transcript.line_count == 1020
    lines = [text for text in texts(transcript) if text.isdigit()]
    assert 100 <= len(lines) <= 120
    assert lines == [f"{number}" for number in range(1000 - len(lines), 1000)]
    assert transcript.body.same == in_turns("0\n").body.same
    assert transcript.body.same != in_turns("1\n").body.same


# --- how it ends --------------------------------------------------------------------------------


def test_ranks_without_output_are_silent_unless_failed() -> None:
    """A rank that showed nothing, or wiped its output, is silent; a rank that failed is not.

    If a rank raised and then died, the earlier of both is its error.
    """
    transcript = said(failure(time_ns=5), Died(1, 9))
    assert (transcript.state, type(transcript.error)) == ("died", Failure)
    assert said(Done("ok", 1.0)).is_silent
    assert said(out("50%\r   \r")).is_silent
    assert not said(failure()).is_silent
    assert not said(drawing("f")).is_silent
    # The error of a callback, or of a thread after the end, is text like any other.
    for transcript in (said(failure(), Done("ok", 1.0)), said(Done("ok", 1.0), failure())):
        assert (transcript.state, transcript.error) == ("ok", None)
        assert transcript.tail(1) == [ScreenLine("E: bad", stderr=True)]


def test_typed_text_follows_its_prompt() -> None:
    """Typed text is shown after its prompt; if the cell ends before, neither of them is shown."""
    asks = InputRequest(1, "name? ")
    transcript = said(out("hi\n"), asks)
    assert (transcript.input_request, texts(transcript)) == (asks, ["hi"])
    transcript.receive(Typed("ada"), 1.0)
    assert (transcript.input_request, texts(transcript)) == (None, ["hi", "name? ada"])
    transcript.receive(InputRequest(2, "age? "), 1.0)
    transcript.receive(Done("error", 1.0), 1.0)
    assert (transcript.input_request, texts(transcript)) == (None, ["hi", "name? ada"])


OUTPUTS = st.lists(
    st.one_of(
        st.sampled_from([out("a\n"), out("b"), out("\rc"), Clear(wait=True), Clear(wait=False)]),
        st.sampled_from([drawing("f", "x"), DisplayUpdate({"text/plain": "g"}, {}, "x")]),
        st.just(Skipped(5, 2)),
    ),
    max_size=12,
)


@given(OUTPUTS, OUTPUTS)
def test_ranks_with_equal_output_have_equal_bodies(one: list[Output], other: list[Output]) -> None:
    """Two ranks that show equal output are the same, however the output came about."""
    first, second = said(*one), said(*other)
    if texts(first) == texts(second):
        assert first.body.same == second.body.same

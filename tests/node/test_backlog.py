"""Tests of `nbdist.node.backlog`: what is kept in order, and what makes room."""

from __future__ import annotations

from nbdist.node.backlog import Backlog
from nbdist.output.events import Display, Done, InputRequest, Output, Skipped, Text, Update


def filled(backlog: Backlog, *outputs: Output, rank: int = 0) -> list[Output]:
    """Add these of one rank, and return what there is."""
    for output in outputs:
        backlog.add(rank, "cell", output)
    return [output for _, _, output in backlog.items]


def figure(text: str, name: str | None = None) -> Display:
    return Display({"image/png": text}, {}, name)


def test_text_is_joined() -> None:
    """What a rank writes to one stream is one piece; other streams and ranks part it."""
    backlog = Backlog()
    said = [Text("stdout", "a"), Text("stdout", "b"), Text("stderr", "c"), Text("stdout", "d")]
    joined = [Text("stdout", "ab"), Text("stderr", "c"), Text("stdout", "d")]
    assert filled(backlog, *said) == joined
    assert len(backlog) == 3


def test_older_text_makes_room() -> None:
    """It is said how much is missing, once, and the end is there."""
    backlog = Backlog(text=1000)
    lines = [f"line {number}\n" for number in range(1000)]
    found = filled(backlog, *(Text("stdout", line) for line in lines))
    skipped, *rest = found
    assert isinstance(skipped, Skipped)
    kept = "".join(each.text for each in rest if isinstance(each, Text))
    assert "".join(lines).endswith(kept)
    assert 500 <= len(kept) <= 1000
    assert skipped.characters + len(kept) == len("".join(lines))
    assert skipped.lines + kept.count("\n") == 1000


def test_one_rank_makes_no_room_for_another() -> None:
    """The text of each has its own limit."""
    backlog = Backlog(text=100)
    filled(backlog, Text("stdout", "quiet"), rank=1)
    filled(backlog, *[Text("stdout", "x" * 50)] * 10)
    assert (1, "cell", Text("stdout", "quiet")) in backlog.items


def test_text_of_hours_is_joined() -> None:
    """What other ranks say meanwhile parts it not, where it is for a notebook that comes later."""
    backlog = Backlog(text=1000, is_long=True)
    for step in range(50):
        for rank in (0, 1):
            backlog.add(rank, "cell", Text("stdout", f"step {step}\n"))
    assert [rank for rank, _, _ in backlog.items] == [0, 1]
    backlog.add(0, "cell", figure("x"))
    backlog.add(0, "cell", Text("stdout", "after"))
    assert [rank for rank, _, _ in backlog.items] == [0, 1, 0, 0]
    filled(backlog, Text("stdout", "x" * 900))
    kept = [output for rank, _, output in backlog.items if rank == 0]
    assert [type(each) for each in kept] == [Skipped, Display, Skipped, Text]
    backlog.add(1, "cell", Text("stdout", "end"))
    assert [rank for rank, _, _ in backlog.items].count(1) == 1


def test_figures_make_room() -> None:
    """The oldest are left out, which is said in their places; how a rank ended stays."""
    backlog = Backlog(shown=1000)
    done = Done("ok", 1.0)
    found = filled(backlog, figure("a" * 600), done, figure("b" * 300), figure("c" * 300))
    note, *rest = found
    assert isinstance(note, Text)
    assert "600 characters" in note.text
    assert rest[0] == done
    assert rest[-1] == figure("c" * 300)


def test_updates_replace_one_another() -> None:
    """Of one display only the last is kept."""
    first, second = (Update({"text/plain": text}, {}, "d") for text in "ab")
    assert filled(Backlog(), figure("", "d"), first, second) == [figure("", "d"), second]


def test_what_was_typed_is_asked_for_no_more() -> None:
    """By its rank and number."""
    backlog = Backlog()
    filled(backlog, InputRequest(1, "name? "), InputRequest(2, "age? "))
    filled(backlog, InputRequest(1, "name? "), rank=1)
    backlog.answered(0, 1)
    assert [(rank, output.number) for rank, _, output in backlog.items] == [(0, 2), (1, 1)]


def test_taking_some() -> None:
    """The oldest go first; what is left has its limit still."""
    backlog = Backlog(text=100)
    filled(backlog, Text("stdout", "x" * 60), Text("stderr", "y" * 30))
    assert backlog.take(10) == [(0, "cell", Text("stdout", "x" * 60))]
    assert filled(backlog, Text("stderr", "z" * 60)) == [Text("stderr", "y" * 30 + "z" * 60)]

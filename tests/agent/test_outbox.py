"""Tests of `nbdist.agent.outbox`: batches on a real event loop, bounded when nobody reads.

What is kept in order, and what makes room.
"""

from __future__ import annotations

import asyncio

import pytest

from nbdist.agent.outbox import BATCH_SECONDS, BATCHES_UNDER_WAY, Backlog, Outbox
from nbdist.output.events import (
    Clear,
    Display,
    Done,
    Failure,
    InputRequest,
    Moved,
    Output,
    Skipped,
    Text,
    Update,
)
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import Outputs
from tests.waiting import until


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


def test_small_displays_in_batches() -> None:
    """A batch has not so many that a reader is long about it; what is left keeps its limits."""
    backlog = Backlog(text=1000, shown=100_000)
    for number in range(200):
        filled(backlog, Text("stdout", f"{number}\n"), figure("f"), Update({}, {}, "id"))
    before = backlog.items
    assert len(before) == 401
    batches = [backlog.take(50_000) for _ in range(4)]
    assert all(len(batch) <= 50 for batch in batches)
    assert [*before] == [*(item for batch in batches for item in batch), *backlog.items]
    filled(backlog, *(Update({}, {}, "id") for _ in range(2)), Text("stdout", "x" * 999))
    kinds = [type(output) for _, _, output in backlog.items]
    assert (kinds.count(Update), kinds[-1]) == (1, Text)
    assert sum(len(each[2].text) for each in backlog.items if isinstance(each[2], Text)) <= 1000


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
    assert note == Skipped(0, 0, displays=1)
    assert rest[0] == done
    assert rest[-1] == figure("c" * 300)


def test_figures_of_plotly_make_room() -> None:
    """What is JSON counts like text."""
    points = [[0.5] * 10, {"x": ["label"] * 10}]
    found = filled(Backlog(shown=10_000), *[Display({"application/x": points}, {})] * 100)
    assert isinstance(found[0], Skipped)
    assert found[0].displays + len(found[1:]) == 100
    assert 5 < len(found) < 20


FAILED = Failure("ValueError", "x" * 500, (), 1)


def test_a_flood_of_anything_is_bounded() -> None:
    """Of ranks that take turns: small figures among text, clearing, errors that are shown."""
    small, line = figure("x" * 50), Text("stdout", f"{'x' * 80}\n")
    backlog = Backlog(text=1000, shown=10_000)
    for _ in range(1000):
        for rank in (0, 1):
            filled(backlog, small, line, Clear(wait=True), Moved(1, 2), FAILED, rank=rank)
    assert len(backlog) < 300
    for rank in (0, 1):
        own = [output for of, _, output in backlog.items if of == rank]
        skipped = [output for output in own if isinstance(output, Skipped)]
        left = sum(isinstance(output, Display | Failure) for output in own)
        assert sum(each.displays for each in skipped) + left == 2000
        assert own[-1] == FAILED


def test_a_first_error_stays() -> None:
    """However much others show afterwards: it may be why the cell failed."""
    backlog = Backlog(shown=1000)
    backlog.add(1, "cell", FAILED)
    assert filled(backlog, *[figure("x" * 100)] * 100)[0] == FAILED


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


def test_what_was_taken_makes_room() -> None:
    """Figures are left out for those that wait still, not for those that were taken."""
    backlog = Backlog(shown=1000)
    figures = [figure(f"{number}" * 300) for number in range(5)]
    filled(backlog, *figures[:2])
    assert len(backlog.take(1)) == 1
    assert filled(backlog, figures[2]) == figures[1:3]
    assert backlog.take(10_000)
    assert filled(backlog, *figures[3:]) == figures[3:]


class Reader:
    """The other end: collects batches, and acknowledges when it is told to."""

    def __init__(self) -> None:
        self.batches: list[Outputs] = []
        self.outbox = Outbox(self.batches.append)

    def say(self, text: str, rank: int = 0, stream: str = "stdout") -> None:
        self.outbox.add(rank, "cell", Text(stream, text))  # type: ignore[arg-type]

    def items(self) -> list[tuple[int, str, Output]]:
        return [item for batch in self.batches for item in batch.items]

    def text(self, rank: int = 0) -> str:
        return "".join(
            output.text for who, _, output in self.items() if who == rank and type(output) is Text
        )

    async def wait_for(self, number: int) -> None:
        """Until that many batches have come."""
        await until(lambda: len(self.batches) >= number)


def another(text: str) -> str:
    """Give an equal text that is another object, as each rank's messages have their own."""
    return text.encode().decode()


@pytest.fixture
def notebook() -> Reader:
    return Reader()


async def test_outputs_are_batched(notebook: Reader) -> None:
    """What is said within a moment leaves together, text of one rank as one piece."""
    for number in range(100):
        notebook.say(f"{number}\n")
    assert notebook.batches == []
    await notebook.wait_for(1)
    assert notebook.items() == [
        (0, "cell", Text("stdout", "".join(f"{number}\n" for number in range(100))))
    ]


@pytest.mark.parametrize("last", [Done("ok", 0.1), Failure("ValueError", "", (), 1)])
async def test_ends_and_failures_do_not_wait(last: Output, notebook: Reader) -> None:
    """The end of a cell leaves at once, with what came before it."""
    notebook.say("last words")
    notebook.outbox.add(0, "cell", last)
    for _ in range(3):  # turns of the loop, no time
        await asyncio.sleep(0)
    assert [output for _, _, output in notebook.items()] == [Text("stdout", "last words"), last]


async def test_ends_of_all_ranks_leave_together(notebook: Reader) -> None:
    """While others still run a rank's end can wait; the last one takes them all along."""
    notebook.outbox.begin(range(3))
    for rank in range(3):
        assert notebook.batches == []
        notebook.outbox.add(rank, "cell", Done("ok", 0.1))
        for _ in range(3):  # turns of the loop, no time
            await asyncio.sleep(0)
    (batch,) = notebook.batches
    assert [rank for rank, _, _ in batch.items] == [0, 1, 2]


async def test_slow_notebook_gets_no_more_than_it_takes(notebook: Reader) -> None:
    """Only some batches may be under way; the next leaves with an acknowledgement."""
    for number in range(BATCHES_UNDER_WAY):
        notebook.say(f"{number}\n")
        await notebook.wait_for(number + 1)
    notebook.say("waits")
    notebook.outbox.add(0, "cell", Done("ok", 0.1))
    await asyncio.sleep(3 * BATCH_SECONDS)  # that nothing happens has no other proof
    assert len(notebook.batches) == BATCHES_UNDER_WAY
    assert repr(notebook.outbox) == f"<Outbox 2 items, {BATCHES_UNDER_WAY} batches under way>"
    notebook.outbox.acknowledge()
    await notebook.wait_for(BATCHES_UNDER_WAY + 1)
    assert notebook.text().endswith("waits")
    assert isinstance(notebook.items()[-1][2], Done)


async def test_what_ranks_show_alike_is_sent_once(notebook: Reader) -> None:
    """Equal lines and figures of eight ranks take the room of one rank's; others take theirs."""
    lines, figure, own = "loss 0.1\n" * 1000, "iVBORw0K" * 10000, "0123456789" * 1000
    for rank in range(8):
        notebook.say(another(lines), rank)
        notebook.outbox.add(rank, "cell", Display({"image/png": another(figure)}, {}))
        notebook.say(f"{rank}{own}", rank, "stderr")
    await notebook.wait_for(1)
    (batch,) = notebook.batches
    frame = pack(batch)
    once = len(lines) + len(figure)
    assert once + 8 * len(own) < len(frame) < 1.1 * (once + 8 * len(own))
    assert unpack(frame) == batch
    assert [rank for rank, _, _ in batch.items] == [rank for rank in range(8) for _ in range(3)]
    assert notebook.text(3) == f"{lines}3{own}"

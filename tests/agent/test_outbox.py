"""Tests of `nbdist.agent.outbox`: which outputs make room for others, and when batches leave."""

from __future__ import annotations

import asyncio

import pytest

from nbdist.agent.outbox import BATCH_SECONDS, BATCHES_UNDER_WAY, Backlog, Outbox
from nbdist.output import events
from nbdist.output.events import Clear, Display, DisplayUpdate, Done, Failure, Output, Skipped, Text
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import Outputs
from tests.waiting import until

# --- the backlog --------------------------------------------------------------------------


def filled(backlog: Backlog, *outputs: Output, rank: int = 0) -> list[Output]:
    """Add outputs of a rank, and return all outputs of the backlog."""
    for output in outputs:
        backlog.add(rank, "cell", output)
    return [output for _, _, output in backlog.items]


def figure(text: str, name: str | None = None) -> Display:
    return Display({"image/png": text}, {}, name)


def test_text_of_a_stream_is_joined() -> None:
    """Text of a rank's stream is joined until the rank writes to its other stream."""
    backlog = Backlog(max_text=1000)
    said = [Text("stdout", "a"), Text("stderr", "c"), Text("stdout", "d")]
    assert filled(backlog, said[0], *said) == [Text("stdout", "aa"), *said[1:]]
    assert len(backlog) == 3
    backlog = Backlog(max_text=1000)
    for _ in range(50):
        for rank in (0, 1):
            backlog.add(rank, "cell", Text("stdout", "step\n"))
    assert [rank for rank, _, _ in backlog.items] == [0, 1]
    filled(backlog, figure("x"), Text("stdout", "after"), Text("stdout", "x" * 900))
    kept = [output for rank, _, output in backlog.items if rank == 0]
    assert [type(each) for each in kept] == [Skipped, Display, Skipped, Text]


def test_older_text_makes_room() -> None:
    """Old text makes room for new text of its rank, and an item says how much is missing."""
    backlog = Backlog(max_text=1000)
    filled(backlog, Text("stdout", "quiet"), rank=1)
    lines = [f"line {number}\n" for number in range(1000)]
    filled(backlog, *(Text("stdout", line) for line in lines))
    assert (1, "cell", Text("stdout", "quiet")) in backlog.items
    skipped, *rest = [output for rank, _, output in backlog.items if rank == 0]
    assert isinstance(skipped, Skipped)
    kept = "".join(each.text for each in rest if isinstance(each, Text))
    assert "".join(lines).endswith(kept)
    assert 500 <= len(kept) <= 1000
    assert skipped.characters + len(kept) == len("".join(lines))
    assert skipped.lines + kept.count("\n") == 1000


def test_a_batch_takes_the_oldest_outputs() -> None:
    """A batch has the oldest outputs, as many as a reader takes in quickly; ranks alternate."""
    backlog = Backlog(max_text=1000, max_other=100_000)
    for number in range(200):
        filled(backlog, Text("stdout", f"{number}\n"), figure("f"), DisplayUpdate({}, {}, "id"))
    before = backlog.items
    assert len(before) == 401
    batches = [backlog.pop_batch(50_000) for _ in range(4)]
    assert all(len(batch) <= 50 for batch in batches)
    assert [*before] == [*(item for batch in batches for item in batch), *backlog.items]
    filled(backlog, *(DisplayUpdate({}, {}, "id") for _ in range(2)), Text("stdout", "x" * 999))
    kinds = [type(output) for _, _, output in backlog.items]
    assert (kinds.count(DisplayUpdate), kinds[-1]) == (1, Text)
    assert sum(len(each[2].text) for each in backlog.items if isinstance(each[2], Text)) <= 1000
    backlog = Backlog()
    for rank in (0, 1):
        filled(backlog, *(figure("x" * 100) for _ in range(5)), rank=rank)
    assert [{rank for rank, _, _ in backlog.pop_batch(2000)} for _ in range(3)] == [{0}, {1}, {0}]


def test_old_figures_make_room_for_new_ones() -> None:
    """The oldest figures are dropped, an item in their place says so, and a rank's end stays."""
    done = Done("ok", 1.0)
    sizes = figure("a" * 600), done, figure("b" * 300), figure("c" * 300)
    found = filled(Backlog(max_other=1000), *sizes)
    assert found[:2] == [Skipped(0, 0, displays=1), done]
    assert found[-1] == figure("c" * 300)
    backlog = Backlog(max_other=1000)  # figures that were sent make room
    figures = [figure(f"{number}" * 300) for number in range(5)]
    filled(backlog, *figures[:2])
    assert len(backlog.pop_batch(1)) == 1
    assert filled(backlog, figures[2]) == figures[1:3]
    assert backlog.pop_batch(10_000)
    assert filled(backlog, *figures[3:]) == figures[3:]
    # JSON, such as plotly's figures, counts like text.
    points = [[0.5] * 10, {"x": ["label"] * 10}]
    found = filled(Backlog(max_other=10_000), *[Display({"application/x": points}, {})] * 100)
    assert found[0].displays + len(found[1:]) == 100
    assert 5 < len(found) < 20


FAILED = Failure("ValueError", "x" * 500, (), 1)


def test_a_flood_of_anything_is_bounded() -> None:
    """Figures, text, clears and errors of alternating ranks are limited; the last error stays."""
    small, line = figure("x" * 50), Text("stdout", f"{'x' * 80}\n")
    backlog = Backlog(max_text=1000, max_other=10_000)
    backlog.add(2, "cell", FAILED)  # may be the reason why the cell failed
    for _ in range(1000):
        for rank in (0, 1):
            filled(
                backlog,
                small,
                line,
                Clear(wait=True),
                events.TransferProgress(1, 2),
                FAILED,
                rank=rank,
            )
    assert len(backlog) < 300
    for rank in (0, 1):
        own = [output for of, _, output in backlog.items if of == rank]
        skipped = [output for output in own if isinstance(output, Skipped)]
        left = sum(isinstance(output, Display | Failure) for output in own)
        assert sum(each.displays for each in skipped) + left == 2000
        assert own[-1] == FAILED
    assert (2, "cell", FAILED) in backlog.items


def test_outdated_outputs_are_not_kept() -> None:
    """Before and after a display only its newest update is kept; answered prompts are dropped."""
    a, b, c = (DisplayUpdate({"text/plain": text}, {}, "d") for text in "abc")
    assert filled(Backlog(), figure("", "d"), a, b) == [figure("", "d"), b]
    assert filled(Backlog(), a, figure("", "d"), b, c) == [a, figure("", "d"), c]
    backlog = Backlog()
    for rank in (0, 1):
        filled(backlog, *(events.InputRequest(number, "? ") for number in (1, 2)), rank=rank)
    backlog.discard_input_request(0, 1)
    assert [(rank, output.number) for rank, _, output in backlog.items] == [(0, 2), (1, 1), (1, 2)]


# --- the outbox ---------------------------------------------------------------------------


class Reader:
    """The notebook's end of an outbox, which collects the batches."""

    def __init__(self) -> None:
        self.batches: list[Outputs] = []
        self.outbox = Outbox(self.batches.append)

    def say(self, text: str, rank: int = 0, stream: str = "stdout") -> None:
        self.outbox.add(rank, "cell", Text(stream, text))

    @property
    def items(self) -> list[tuple[int, str, Output]]:
        return [item for batch in self.batches for item in batch.items]

    async def wait_for(self, number: int) -> None:
        """Wait until `number` batches have arrived."""
        await until(lambda: len(self.batches) >= number)


@pytest.fixture
def notebook() -> Reader:
    return Reader()


async def few_turns() -> None:
    """Let the event loop run some callbacks, without a delay."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("last", [Done("ok", 0.1), Failure("ValueError", "", (), 1)])
async def test_ends_and_failures_do_not_wait(last: Output, notebook: Reader) -> None:
    """The end or the failure of a cell leaves at once, together with the text before it."""
    for number in range(100):
        notebook.say(f"{number}\n")
    assert notebook.batches == []
    notebook.outbox.add(0, "cell", last)
    await few_turns()
    said = Text("stdout", "".join(f"{number}\n" for number in range(100)))
    assert [output for _, _, output in notebook.items] == [said, last]


async def test_ends_of_all_ranks_leave_together(notebook: Reader) -> None:
    """The end of a rank waits while other ranks run; the last rank's end leaves with all others."""
    notebook.outbox.mark_running("cell", range(3))
    for rank in range(3):
        assert notebook.batches == []
        notebook.outbox.add(rank, "cell", Done("ok", 0.1))
        await few_turns()
    (batch,) = notebook.batches
    assert [rank for rank, _, _ in batch.items] == [0, 1, 2]


async def test_outputs_of_an_ended_world_are_dropped(notebook: Reader) -> None:
    """After `clear` old outputs are not sent, and the next cell's end waits for no old rank."""
    notebook.outbox.mark_running("cell", range(3))
    notebook.say("old")
    notebook.outbox.clear()
    notebook.outbox.mark_running("cell", [0])
    notebook.outbox.add(0, "cell", Done("ok", 0.1))
    await few_turns()
    assert [output for _, _, output in notebook.items] == [Done("ok", 0.1)]


async def test_slow_notebook_gets_no_more_than_it_takes(notebook: Reader) -> None:
    """Only some batches may be unacknowledged; the next leaves after an acknowledgement."""
    for number in range(BATCHES_UNDER_WAY):
        notebook.say(f"{number}\n")
        await notebook.wait_for(number + 1)
    notebook.say("waits")
    notebook.outbox.add(0, "cell", Done("ok", 0.1))
    await asyncio.sleep(3 * BATCH_SECONDS)  # only time can show that nothing leaves
    assert repr(notebook.outbox) == f"<Outbox 2 items, {BATCHES_UNDER_WAY} batches under way>"
    notebook.outbox.acknowledge()
    await notebook.wait_for(BATCHES_UNDER_WAY + 1)
    assert [output for _, _, output in notebook.items[-2:]] == [
        Text("stdout", "waits"),
        Done("ok", 0.1),
    ]


async def test_equal_outputs_of_ranks_are_sent_once(notebook: Reader) -> None:
    """In a frame, equal text and figures of eight ranks take the space of one rank's outputs."""
    lines, shown, own = "loss 0.1\n" * 1000, "iVBORw0K" * 10000, "0123456789" * 1000
    for rank in range(8):  # each rank's messages have texts of their own
        notebook.say(lines.encode().decode(), rank)
        notebook.outbox.add(rank, "cell", figure(shown.encode().decode()))
        notebook.say(f"{rank}{own}", rank, "stderr")
    await notebook.wait_for(1)
    (batch,) = notebook.batches
    frame = pack(batch)
    once = len(lines) + len(shown)
    assert once + 8 * len(own) < len(frame) < 1.1 * (once + 8 * len(own))
    assert unpack(frame) == batch
    of_one = Text("stdout", lines), figure(shown)
    assert [*batch.items] == [
        (rank, "cell", each)
        for rank in range(8)
        for each in (*of_one, Text("stderr", f"{rank}{own}"))
    ]

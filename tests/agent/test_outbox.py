"""Tests of `nbdist.agent.outbox`: batches on a real event loop, bounded when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nbdist.agent.backlog import SHOWN_KEPT, TEXT_KEPT
from nbdist.agent.outbox import BATCH_SECONDS, BATCHES_UNDER_WAY, Outbox
from nbdist.output.events import Display, Done, Failure, Output, Skipped, Text, Update
from nbdist.wire.messages import Outputs, to_bytes, up_from
from tests.waiting import until


class Notebook:
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

    async def fill(self) -> None:
        """Have as many batches under way as may be."""
        for number in range(BATCHES_UNDER_WAY):
            self.say(f"{number}\n")
            await self.wait_for(number + 1)

    async def read_all(self) -> None:
        """Acknowledge until nothing more comes."""
        acknowledged = 0
        while acknowledged < len(self.batches):
            self.outbox.acknowledge()
            acknowledged += 1
            await until(
                lambda so_far=acknowledged: (
                    "<Outbox 0 items" in repr(self.outbox) or len(self.batches) > so_far
                )
            )


def another(text: str) -> str:
    """Give an equal text that is another object, as each rank's messages have their own."""
    return text.encode().decode()


def run(test: Callable[[Notebook], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(Notebook())

    asyncio.run(main())


def test_outputs_are_batched():
    """What is said within a moment leaves together, text of one rank as one piece."""

    async def test(notebook: Notebook) -> None:
        for number in range(100):
            notebook.say(f"{number}\n")
        assert notebook.batches == []
        await notebook.wait_for(1)
        assert notebook.items() == [
            (0, "cell", Text("stdout", "".join(f"{number}\n" for number in range(100))))
        ]

    run(test)


def test_order_of_each_rank_is_kept():
    """Streams, displays and ranks are never put together across one another."""

    async def test(notebook: Notebook) -> None:
        notebook.say("a")
        notebook.say("b", stream="stderr")
        notebook.say("c", rank=1)
        notebook.outbox.add(0, "cell", Display({"text/plain": "1"}, {}))
        notebook.say("d")
        notebook.outbox.add(0, "other cell", Text("stdout", "e"))
        await notebook.wait_for(1)
        assert notebook.items() == [
            (0, "cell", Text("stdout", "a")),
            (0, "cell", Text("stderr", "b")),
            (1, "cell", Text("stdout", "c")),
            (0, "cell", Display({"text/plain": "1"}, {})),
            (0, "cell", Text("stdout", "d")),
            (0, "other cell", Text("stdout", "e")),
        ]

    run(test)


@pytest.mark.parametrize("last", [Done("ok", 0.1), Failure("ValueError", "", (), 1)])
def test_ends_and_failures_do_not_wait(last: Output):
    """The end of a cell leaves at once, with what came before it."""

    async def test(notebook: Notebook) -> None:
        notebook.say("last words")
        notebook.outbox.add(0, "cell", last)
        for _ in range(3):  # turns of the loop, no time
            await asyncio.sleep(0)
        assert [output for _, _, output in notebook.items()] == [Text("stdout", "last words"), last]

    run(test)


def test_ends_of_all_ranks_leave_together():
    """While others still run a rank's end can wait; the last one takes them all along."""

    async def test(notebook: Notebook) -> None:
        notebook.outbox.begin(range(3))
        for rank in range(3):
            assert notebook.batches == []
            notebook.outbox.add(rank, "cell", Done("ok", 0.1))
            for _ in range(3):  # turns of the loop, no time
                await asyncio.sleep(0)
        (batch,) = notebook.batches
        assert [rank for rank, _, _ in batch.items] == [0, 1, 2]

    run(test)


def test_end_of_one_rank_is_told_while_others_run():
    """It waits for a batch's time, not for the others."""

    async def test(notebook: Notebook) -> None:
        notebook.outbox.begin(range(2))
        notebook.outbox.add(1, "cell", Done("ok", 0.1))
        await notebook.wait_for(1)
        assert notebook.items() == [(1, "cell", Done("ok", 0.1))]

    run(test)


def test_slow_notebook_gets_no_more_than_it_takes():
    """Only some batches may be under way; the next leaves with an acknowledgement."""

    async def test(notebook: Notebook) -> None:
        await notebook.fill()
        notebook.say("waits")
        notebook.outbox.add(0, "cell", Done("ok", 0.1))
        await asyncio.sleep(3 * BATCH_SECONDS)  # that nothing happens has no other proof
        assert len(notebook.batches) == BATCHES_UNDER_WAY
        assert repr(notebook.outbox) == f"<Outbox 2 items, {BATCHES_UNDER_WAY} batches under way>"
        notebook.outbox.acknowledge()
        await notebook.wait_for(BATCHES_UNDER_WAY + 1)
        assert notebook.text().endswith("waits")
        assert isinstance(notebook.items()[-1][2], Done)

    run(test)


def test_too_much_for_a_slow_notebook_is_skipped():
    """Of more text than is kept, the older is left out and counted; no character is lost."""

    async def test(notebook: Notebook) -> None:
        await notebook.fill()
        line = "x" * 999 + "\n"
        lines = 3 * TEXT_KEPT // len(line)
        for _ in range(lines):
            notebook.say(line)
        notebook.say("end")
        notebook.say("of another rank", rank=1)
        await notebook.read_all()
        skipped = [output for _, _, output in notebook.items() if isinstance(output, Skipped)]
        assert skipped
        shown = len(notebook.text()) - 2 * BATCHES_UNDER_WAY
        assert shown < TEXT_KEPT + len(line)
        assert sum(each.characters for each in skipped) + shown == lines * len(line) + len("end")
        newlines = notebook.text().count("\n") - BATCHES_UNDER_WAY
        assert sum(each.lines for each in skipped) + newlines == lines
        assert notebook.text().endswith("end")
        assert notebook.text(rank=1) == "of another rank"

    run(test)


def test_too_many_displays_for_a_slow_notebook_are_left_out():
    """The older ones, which are counted in their place; the end of the cell comes."""

    async def test(notebook: Notebook) -> None:
        await notebook.fill()
        page, number = "<p>" * 300_000, 3 * SHOWN_KEPT // 900_000
        for _ in range(number):
            notebook.outbox.add(0, "cell", Display({"text/html": page}, {}))
        notebook.outbox.add(0, "cell", Done("ok", 0.1))
        await notebook.read_all()
        skipped = [output for _, _, output in notebook.items() if isinstance(output, Skipped)]
        shown = sum(isinstance(output, Display) for _, _, output in notebook.items())
        assert SHOWN_KEPT // 2 < shown * len(page) < SHOWN_KEPT
        assert shown + sum(each.displays for each in skipped) == number
        assert isinstance(notebook.items()[-1][2], Done)

    run(test)


def test_displays_are_not_skipped_with_text():
    """Figures and ends stay where they were among skipped text."""

    async def test(notebook: Notebook) -> None:
        await notebook.fill()
        for number in range(5):
            notebook.say("x" * (TEXT_KEPT // 2))
            notebook.outbox.add(0, "cell", Display({"text/plain": str(number)}, {}))
        await notebook.read_all()
        shown = [
            output.data["text/plain"]
            for _, _, output in notebook.items()
            if isinstance(output, Display)
        ]
        assert shown == ["0", "1", "2", "3", "4"]

    run(test)


def test_what_ranks_show_alike_is_sent_once():
    """Equal lines and figures of eight ranks take the room of one rank's; others take theirs."""
    lines, figure, own = "loss 0.1\n" * 1000, "iVBORw0K" * 10000, "0123456789" * 1000

    async def test(notebook: Notebook) -> None:
        for rank in range(8):
            notebook.say(another(lines), rank)
            notebook.outbox.add(rank, "cell", Display({"image/png": another(figure)}, {}))
            notebook.say(f"{rank}{own}", rank, "stderr")
        await notebook.wait_for(1)
        (batch,) = notebook.batches
        frame = to_bytes(batch)
        once = len(lines) + len(figure)
        assert once + 8 * len(own) < len(frame) < 1.1 * (once + 8 * len(own))
        assert up_from(frame) == batch
        assert [rank for rank, _, _ in batch.items] == [rank for rank in range(8) for _ in range(3)]
        assert notebook.text(3) == f"{lines}3{own}"

    run(test)


def test_only_the_last_update_is_sent():
    """Of several updates of one display that wait together, the last one is sent."""

    async def test(notebook: Notebook) -> None:
        for number in range(10):
            notebook.outbox.add(0, "cell", Update({"text/plain": str(number)}, {}, "bar"))
            notebook.outbox.add(1, "cell", Update({"text/plain": str(number)}, {}, "bar"))
        notebook.outbox.add(0, "cell", Update({"text/plain": "other"}, {}, "other"))
        await notebook.wait_for(1)
        assert notebook.items() == [
            (0, "cell", Update({"text/plain": "9"}, {}, "bar")),
            (1, "cell", Update({"text/plain": "9"}, {}, "bar")),
            (0, "cell", Update({"text/plain": "other"}, {}, "other")),
        ]

    run(test)

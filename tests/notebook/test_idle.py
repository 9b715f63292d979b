"""Tests of `nbdist.notebook.idle`: between cells the notebook's event loop learns of news."""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nbdist.notebook.display import PanelDisplay, PlainDisplay
from nbdist.notebook.idle import MOST_CHARACTERS, PAUSE, Ended, IdleWatch, late_texts
from nbdist.output.events import Display, Done, Failure, Skipped, Text, Update
from nbdist.output.transcript import Transcript


@dataclass
class Pipe:
    """As much of a link as is watched: where it writes a byte for each piece of news."""

    asides: int
    end: int
    tells_all: bool = False


@pytest.fixture
def link() -> Iterator[Any]:
    pipe = Pipe(*os.pipe2(os.O_NONBLOCK))
    yield pipe
    for each in (pipe.asides, pipe.end):
        if each >= 0:
            os.close(each)


def close_end(link: Any) -> None:
    os.close(link.end)
    link.end = -1


def test_many_bytes_are_one_notice(link: Any):
    """A rank may talk without end: the second notice waits.  The end is noticed once."""
    noticed: list[float] = []

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def notice() -> None:
            noticed.append(loop.time())
            if repr(watch) == "<IdleWatch of None>":
                ended.set()

        watch = IdleWatch(notice)
        watch.follow(link)
        while len(noticed) < 2:
            os.write(link.end, b"x")
            await asyncio.sleep(0.01)
        close_end(link)
        await ended.wait()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed[1] - noticed[0] >= PAUSE


def test_what_is_watched_no_more(link: Any):
    """Nothing is called after `stop`, and no descriptor is left."""
    before = os.listdir("/proc/self/fd")

    async def main() -> None:
        watch = IdleWatch(lambda: pytest.fail("noticed"))
        watch.follow(link)
        watch.follow(link)
        watch.stop()
        os.write(link.end, b"x")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert os.listdir("/proc/self/fd") == before


def test_what_goes_on(link: Any):
    """It is called again and again, at once where there is news, until it goes on no more."""
    noticed: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        third = asyncio.Event()

        def notice() -> None:
            noticed.append(loop.time())
            if len(noticed) == 3:
                third.set()

        watch = IdleWatch(notice)
        watch.follow(link)
        watch.goes_on = True
        assert link.tells_all
        await third.wait()
        os.write(link.end, b"x")
        await asyncio.sleep(0.01)
        assert len(noticed) == 4
        watch.goes_on = False
        assert not link.tells_all
        await asyncio.sleep(2.5 * PAUSE)
        watch.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed[2] - noticed[0] >= 2 * PAUSE
    assert len(noticed) <= 5


def out(text: str) -> Text:
    return Text("stdout", text)


def ended(*ranks: int) -> Transcript:
    transcript = Transcript(ranks)
    for rank in ranks:
        transcript.receive(rank, Display({"text/plain": "first"}, {}, f"of {rank}"), 1.0)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The texts of what was displayed: without a shell IPython prints it."""
    bundles = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    return [bundle["text/plain"] for bundle in bundles]


@pytest.fixture
def cells() -> Ended:
    """Two cells that have ended, of ranks 0-1 and of rank 1."""
    cells = Ended()
    for transcript in (ended(0, 1), ended(1)):
        cells.add(transcript, PanelDisplay())
    return cells


def test_below_the_last_cell(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank says stands in its last cell, a display in the cell that has it."""
    cells.receive([(0, out("a\n")), (0, out("b\n")), (1, out("c\n")), (1, Done("ok", 1.0))])
    assert shown(capsys) == []
    cells.show({})
    first, second = shown(capsys)
    assert first.endswith("── rank 0 ──\nfirst\na\nb\n── rank 1 ──\nfirst")
    assert second.endswith("── rank 1 ──\nfirst\nc")
    cells.show({})
    assert shown(capsys) == []
    assert cells.take_texts() == []
    transcript = ended(1)
    transcript.receive(1, Display({"text/plain": "old"}, {}, "other"), 1.0)
    cells.add(transcript, PanelDisplay())
    cells.receive([(0, Update({"text/plain": "new"}, {}, "of 0"))])
    cells.show({})
    assert "── rank 0 ──\nnew" in "\n".join(shown(capsys))


def test_not_too_often(cells: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    """While another cell runs a page is not drawn for each line; none is lost."""
    cells.receive([(0, out("a\n"))])
    cells.show({}, at_once=False)
    cells.receive([(0, out("b\n"))])
    cells.show({}, at_once=False)
    assert len(shown(capsys)) == 1
    cells.show({})
    (text,) = shown(capsys)
    assert "first\na\nb" in text


def test_what_belongs_to_no_cell(cells: Ended) -> None:
    """It is said with the next one, once; so is what lines that are printed cannot take in."""
    cells.receive([(2, out("bye\n")), (3, out("bye\n"))])
    assert cells.take_texts() == ["ranks 2-3 printed after their last cell: bye"]
    assert cells.take_texts() == []
    cells.receive([(2, out("bye\n"))])
    cells.forget()
    assert cells.take_texts() == []
    cells = Ended()
    cells.add(ended(0), PlainDisplay())
    cells.receive([(0, out("bye\n"))])
    assert cells.take_texts() == ["rank 0 printed after its last cell: bye"]


def test_texts(cells: Ended) -> None:
    """One line for all that said the same, not too long; cells before are known."""
    failure = Failure("E", "bad", ("\x1b[31mE\x1b[0m: bad",), 1)
    late = [
        (0, out("a\n\n  b")),
        (1, Display({"text/plain": "a"}, {})),
        (1, out("b\n")),
        (2, failure),
        (3, Skipped(9, 3)),
        (4, out("x" * (MOST_CHARACTERS + 1000))),
    ]
    *short, long = late_texts(late)
    assert short == [
        "ranks 0-1 printed after their last cell: a / b",
        "rank 2 printed after its last cell: E: bad",
    ]
    assert long.endswith("x … 1,000 more characters")
    last = ended(0)
    before = cells.past(last)
    assert len(before) == 3
    assert before[-1] is last
    cells.forget()
    assert cells.past(before[1]) == before[:2]

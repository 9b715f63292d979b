"""Tests of `nbdist.notebook.idle`: between cells the notebook's event loop learns of news."""

from __future__ import annotations

import ast
import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import ipykernel
import pytest

from nbdist.notebook.display import PanelDisplay, PlainDisplay
from nbdist.notebook.idle import MOST_CHARACTERS, PAUSE, Ended, IdleWatch, late_texts
from nbdist.output.events import Display, Done, Failure, Skipped, Text, Update
from nbdist.output.transcript import Transcript
from tests.notebook.front_end import Notebook
from tests.waiting import SOON


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
    """A rank may talk without end: the second notice waits."""
    noticed: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = IdleWatch(lambda: noticed.append(loop.time()))
        watch.follow(link)
        while len(noticed) < 2:
            os.write(link.end, b"x")
            await asyncio.sleep(0.01)
        watch.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed[1] - noticed[0] >= PAUSE


def test_the_end_is_noticed_once(link: Any):
    """When the link is closed, it is watched no more."""
    noticed: list[str] = []

    async def main() -> None:
        ended = asyncio.Event()

        def notice() -> None:
            noticed.append(repr(watch))
            ended.set()

        watch = IdleWatch(notice)
        watch.follow(link)
        close_end(link)
        await ended.wait()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed == ["<IdleWatch of None>"]


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


pytestmark = pytest.mark.shared_world

HAS_SUBSHELLS = int(ipykernel.__version__.partition(".")[0]) >= 7


class Subshell:
    """A console of JupyterLab's that was opened as a subshell."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        request = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(request)
        reply = self._client.get_control_msg(timeout=SOON)
        self._id = reply["content"]["subshell_id"]

    def run(self, code: str) -> str:
        """What it shows, or the error that it raises."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        request = self._client.session.msg("execute_request", {**content, "user_expressions": {}})
        request["header"]["subshell_id"] = self._id
        self._client.shell_channel.send(request)
        shown, deadline = [], time.monotonic() + SOON
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
                continue
            match message["content"]:
                case {"data": {"text/plain": text}}:
                    shown.append(text)
                case {"evalue": text}:
                    shown.append(text)
                case {"execution_state": "idle"}:
                    return "\n".join(shown)
        raise AssertionError(f"not done after {SOON} s: {code}")


def matches(notebook: Notebook, code: str) -> list[str]:
    """What a front end offers to complete it with."""
    return list(notebook.reply_to(notebook.client.complete(code))["matches"])


@pytest.mark.skipif(not HAS_SUBSHELLS, reason="ipykernel 6 has no subshells")
def test_beside_a_cell(kernel: Notebook, tmp_path: Path) -> None:
    """Status and stacks answer, others are refused; the cell's own output is whole."""
    gate = tmp_path / "gate"
    assert kernel.run("%dist_init -n 2").errors == []
    subshell = Subshell(kernel)
    lines = "".join(f"{number}\n" for number in range(300))
    cell = (
        "%%distributed\nimport os, time\nnumber = 0\n"
        f"while number < 300 or not os.path.exists({str(gate)!r}):\n"
        "    if number < 300: print(number)\n"
        "    number += 1; time.sleep(0.002)"
    )
    kernel.client.execute(cell)
    said = ""
    while "busy" not in said or "line " not in said:
        said = subshell.run("%dist_status")
    assert said.startswith("2 workers on ")
    assert " · running a cell" in said.splitlines()[0]
    for _ in range(30):
        assert "running a cell\n── rank" in subshell.run("%dist_stack")
    assert "no lines" in subshell.run("%dist_log") or "files: " in subshell.run("%dist_log")
    refused = subshell.run("%dist_memory")
    assert refused.startswith("`%dist_memory` cannot run in a subshell")
    assert "`%dist_stack`, `%dist_status`" in refused
    assert subshell.run("%%distributed\n1").startswith("`%%distributed` cannot run")
    # That cells have ended beside it does not make who types wait for it.
    assert "number" in matches(kernel, "%%distributed\nnumb")
    gate.touch()
    again = kernel.run("%dist_output --all")
    # All that arrived while the others looked is the cell's.
    assert lines in again.text

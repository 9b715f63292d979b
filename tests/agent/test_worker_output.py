"""Tests of `nbdist.agent.worker_output`: one order for text on real pipes and numbered messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nbdist.agent.worker_output import LOST_AFTER, Merger, OutputPipe, WorkerLog, WorkerOutput
from nbdist.output.events import Clear, Done, Output, Text
from nbdist.wire.work import Finished, mark
from tests.waiting import until

TOKEN = "0123456789abcdef"


def joined(items: list[Text | str]) -> list[Text | str]:
    """The same items, neighbouring text of one stream put together."""
    found: list[Text | str] = []
    for item in items:
        match item, found[-1:]:
            case Text(stream, text), [Text(before, start)] if stream == before:
                found[-1] = Text(stream, start + text)
            case _:
                found.append(item)
    return found


def fed(*reads: bytes, messages: tuple[int, ...] = ()) -> list[Text | str]:
    """What comes out after these reads of stdout, and messages that arrived before."""
    merger: Merger[str] = Merger(TOKEN)
    for number in messages:
        merger.receive_message(number, f"<{number}>", now=0.0)
    items: list[Text | str] = []
    for read in reads:
        merger.receive_stdout(read, now=0.0)
        items += merger.take(now=0.0)
    return joined(items)


STREAM = (
    "first é\n".encode()
    + mark(TOKEN, 1)
    + "€ second\n".encode()
    + mark(TOKEN, "stderr")
    + "err 😀".encode()
    + mark(TOKEN, "stdout")
    + b"\x1b[31mred\x1b[0m"
    + mark(TOKEN, 2)
    + mark(TOKEN, 3)
    + b"end\x1b"
)
EXPECTED = [
    Text("stdout", "first é\n"),
    "<1>",
    Text("stdout", "€ second\n"),
    Text("stderr", "err 😀"),
    Text("stdout", "\x1b[31mred\x1b[0m"),
    "<2>",
    "<3>",
    Text("stdout", "end"),  # the escape may begin a mark
]


def test_messages_are_where_their_marks_are():
    """Text and messages come out in the order in which the worker said them."""
    assert fed(STREAM, messages=(1, 2, 3)) == EXPECTED


def test_reads_end_anywhere():
    """A read that ends within a mark or a character changes nothing."""
    for cut in range(1, len(STREAM)):
        assert fed(STREAM[:cut], STREAM[cut:], messages=(1, 2, 3)) == EXPECTED, cut


def test_text_is_not_held_back():
    """Text that ends like the start of another escape sequence comes out at once."""
    assert fed(b"prompt> ") == [Text("stdout", "prompt> ")]
    assert fed(b"\x1b[3") == [Text("stdout", "\x1b[3")]


def test_what_began_like_a_mark_and_is_none_comes_out():
    """A torn mark of some child process is text, after at most one more read."""
    torn = b"\x1b_" + TOKEN.encode() + b";" + b"7" * 100
    assert fed(torn, b" text") == [Text("stdout", torn.decode() + " text")]
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(mark(TOKEN, 1)[:-1], now=0.0)
    assert merger.take(now=0.0) == []
    assert merger.take_all() == [Text("stdout", mark(TOKEN, 1)[:-1].decode())]


def test_message_that_comes_later_holds_back_what_follows():
    """Text after a mark waits for the mark's message."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(b"a" + mark(TOKEN, 1) + b"b", now=0.0)
    assert merger.take(now=0.0) == [Text("stdout", "a")]
    assert merger.is_waiting
    merger.receive_message(1, "<1>", now=0.0)
    assert merger.take(now=0.1) == ["<1>", Text("stdout", "b")]
    assert not merger.is_waiting


def test_stderr_of_its_own_pipe_waits_for_no_message():
    """What came by that pipe is there before the message, which may be the end of the cell."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(b"a" + mark(TOKEN, 1) + b"b", now=0.0)
    merger.receive_stderr(b"e")
    merger.receive_message(1, "<1>", now=0.0)
    text = [Text("stdout", "a"), Text("stderr", "e")]
    assert merger.take(now=0.1) == [*text, "<1>", Text("stdout", "b")]


def test_message_without_a_mark_waits_for_it():
    """A message never comes out before the text that was printed before it."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_message(1, "<1>", now=0.0)
    assert merger.take(now=0.0) == []
    merger.receive_stdout(b"a" + mark(TOKEN, 1), now=0.0)
    assert merger.take(now=0.0) == [Text("stdout", "a"), "<1>"]


def test_lost_message_is_waited_for_some_seconds():
    """What follows a message that never comes is shown after a while."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(mark(TOKEN, 1) + b"after", now=10.0)
    assert merger.take(now=10.0 + LOST_AFTER - 0.1) == []
    assert merger.is_waiting
    assert merger.take(now=10.0 + LOST_AFTER) == [Text("stdout", "after")]


def test_slow_messages_are_not_lost():
    """As long as messages come in their turn the next one is waited for, however many there are."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(mark(TOKEN, 1) + mark(TOKEN, 2) + mark(TOKEN, 3), now=0.0)
    merger.receive_message(1, "<1>", now=0.0)
    assert merger.take(now=LOST_AFTER - 1) == ["<1>"]
    merger.receive_message(3, "<3>", now=0.0)
    assert merger.take(now=LOST_AFTER + 1) == []
    merger.receive_message(2, "<2>", now=0.0)
    assert merger.take(now=LOST_AFTER + 2) == ["<2>", "<3>"]
    assert not merger.is_waiting


def test_end_of_the_worker():
    """When a worker has died, all that is there comes out, messages without marks last."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(b"a" + mark(TOKEN, 1) + b"b\xe2", now=0.0)
    merger.receive_message(9, "<9>", now=0.0)
    merger.receive_message(8, "<8>", now=0.0)
    assert merger.take_all() == [
        Text("stdout", "a"),
        Text("stdout", "b"),
        Text("stdout", "\ufffd"),
        "<8>",
        "<9>",
    ]


def test_stderr_by_its_own_pipe():
    """What C code writes to descriptor 2 is stderr, wherever stdout is just then."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(b"out", now=0.0)
    merger.receive_stderr(b"err \xf0\x9f")
    merger.receive_stderr(b"\x98\x80")
    assert joined(merger.take(now=0.0)) == [Text("stdout", "out"), Text("stderr", "err 😀")]


def test_invalid_utf8():
    """Bytes that are no UTF-8 become replacement characters, also at the end of a read."""
    assert fed(b"a\xff", b"\xfeb") == [Text("stdout", "a\ufffd\ufffdb")]
    assert fed(b"\xe2\x82", b"x") == [Text("stdout", "\ufffdx")]


def test_character_torn_by_another_stream():
    """Each stream has its own half characters."""
    read = b"\xe2" + mark(TOKEN, "stderr") + b"\xc3" + mark(TOKEN, "stdout") + b"\x82\xac"
    assert fed(read) == [Text("stdout", "€")]
    read += mark(TOKEN, "stderr") + b"\xa9"
    assert fed(read) == [Text("stdout", "€"), Text("stderr", "é")]


def test_cut_off_characters_end_with_their_cell():
    """Half a character at the end of a cell does not change what the next cell says."""
    merger: Merger[str] = Merger(TOKEN)
    merger.receive_stdout(b"a\xe2\x82", now=0.0)
    merger.receive_stderr(b"\xe2")
    assert merger.take(now=0.0) == [Text("stdout", "a")]
    assert merger.take_cut_off() == [Text("stdout", "\ufffd"), Text("stderr", "\ufffd")]
    assert merger.take_cut_off() == []
    merger.receive_stdout(b"next", now=0.0)
    assert merger.take(now=0.0) == [Text("stdout", "next")]


# --- pipes --------------------------------------------------------------------------------


@pytest.mark.world
async def test_all_that_a_process_writes() -> None:
    """It arrives in order, and at its end nothing more."""
    found: list[bytes] = []
    pipe = OutputPipe(found.append)
    command = ["sh", "-c", "yes hello | head -n 100000; echo bye"]
    with subprocess.Popen(command, stdout=pipe.write_end):  # noqa: ASYNC220 (it is the writer)
        os.close(pipe.write_end)
        await until(lambda: b"bye" in found[-1] if found else False)
    assert not pipe.read()
    pipe.close()
    assert b"".join(found) == b"hello\n" * 100_000 + b"bye\n"


@pytest.mark.world
async def test_what_is_there_when_a_process_has_ended() -> None:
    """It is read at once, without waiting for the loop; what comes after the close is lost."""
    found: list[bytes] = []
    pipe = OutputPipe(found.append)
    subprocess.run(["echo", "last words"], stdout=pipe.write_end, check=True)  # noqa: ASYNC221
    pipe.drain()
    pipe.close()
    pipe.close()
    assert not pipe.read()
    os.close(pipe.write_end)
    assert found == [b"last words\n"]


async def test_what_a_worker_says_is_handed_on_in_order(tmp_path: Path) -> None:
    """Its text is in the log file by then; half a character ends with its cell."""
    found: list[Output | Finished] = []
    end = Finished(2, "task", Done("ok", 0.1))
    output = WorkerOutput(TOKEN, WorkerLog(tmp_path), found.append)
    stdout, stderr = output.write_ends
    output.receive(1, Clear(wait=False))
    os.write(stdout, mark(TOKEN, "up") + b"a" + mark(TOKEN, 1) + b"b\xe2" + mark(TOKEN, 2))
    os.write(stderr, b"e")
    output.place(end)
    output.close_write_ends()
    output.close()
    cut_off = Text("stdout", "\ufffd")
    text = [Text("stdout", "b"), Text("stderr", "e"), cut_off]
    assert found == [Text("stdout", "a"), Clear(wait=False), *text, end]
    assert (output.up.is_set(), output.ready.is_set()) == (True, False)
    assert output.last_lines == ("abe\ufffd",)
    assert (tmp_path / "stdout.log").read_text() == "ab\ufffd"


async def test_the_last_line(tmp_path: Path) -> None:
    """Whole, however it was read; of a bar its last state; nothing of empty lines."""
    bar, long = ("\r10%|#", "\r20%|##"), "x" * 100_000
    output = WorkerOutput(TOKEN, WorkerLog(tmp_path), lambda item: None)
    seen = [output.last_line]
    for texts in (("first\n", "lo", "ss", " 0.5\n", "\n \n"), bar, ("\n", long)):
        for text in texts:
            output.pass_on(Text("stdout", text))
        seen.append(output.last_line)
    output.close_write_ends()
    output.close()
    *seen, last = seen
    assert seen == ["", "loss 0.5", "20%|##"]
    assert 0 < len(last) < len(long)

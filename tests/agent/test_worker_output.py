"""Tests of `nbdist.agent.worker_output`: one order for text on real pipes and numbered messages.

Also the log files of a rank, even on a full disk.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from nbdist.agent import worker_output
from nbdist.agent.worker_output import LOST_AFTER, Merger, OutputPipe, RunFolder, WorkerLog
from nbdist.output.events import Clear, Done, Output, Text
from nbdist.wire.log_files import GetLogs, last_lines, read_logs
from nbdist.wire.work import Finished, mark
from tests.waiting import until

TOKEN = "0123456789abcdef"


def joined(items: list[Text | str]) -> list[Text | str]:
    """Return the items, with neighbouring text of a stream joined."""
    found: list[Text | str] = []
    for item in items:
        match item, found[-1:]:
            case Text(stream, text), [Text(before, start)] if stream == before:
                found[-1] = Text(stream, start + text)
            case _:
                found.append(item)
    return found


def fed(*reads: bytes, messages: tuple[int, ...] = ()) -> list[Text | str]:
    """Return the items of a merger that gets `messages` and then `reads` of stdout."""
    merger: Merger[str] = Merger(TOKEN)
    for number in messages:
        merger.receive_message(number, f"<{number}>", now=0.0)
    items: list[Text | str] = []
    for read in reads:
        merger.receive_stdout(read, now=0.0)
        items += merger.pop_ready(now=0.0)
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


def test_messages_are_where_their_marks_are() -> None:
    """Messages come out in the worker's order, even if a read ends within a mark."""
    assert fed(STREAM, messages=(1, 2, 3)) == EXPECTED
    for cut in range(1, len(STREAM)):
        assert fed(STREAM[:cut], STREAM[cut:], messages=(1, 2, 3)) == EXPECTED, cut
    # A torn mark becomes text after at most one more read; other text comes out at once.
    assert fed(b"prompt> ") == [Text("stdout", "prompt> ")]
    assert fed(b"\x1b[3") == [Text("stdout", "\x1b[3")]
    torn = b"\x1b_" + TOKEN.encode() + b";" + b"7" * 100
    assert fed(torn, b" text") == [Text("stdout", torn.decode() + " text")]


@pytest.fixture
def merger() -> Merger[str]:
    return Merger(TOKEN)


def test_a_message_and_its_mark_wait_for_one_another(merger: Merger[str]) -> None:
    """Text of stdout behind a mark waits for the mark's message, and the message for the mark.

    Text of the stderr pipe does not wait, since the message may be the end of the cell.
    """
    merger.receive_stdout(b"a" + mark(TOKEN, 1) + b"b", now=0.0)
    assert merger.pop_ready(now=0.0) == [Text("stdout", "a")]
    assert merger.queue
    merger.receive_stderr(b"e")
    merger.receive_message(1, "<1>", now=0.0)
    assert merger.pop_ready(now=0.1) == [Text("stderr", "e"), "<1>", Text("stdout", "b")]
    assert not merger.queue
    merger.receive_message(2, "<2>", now=0.2)
    assert merger.pop_ready(now=0.2) == []
    merger.receive_stdout(b"c" + mark(TOKEN, 2), now=0.2)
    assert merger.pop_ready(now=0.2) == [Text("stdout", "c"), "<2>"]


def test_lost_message_is_waited_for_some_seconds(merger: Merger[str]) -> None:
    """The wait for a lost message ends LOST_AFTER seconds after the last message in its turn."""
    merger.receive_stdout(mark(TOKEN, 1) + mark(TOKEN, 2) + b"2" + mark(TOKEN, 3), now=0.0)
    merger.receive_message(1, "<1>", now=0.0)
    assert merger.pop_ready(now=LOST_AFTER - 1) == ["<1>"]
    merger.receive_message(3, "<3>", now=0.0)
    assert merger.pop_ready(now=LOST_AFTER + 1) == []
    merger.receive_message(2, "<2>", now=0.0)
    assert merger.pop_ready(now=LOST_AFTER + 2) == ["<2>", Text("stdout", "2"), "<3>"]
    merger.receive_stdout(mark(TOKEN, 4) + b"after", now=20.0)
    assert merger.pop_ready(now=20.0 + LOST_AFTER - 0.1) == []
    assert merger.queue
    assert merger.pop_ready(now=20.0 + LOST_AFTER) == [Text("stdout", "after")]


def test_a_dead_worker_leaves_nothing_unread(merger: Merger[str]) -> None:
    """When a worker has died, all its text comes out, and messages without marks come last."""
    torn = mark(TOKEN, 2)[:-1]
    merger.receive_stdout(b"a" + mark(TOKEN, 1) + b"b" + torn, now=0.0)
    merger.receive_stderr(b"\xe2")
    for number in (9, 8):
        merger.receive_message(number, f"<{number}>", now=0.0)
    text = [Text("stdout", f"ab{torn.decode()}"), Text("stderr", "\ufffd")]
    assert joined(merger.pop_all()) == [*text, "<8>", "<9>"]


def test_each_stream_completes_its_own_characters(merger: Merger[str]) -> None:
    """Each stream completes its own characters; invalid UTF-8 and half characters are replaced."""
    assert fed(b"a\xff", b"\xfeb") == [Text("stdout", "a\ufffd\ufffdb")]
    assert fed(b"\xe2\x82", b"x") == [Text("stdout", "\ufffdx")]
    read = b"\xe2" + mark(TOKEN, "stderr") + b"\xc3" + mark(TOKEN, "stdout") + b"\x82\xac"
    read += mark(TOKEN, "stderr") + b"\xa9"
    assert fed(read) == [Text("stdout", "€"), Text("stderr", "é")]
    merger.receive_stdout(b"out\xe2\x82", now=0.0)
    merger.receive_stderr(b"err \xf0\x9f")
    merger.receive_stderr(b"\x98\x80\xe2")
    assert joined(merger.pop_ready(now=0.0)) == [Text("stdout", "out"), Text("stderr", "err 😀")]
    assert merger.pop_incomplete_text() == [Text("stdout", "\ufffd"), Text("stderr", "\ufffd")]
    assert merger.pop_incomplete_text() == []
    merger.receive_stdout(b"next", now=0.0)
    assert merger.pop_ready(now=0.0) == [Text("stdout", "next")]


# --- pipes --------------------------------------------------------------------------------


@pytest.mark.world
async def test_a_pipe_keeps_the_order_of_text() -> None:
    """Text arrives in order, the last of it when the process has ended, and none after `close`."""
    found: list[bytes] = []
    pipe = OutputPipe(found.append)
    command = ["sh", "-c", "yes hello | head -n 100000; echo bye"]
    with subprocess.Popen(command, stdout=pipe.write_end):  # noqa: ASYNC220 (it is the writer)
        await until(lambda: b"bye" in found[-1] if found else False)
    subprocess.run(["echo", "last words"], stdout=pipe.write_end, check=True)  # noqa: ASYNC221
    while pipe.read():
        pass
    pipe.close()
    pipe.close()
    assert not pipe.read()
    os.close(pipe.write_end)
    assert b"".join(found) == b"hello\n" * 100_000 + b"bye\nlast words\n"


async def test_outputs_of_a_worker_keep_their_order(tmp_path: Path) -> None:
    """Outputs keep their order, text is logged, and a task's end cuts off half a character."""
    found: list[Output | Finished] = []
    end = Finished(2, "task", Done("ok", 0.1))
    output = worker_output.WorkerOutput(TOKEN, WorkerLog(tmp_path), found.append)
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


async def test_the_last_line_is_whole_and_not_blank(tmp_path: Path) -> None:
    """The last line is whole, not blank, and of limited length; a bar gives its last state."""
    bar, long = ("\r10%|#", "\r20%|##"), "x" * 100_000
    output = worker_output.WorkerOutput(TOKEN, WorkerLog(tmp_path), lambda item: None)
    seen = [output.last_line]
    for texts in (("first\n", "lo", "ss", " 0.5\n", "\n \n"), bar, ("\n", long)):
        for text in texts:
            output.emit(Text("stdout", text))
        seen.append(output.last_line)
    output.close_write_ends()
    output.close()
    *seen, last = seen
    assert seen == ["", "loss 0.5", "20%|##"]
    assert 0 < len(last) < len(long)


# --- log files ----------------------------------------------------------------------------


def test_streams_have_files_of_their_own(tmp_path: Path) -> None:
    """Any text is readable at once, in a file for each stream, and follows earlier text."""
    folder = tmp_path / "a" / "0"
    for part in ("first\n", "é\udc80\x1b[31m\n"):
        log = WorkerLog(folder)
        log.write("stdout", part)
        log.write("stderr", "err\n")
        written = part.encode(errors="surrogatepass")
        assert (folder / "stdout.log").read_bytes().endswith(written)
        log.close()
    assert (folder / "stdout.log").read_bytes() == b"first\n\xc3\xa9\xed\xb2\x80\x1b[31m\n"
    assert (folder / "stderr.log").read_text() == "err\nerr\n"
    none = WorkerLog(None)
    none.write("stdout", "x")
    none.close()


@pytest.mark.parametrize("size", [1, 100_000])
def test_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """A full disk gives one warning; later text is dropped, and the log counts as cut."""
    folder = tmp_path / "attempt_0" / "1"
    log = WorkerLog(folder)
    get = GetLogs((1,), ("stdout",), 5)
    assert not read_logs({1: folder}, get)[0].is_cut
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        for _ in range(3):
            log.write("stdout", "x" * size)
            log.write("stderr", "y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.close()
    (told,) = caplog.messages
    assert "File too large" in told
    assert str(tmp_path) in told
    assert log.folder is None
    assert read_logs({1: folder}, get)[0].is_cut


def test_a_bad_log_folder_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that cannot be made is one warning; a link in place of a file is not followed."""
    (tmp_path / "mine").write_text("mine")
    log = WorkerLog(tmp_path / "mine" / "0")
    log.write("stdout", "x")
    log.close()
    assert log.folder is None
    assert len(caplog.records) == 1
    (tmp_path / "stdout.log").symlink_to(tmp_path / "mine")
    WorkerLog(tmp_path).write("stdout", "x")
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_newest_lines_are_kept(tmp_path: Path) -> None:
    """Two files keep the newest lines whole, up to a limit; a line without an end is cut."""
    log = WorkerLog(tmp_path / "limit", 100_000)
    lines = [f"line {number} " + "x" * (number % 97) for number in range(9000)]
    text = "\n".join(lines) + "\n"
    for start in range(0, len(text), 1000):
        log.write("stdout", text[start : start + 1000])
    log.close()
    files = [tmp_path / "limit" / name for name in ("stdout.log", "stdout.log.1")]
    assert all(file.stat().st_size < 51_500 for file in files)
    *kept, first = last_lines(files[0], 9999)[0][::-1]
    assert kept == lines[::-1][: len(kept)]
    assert sum(map(len, kept)) > 50_000
    assert first == (
        "[nbdist: what stood before this line was moved to stdout.log.1, in the place of what "
        "had been moved there: NBDIST_LOG_LIMIT allows 0 MiB]"
    )
    for limit in (0, 1 << 20):
        log = WorkerLog(tmp_path / str(limit), limit)
        for _ in range(40):
            log.write("stdout", "\r" * 100_000)
        log.close()
    assert sorted(os.listdir(tmp_path / "0")) == ["stderr.log", "stdout.log"]
    assert all(file.stat().st_size < 1.8 * (1 << 20) for file in (tmp_path / "1048576").iterdir())


# --- old runs -----------------------------------------------------------------------------


def run_of(root: Path, name: str, age: int = 0) -> RunFolder:
    """Make a run with a log of one rank; a higher `age` makes an older run."""
    run = RunFolder(root, name)
    log = WorkerLog(run.new_attempt(0) / "0", 1)
    log.write("stdout", "x\nx\nx\n")
    log.close()
    os.utime(run.path, (10**9 - age, 10**9 - age))
    return run


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which nbdist keeps runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "nbdist"


def test_old_runs_are_dropped(state: Path) -> None:
    """The newest runs are kept, and so is a run in use, whatever its age."""
    in_use = run_of(state, "in use", age=10_000)
    for number in range(worker_output.RUNS_KEPT + 5):
        name = f"exp{number}/run" if number % 2 else f"run{number}"
        run_of(state, name, age=100 - number).close()
    run_of(state, "newest").close()
    assert {entry.name for entry in state.iterdir()} == {
        "in use",
        "newest",
        *(f"exp{n}" if n % 2 else f"run{n}" for n in range(5, worker_output.RUNS_KEPT + 5)),
    }
    in_use.close()
    worker_output.drop_old_runs(state)
    assert not in_use.path.exists()


def test_a_folder_that_the_user_has_named_is_not_cleaned(state: Path) -> None:
    """A folder that the user has named keeps all runs, and gets no hidden file."""
    logs = state / "logs"
    for number in range(worker_output.RUNS_KEPT + 5):
        run_of(logs, f"exp/run{number}", age=number).close()
    assert len([*(logs / "exp").iterdir()]) == worker_output.RUNS_KEPT + 5
    assert not [each for each in logs.rglob("*") if each.name.startswith(".")]


def test_folders_of_the_user_are_not_dropped(state: Path) -> None:
    """Folders of the user stay, and so do runs that the user has filled, copied or renamed."""
    for name in ("notes", "attempt_0", "run", "data/run"):
        (state / name / "attempt_0" / "0").mkdir(parents=True)
        (state / name / "attempt_0" / "0" / "stdout.log").write_text("mine")
    run_of(state, "run", age=1000).close()  # the user's folder has this name
    used, around = run_of(state, "used", age=1000), run_of(state, "around", age=1000)
    (used.path / "model.pt").write_text("mine")
    used.close()
    around.close()
    for name in ("copied", "renamed"):
        run_of(state, name, age=1000).close()
    shutil.copytree(state / "copied", state / "copy")
    (state / "renamed").rename(state / "kept")
    inner = run_of(state, "around/inner")
    for name in state.iterdir():
        os.utime(name, (1, 1))
    before = {*state.rglob("*")}
    for number in range(worker_output.RUNS_KEPT):
        run_of(state, f"new{number}", age=number).close()
    gone = {path.relative_to(state).parts[0] for path in before - {*state.rglob("*")}}
    inner.close()
    assert gone == {"copied"}

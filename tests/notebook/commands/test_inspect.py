"""The output of `%dist_stack`, `%dist_log` and `%dist_why`, and of `%dist_status --doctor`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from nbdist.agent.worker_output import WorkerLog
from nbdist.notebook.commands.inspect import last_lines, shown_stacks
from nbdist.notebook.outcome import Why
from nbdist.notebook.pool import SETUP_LEFT_OUT, Pools
from nbdist.wire import log_files as logs
from nbdist.wire.log_files import BLOCK, LONGEST, PAGE, GetLogs, LogTail, read_logs
from nbdist.wire.places import RankPosition, Stack, StackFrame
from tests.notebook.front_end import Notebook, lasting

CELL = StackFrame("Cell In[5]", 7, "<module>", "dist.all_reduce(t)")
LIBRARY = "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TORCH = StackFrame(LIBRARY, 83, "wrapper", "return func(*args, **kwargs)")
WAITS = RankPosition(line=7, operation="all_reduce")


def waiting(rank: int) -> Stack:
    return Stack(rank, 100 + rank, "busy", WAITS, (CELL, TORCH))


def test_equal_stacks_are_shown_once() -> None:
    """Ranks whose calls differ only in addresses and process ids share a block."""
    sleep = StackFrame("Cell In[5]", 3, "<module>", "time.sleep(600)")
    stacks = [
        waiting(3),
        waiting(0),
        Stack(1, 101, "busy", RankPosition(line=3), (sleep,)),
        waiting(2),
    ]
    assert shown_stacks("4 workers", stacks).text.splitlines() == [
        "4 workers",
        "── ranks 0,2-3 same · wait in all_reduce, line 7 ──",
        "  Cell In[5], line 7",
        "    dist.all_reduce(t)",
        "  torch/distributed/distributed_c10d.py, line 83, in wrapper",
        "    return func(*args, **kwargs)",
        "── rank 1 · in line 3: time.sleep(600) ──",
        "  Cell In[5], line 3",
        "    time.sleep(600)",
    ]
    call = StackFrame("Cell In[5]", 1, "<module>", "call()")
    stacks = []
    for rank in range(2):
        generated = StackFrame(f"/tmp/{4321 + rank}.py", 9, f"<Call at 0x7f00aabbcc{rank:02x}>")
        stacks.append(Stack(rank, 4321 + rank, "busy", RankPosition(line=1), (call, generated)))
    assert "── ranks 0-1 same · in line 1: call() ──" in shown_stacks("", stacks).text


def test_a_rank_without_calls_shows_its_state() -> None:
    """For a rank without a readable stack its state is shown instead, such as `idle`."""
    stacks = [
        Stack(0, 100, "idle", RankPosition()),
        Stack(1, 101, "dead", RankPosition()),
        Stack(2, 102, "busy", RankPosition(is_stopped=True)),
        Stack(3, 103, "busy", RankPosition(holds_gil=True), problem="its stack cannot be read"),
        Stack(4, 104, "busy", RankPosition(line=2, holds_gil=True), (CELL,)),
    ]
    assert shown_stacks("5 workers", stacks).text.splitlines()[1:] == [
        "── rank 0 · idle ──",
        "── rank 1 · dead ──",
        "── rank 2 · stopped by a signal ──",
        "  `kill -CONT 102` resumes it",
        "── rank 3 · busy in C code that holds the GIL ──",
        "  its stack cannot be read",
        "── rank 4 · busy in C code that holds the GIL, line 2 ──",
        "  Cell In[5], line 7",
        "    dist.all_reduce(t)",
    ]


def test_html_of_stacks_is_escaped_and_folded() -> None:
    """Code is escaped in HTML; of several long stacks only the first block is open."""
    nasty = StackFrame("Cell In[5]", 1, "<lambda>", "f('<script>')")
    deep = [
        Stack(rank, rank, "busy", RankPosition(line=1), (nasty,) * (40 + rank)) for rank in range(3)
    ]
    html = shown_stacks("3 workers", deep).html
    assert ("<script" in html, "&lt;script&gt;" in html) == (False, True)
    assert (html.count("<details open"), html.count("<details ")) == (1, 3)


def test_magics_answer_without_workers(typed: Callable[[str], str], pools: Pools):
    """Without workers `%dist_status` says how to start some; `%dist_why` is about one pool."""
    shown = typed("%dist_status -v").splitlines()
    assert shown[0].startswith("no workers are running · `%%distributed -n 4`")
    assert shown[1:] == ["made on the workers: none", "sent by the notebook: none"]
    assert typed("%dist_stack").startswith("no workers are running")
    assert typed("%dist_why") == "nothing has failed yet\n"
    pools.find_or_make("a").failures.last = Why(
        "12:00:00 · rank 1", "bad shard", ("rank 2: the same",), "/x.log"
    )
    assert typed("%dist_why --pool a").splitlines() == [
        "12:00:00 · rank 1", "bad shard", "rank 2: the same", "all of its lines: /x.log"
    ]  # fmt: skip
    assert typed("%dist_why") == "nothing has failed yet\n"


@pytest.mark.own_agent
def test_dist_why_shows_why_workers_did_not_start(fresh: Callable[..., Notebook]) -> None:
    """After a start or restart that has failed, `%dist_why` has the reason and the last lines."""
    notebook = fresh("%load_ext nbdist")
    broken = "--wrap \"sh -c 'echo no licence >&2; exit 3'\""
    for magic in (f"%dist_init -n 1 {broken}", f"%dist_restart {broken}"):
        (error,) = notebook.run(magic).errors
        assert error["ename"] == "StartError"
        time, why, *lines = notebook.run("%dist_why").text.replace(" · ", "\n", 1).splitlines()
        assert re.fullmatch(r"\d\d:\d\d:\d\d", time)
        assert re.match(r"rank 0 on \S+ could not start: it exited with code 3\. Started", why)
        assert lines == ["no licence"]
        assert notebook.run("%dist_init -n 1 --wrap env").errors == []


@pytest.mark.own_agent
def test_a_start_after_a_failed_restart_says_what_is_lacking(
    fresh: Callable[..., Notebook],
) -> None:
    """After a failed restart, `%%distributed` notes that it runs no set-up cells."""
    notebook = fresh("%load_ext nbdist")
    assert notebook.run("%%distributed -n 1 --setup\nmade = 1").errors == []
    assert notebook.run("%dist_restart --wrap false").error
    assert SETUP_LEFT_OUT in notebook.run("%%distributed\n'made' in globals()").text
    assert SETUP_LEFT_OUT not in notebook.run("%%distributed --setup\nmade = 2").text
    assert notebook.run("%dist_restart").errors == []
    assert "2" in notebook.run("%%distributed\nprint(made)").text


@pytest.mark.world
def test_status_doctor_shows_the_report_of_nbdist_doctor(
    typed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--doctor` shows the report of `nbdist doctor` on this process's environment (0.6 s)."""
    monkeypatch.setenv("PYTHON_EXEC", "/nowhere/python")
    first, *others = typed("%dist_status --doctor").splitlines()
    assert first.startswith("problem: /nowhere/python cannot be run")
    assert others[-2].startswith("ok: sockets of workers are in ")
    assert others[-1].startswith("result: something will not work here: 1 problem, ")


# --- %dist_log --------------------------------------------------------------------------------


kernel = lasting("%load_ext nbdist", NBDIST_LOG_DIR="{folder}")


@pytest.mark.shared_world
def test_dist_log_shows_lines_by_rank_and_options(kernel: Notebook) -> None:
    """Equal lines of ranks are shown once; options choose lines; the last line names the files."""
    run = kernel.folder / "run"
    assert kernel.run("%%distributed -n 2 --name run\npass").errors == []
    assert kernel.run("%dist_restart").errors == []
    kernel.run(
        "%%distributed\nimport sys\nfor i in range(9): print('step', i)\n"
        "print('\\x1b[31mwarned\\x1b[0m', rank, file=sys.stderr)"
    )
    lines = kernel.run("%dist_log --tail 2").text.splitlines()
    attempt = max(run.iterdir(), key=lambda each: each.stat().st_mtime)
    assert lines == [
        "── ranks 0-1 (same) ──", "step 7", "step 8",
        "── rank 0 · stderr ──", "warned 0", "── rank 1 · stderr ──", "warned 1",
        f"files: {attempt}/[0-1]/[stdout,stderr].log",
    ]  # fmt: skip
    selected = kernel.run("%dist_log -r 1 --grep 'step [35]|warn' --stdout").text.splitlines()
    assert selected[:-1] == ["── rank 1 ──", "step 3", "step 5"]
    selected = kernel.run("%dist_log -r 0 --stderr").text.splitlines()
    assert selected[:-1] == ["── rank 0 · stderr ──", "warned 0"]
    assert kernel.run("%dist_log --grep nowhere").text.startswith("no lines with nowhere\nfiles")
    # Each start has its own files, also if another world takes the name of the run.
    last = int(attempt.name.removeprefix("attempt_"))
    assert kernel.run("%dist_restart --backend none --name run").errors == []
    assert kernel.run("%dist_log").text.startswith("no lines")
    assert "step 8" in kernel.run(f"%dist_log --attempt {last}").text
    error = kernel.run("%dist_log --attempt 99").error
    attempts = sorted(int(each.name[8:]) for each in run.glob("attempt_*"))
    assert f"`--attempt 99`: there are {attempts[0]}-{attempts[-1]}, the last is now." in error


@pytest.fixture(params=[PAGE, 1000])
def _pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files at once, or in pages of a thousand bytes."""
    monkeypatch.setattr(logs, "PAGE", request.param)


def lines_of(folder: Path, count: int, pattern: str | None = None) -> list[str]:
    """Return the last lines of a rank's file, as `%dist_log` reads the file."""
    ask = partial(read_logs, {3: folder})
    get = GetLogs((3,), ("stdout",), count)
    (tail,) = ask(get)
    return [*last_lines(tail, get, ask, None if pattern is None else re.compile(pattern))]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("\na\n\n", ["", "a", ""]),
        ("0%\r50%\r100%\nend\r\n", ["100%", "end"]),
        ("\x1b[31mred\x1b[0m é\n", ["red é"]),
    ],
)
def test_last_lines_are_as_in_a_terminal(tmp_path: Path, text: str, lines: list[str]) -> None:
    """Lines are returned as a terminal shows them, with or without a line break at the end."""
    (tmp_path / "stdout.log").write_text(text, newline="")
    assert lines_of(tmp_path, 9) == lines
    assert lines_of(tmp_path, 1) == lines[-1:]


@pytest.mark.usefixtures("_pages")
def test_last_lines_of_a_big_file_are_whole(tmp_path: Path) -> None:
    """Lines across blocks or pages are whole; a line of more than `LONGEST` bytes is cut."""
    file = tmp_path / "stdout.log"
    numbers = [f"line {number} " + "x" * (number % 97) for number in range(9000)]
    file.write_text("\n".join(numbers) + "\n")
    assert file.stat().st_size > 3 * BLOCK
    assert lines_of(tmp_path, 10_000) == numbers
    assert lines_of(tmp_path, 2) == numbers[-2:]
    matching = [line for line in numbers if re.search(r"line [789]00 ", line)]
    assert lines_of(tmp_path, 3, r"line \d00 ") == matching
    assert lines_of(tmp_path, 3, "line 7 ") == ["line 7 " + "x" * 7]
    numbered = "".join(f"{number:08}" for number in range(5 * BLOCK // 8))
    for length in (BLOCK + LONGEST + 90, 5 * BLOCK):
        file.write_text("first\n" + numbered[-length:] + "end\nz")
        first, long, short = lines_of(tmp_path, 9)
        assert (first, short) == ("first", "z")
        assert LONGEST <= len(long) <= LONGEST + BLOCK
        assert f"{numbered}end".endswith(long), "no part inside of the line is missing"
    assert lines_of(tmp_path / "nowhere", 9) == []


@pytest.mark.usefixtures("_pages")
def test_lines_in_the_former_file_are_included(tmp_path: Path) -> None:
    """Lines of the file before a rotation come first, without the line that names that file."""
    log = WorkerLog(tmp_path, limit=4000)
    numbers = [f"line {number}" for number in range(300)]
    for line in numbers:
        log.write("stdout", f"{line}\n")
    log.close()
    assert (tmp_path / "stdout.log.1").exists()
    assert lines_of(tmp_path, 250) == numbers[50:]
    assert lines_of(tmp_path, 5, "line 7.$") == numbers[75:80]


def test_foreign_folders_are_no_attempts(tmp_path: Path) -> None:
    """Only folders named `attempt_` and a number count as attempts; copies beside them do not."""
    for name in ("attempt_0", "attempt_1", "attempt_1_old", "attempt_", "attempt_x"):
        (tmp_path / name / "3").mkdir(parents=True)
        (tmp_path / name / "3" / "stdout.log").write_text("line\n")
    (tail,) = read_logs({3: tmp_path / "attempt_1" / "3"}, GetLogs((3,), ("stdout",), 5))
    assert (tail.attempts, tail.lines) == ((0, 1), ("line",))


def test_a_part_of_a_file_is_read_at_once(tmp_path: Path) -> None:
    """An answer has about `PAGE` bytes at most, and no lines of ranks or attempts without files."""
    (tmp_path / "stdout.log").write_text(f"{'x' * 1000}\n" * 3000)
    ask = partial(read_logs, {3: tmp_path, 4: None})
    here, none = ask(GetLogs((3, 4, 5), ("stdout",), 5000))
    assert PAGE < sum(map(len, here.lines)) < PAGE + 2000
    assert none == LogTail(4, "stdout")
    (other,) = ask(GetLogs((3,), ("stdout",), 50, attempt=7))
    assert (other.lines, other.start) == ((), 0)

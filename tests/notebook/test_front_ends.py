"""Tests of nbdist without a page in a browser: in a terminal, nbclient and papermill."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import nbformat
import pexpect
import psutil
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from nbdist.output.ansi import strip
from tests.notebook.front_end import Notebook, execute, nbclient_manager
from tests.waiting import SOON

pytestmark = [pytest.mark.kernel, pytest.mark.shared_world]


class Terminal:
    """IPython in a terminal of 200 columns."""

    def __init__(self, home: Path, kind: str = "dumb") -> None:
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--no-banner", "--colors=NoColor", "--no-confirm-exit"],
            dimensions=(50, 200),
            cwd=str(home),
            env={
                **os.environ,
                "TERM": kind,
                "PROMPT_TOOLKIT_NO_CPR": "1",  # pexpect cannot tell the cursor's place
                "NBDIST_LOG_DIR": str(home / "logs"),
                "IPYTHONDIR": str(home),
                "PYTHONFAULTHANDLER": "1",
            },
            encoding="utf-8",
            timeout=SOON,
        )
        self.prompts = 1  # the number in the next prompt
        self.wait_for_prompt()
        self.enter("%load_ext nbdist")

    def wait_for_prompt(self) -> str:
        """Wait for the next prompt, and return all text that is shown before it."""
        try:
            self.child.expect_exact(f"In [{self.prompts}]:")
        except pexpect.TIMEOUT:
            self.child.kill(signal.SIGABRT)  # faulthandler writes all stacks
            pytest.fail(f"no prompt, only {self.child.before!r}\n{self.child.read()}")
        before = str(self.child.before)
        # A dumb terminal shows its prompt a moment before it reads keys, without echo.
        assert self.child.waitnoecho(SOON)
        return before

    def begin(self, *lines: str) -> None:
        """Type a cell, and press Alt-Enter, which runs the cell."""
        self.child.send("\r".join(lines))
        self.child.send("\x1b\r")

    def enter(self, *lines: str) -> list[str]:
        """Run a cell; return the lines that the terminal shows until the next prompt."""
        self.begin(*lines)
        return self.finish()

    def finish(self) -> list[str]:
        """Wait for the end of the running cell; return the lines that were shown meanwhile."""
        self.prompts += 1
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.wait_for_prompt())
        return [line.strip("\r") for line in text.split("\n")]


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal with two workers, the same for all tests of this module."""
    terminal = Terminal(tmp_path_factory.mktemp("terminal"))
    terminal.enter("%dist_init -n 2")
    yield terminal
    terminal.child.close(force=True)


def test_terminal_prints_lines_with_their_ranks(terminal: Terminal) -> None:
    """Each line has its ranks; a failed cell shows its traceback once, without nbdist's files."""
    lines = terminal.enter("%%distributed -n 2", "print('same'); print('mine', rank)")
    assert {"[0-1] same", "[0] mine 0", "[1] mine 1"} <= {*lines}
    assert any(re.fullmatch(r"2 ranks · \d+\.\d s · ✓ 2", line) for line in lines)
    lines = terminal.enter("%%distributed", "if rank: raise ValueError('bad')")
    assert any("rank 1 failed, of 2, after" in line for line in lines)
    assert "[1] ✗ ValueError: bad" in lines
    traceback = lines[lines.index("── rank 1 ✗ ──") :]
    assert any("----> 2 if rank: raise ValueError('bad')" in line for line in traceback)
    assert any(re.match(r"2 ranks · \d+\.\d s · ✓ 1 · ✗ 1", line) for line in traceback)
    assert lines.count("ValueError: bad") == 1
    assert "nbdist/" not in "\n".join(lines)
    again = terminal.enter("%dist_output")
    assert "── rank 0 (no output) ──" in again
    assert again[again.index("── rank 1 ✗ ──") :].count("ValueError: bad") == 1
    assert any(line.startswith("2 workers on") for line in terminal.enter("%dist_status"))


def test_terminal_shows_lines_at_once(terminal: Terminal, tmp_path: Path) -> None:
    """A line appears while its cell still runs, and a progress bar is a single line that moves."""
    polls = f"iter(Path({str(tmp_path)!r}, n).exists, True)"
    wait = f"wait = lambda n: [time.sleep(0.01) for _ in {polls}]"
    terminal.enter("%%distributed", "import time, tqdm; from pathlib import Path", wait)
    terminal.begin("%%distributed", "print('at once'); wait('seen'); print('later')")
    terminal.child.expect(r"\n\[0(-1)?\] at once")
    (tmp_path / "seen").touch()
    # Ranks that print the same text more than a moment apart have a line each.
    assert {"[0-1] later", "[0] later"} & {*terminal.finish()}
    bar = "for n in tqdm.tqdm(range(20), desc='train', mininterval=0): n == 5 and wait('moved')"
    terminal.begin("%%distributed", bar)
    terminal.child.expect(r"\r\[0-1\] train \d+%( \(\d+-\d+\))? \d\d:\d\d<\d\d:\d\d")
    (tmp_path / "moved").touch()
    lines = [line.rpartition("\r")[2] for line in terminal.finish()]
    (end,) = [line for line in lines if line.startswith("[0-1] train")]
    assert re.match(r"\[0-1\] train  20/20  ", end)


def test_terminal_ends_a_cell_with_ctrl_c(terminal: Terminal) -> None:
    """Ctrl-C ends the cell within seconds, and the workers keep their variables."""
    terminal.begin("%%distributed", "kept = rank; print('runs'); import time; time.sleep(600)")
    terminal.child.expect_exact("[0-1] runs")
    terminal.child.sendintr()
    assert "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost." in terminal.finish()
    assert "[1] 1" in terminal.enter("%%distributed", "print(kept)")


def test_terminal_is_live_at_its_prompt(tmp_path: Path) -> None:
    """A job's lines, its end, and a worker's death appear while the terminal waits for input."""
    terminal = Terminal(tmp_path, "xterm")
    try:
        loop = "[(print('step', i), time.sleep(0.3)) for i in range(4)]; 1 / 0"
        terminal.begin("%%distributed -n 2 --no-wait -o job", "import time", loop)
        for text in (
            "running on 2 ranks in the background",
            *("step 3", "✗ ZeroDivisionError", "ranks 0-1 failed, of 2; first: rank "),
        ):
            terminal.child.expect_exact(text)
        terminal.begin("%%distributed -r 1", "import os; print('process', os.getpid())")
        terminal.child.expect(r"process (\d+)")
        pid = int(terminal.child.match[1])
        terminal.child.expect_exact("· ✓ 1")
        os.kill(pid, signal.SIGKILL)
        terminal.child.expect_exact("rank 1 was killed by SIGKILL while no cell was running")
        terminal.child.expect_exact("rank 1 was restarted and its variables")
    finally:
        terminal.child.close(force=True)


THREAD = """import os, threading, time
def late(gates, flood):
    while not os.path.exists(gates + '/first'): time.sleep(0.01)
    print('late', flush=True)
    while not os.path.exists(gates + '/second'): time.sleep(0.01)
    print(flood, flush=True)
flood = '\\n'.join(map(str, range(5000)))
threading.Thread(target=late, args=({gates!r}, flood)).start()"""


def test_terminal_shows_late_output_above_its_prompt(tmp_path: Path) -> None:
    """What threads print after the cell appears above the prompt, where typed text stays."""
    terminal = Terminal(tmp_path, "xterm")
    try:
        thread = THREAD.format(gates=str(tmp_path))
        terminal.enter("%%distributed -n 2", f"exec({thread!r}, globals())")
        terminal.child.send("40 + ")
        terminal.child.expect_exact("40")
        (tmp_path / "first").touch()
        terminal.child.expect(r"\[0-1\] late|\[[01]\] late")
        (tmp_path / "second").touch()
        terminal.child.expect(r"… \d,\d+ lines more after the cell · rest: `%dist_output --all`")
        terminal.child.expect(r"\[0-1\] 4999|\[[01]\] 4999")
        terminal.child.expect_exact("40")  # the prompt is drawn again, with what was typed
        terminal.begin("2")
        terminal.child.expect(r"Out\[3\]: \S*42")
        assert terminal.child.waitnoecho(SOON)
        terminal.begin("%dist_output -r 0 --all")
        terminal.child.expect_exact("late")
        terminal.child.expect_exact("4999")
    finally:
        terminal.child.close(force=True)


STUBBORN = """import time
def forever():
    for number in range(10**6):
        try:
            time.sleep(0.2)
            print('still', number, flush=True)
        except KeyboardInterrupt: print('caught', flush=True)
if rank: forever()"""


def test_terminal_shows_what_ranks_print_that_did_not_stop(tmp_path: Path) -> None:
    """After Ctrl-C, output of a rank that has not stopped appears while the prompt is shown."""
    terminal = Terminal(tmp_path, "xterm")
    try:
        terminal.begin("%%distributed -n 2", f"exec({STUBBORN!r}, globals())")
        terminal.child.expect_exact("[1] still 1")
        terminal.child.sendintr()
        terminal.child.expect_exact("[1] caught")
        terminal.child.expect_exact("RanksNotStopped")
        terminal.child.expect_exact("In [")
        terminal.child.expect(r"\[1\] still \d+")
        terminal.child.expect(r"\[1\] still \d+")
    finally:
        terminal.child.close(force=True)


def test_terminal_sends_cells_in_the_background(tmp_path: Path) -> None:
    """Each line with `--no-wait` binds its own job, whose output appears at the next prompt."""
    terminal = Terminal(tmp_path, "xterm")
    try:
        terminal.enter("%dist_init -n 2")
        for number in range(3):
            line = f"%distributed --no-wait -o job{number} rank or print('{number} on', rank)"
            terminal.begin(line)
            terminal.child.expect_exact(f"`job{number}.wait()` waits for it")
            terminal.child.expect_exact(f"[0] {number} on 0")
            terminal.child.expect_exact("· ✓ 2")
            assert terminal.child.waitnoecho(SOON)  # the prompt below the output reads keys again
        terminal.begin("print([job.done() for job in (job0, job1, job2)])")
        terminal.child.expect_exact("[True, True, True]")
    finally:
        terminal.child.close(force=True)


def test_terminal_passes_typed_lines_to_ranks(terminal: Terminal) -> None:
    """`input` and the debugger of a rank read lines from the terminal, below all output so far."""
    terminal.begin("%%distributed -n 2", "print('hi', end=' '); name = input('name? ')")
    for rank, line in enumerate(["ada", "bob"]):
        terminal.child.expect_exact(f"[rank {rank}] name? ")
        assert rank or "[0-1] hi" in terminal.child.before
        terminal.child.sendline(line)
    terminal.finish()
    terminal.begin("%%rank 1", "breakpoint()", "name")
    for line in ("p name", "c"):
        terminal.child.expect_exact("[rank 1] ipdb> ")
        terminal.child.sendline(line)
    assert "[1] 'bob'" in terminal.finish()


CELLS = (
    "%load_ext nbdist",
    "%%distributed -n 2\nx = rank + 1\nprint('x is', x)",
    "%dist_gather x",
    "total = sum(x)",
)


def a_notebook(*cells: str) -> nbformat.NotebookNode:
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernelspec, "language_info": {"name": "python"}}
    return new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=metadata)


def run(notebook: nbformat.NotebookNode) -> None:
    with closing(Notebook()) as kernel:
        execute(notebook, kernel)


def test_nbclient_stops_at_a_failed_cell() -> None:
    """Cells after a failed cell do not run; each cell has one saved display, as HTML and text."""
    slow = "%%distributed\nimport time\nprint('start')\ntime.sleep(0.6)\nprint('end')"
    notebook = a_notebook(
        *CELLS, slow, "%%distributed\nif rank: raise ValueError('bad')", "after = 1"
    )
    with pytest.raises(CellExecutionError, match="ValueError: bad"):
        run(notebook)
    *_, shows, failed, after = notebook.cells
    for cell in (notebook.cells[1], shows):
        (output,) = cell.outputs
        assert (output.output_type, output.metadata) == ("display_data", {})
        assert {*output.data} == {"text/html", "text/plain"}
    assert shows.outputs[0].data["text/plain"].endswith("start\nend")
    panel, error = failed.outputs
    assert (panel.output_type, error.output_type) == ("display_data", "error")
    assert len(error.traceback) == 1
    assert (after.outputs, after.execution_count) == ([], None)
    nbformat.validate(notebook)


def test_nbclient_fails_a_cell_that_asks_for_input() -> None:
    """A `breakpoint()` fails at once if nobody can type, with the remedy in the error."""
    notebook = a_notebook(*CELLS, "%%distributed\nbreakpoint()\nx = 1")
    with pytest.raises(CellExecutionError, match=r"breakpoint\(\) need JupyterLab or a terminal"):
        run(notebook)


def test_nbclient_saves_the_output_of_jobs(tmp_path: Path) -> None:
    """A job's output is saved in its cell; a job that outlives the notebook is saved as running."""
    sent = "%%distributed -n 2 --no-wait -o job\nimport time\nfor i in range(4):\n    "
    sent += "print('step', i); time.sleep(0.2)\n"
    ends = f"{sent}from pathlib import Path; Path('{tmp_path}', str(rank)).touch()"
    waits = f"import os, time\nwhile len(os.listdir('{tmp_path}')) < 2: time.sleep(0.1)"
    cells = ("%load_ext nbdist", ends, waits, "None", f"{sent}time.sleep(600)")
    notebook = a_notebook(*cells, "job.done()", "time.sleep(0.5)")
    run(notebook)
    (ended,), (broken_off,) = (
        [output.data["text/plain"] for output in notebook.cells[number].outputs]
        for number in (1, 4)
    )
    assert ended.endswith("step 0\nstep 1\nstep 2\nstep 3")
    assert " · ✓ 2" in ended
    assert " · ● 2" in broken_off
    assert "step 0" in broken_off


def test_nbclient_saves_a_death_between_cells() -> None:
    """The next cell, even a plain cell, notes the death: no output between cells is saved."""
    kills = (
        "import os, signal, nbdist.notebook.extension as extension\n"
        "link = extension.pools_of(get_ipython()).default.world.engine.connection.link\n"
        "os.kill(pids[1], signal.SIGKILL)\n"
        "while not any('Died' in repr(news) for news in [*link.events.waiting]): pass"
    )
    cells = ("%load_ext nbdist", "%%distributed -n 2 -o pids\nimport os\nx = rank\nos.getpid()")
    notebook = a_notebook(*cells, kills, "'here'", "%%distributed\n'x' in globals()")
    run(notebook)
    first, value = notebook.cells[3].outputs
    assert value.data["text/plain"] == "'here'"
    note = first.data["text/plain"]
    assert note.startswith("rank 1 was killed by SIGKILL while no cell was running · rank 1 was ")
    assert "its variables (x) are gone" in note
    (after,) = notebook.cells[4].outputs
    assert after.data["text/plain"].endswith("── rank 0 ──\nTrue\n── rank 1 ──\nFalse")


def test_nbval_finds_outputs_that_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nbval's strict mode accepts equal outputs of slower cells, and rejects a different output."""
    monkeypatch.setenv("NBDIST_LOG_DIR", "")
    monkeypatch.setenv("NBDIST_SECONDS", "none")
    saved, again = tmp_path / "saved.ipynb", tmp_path / "again"
    notebook = a_notebook(
        "%load_ext nbdist",
        f"%%distributed -n 2 -o out\nimport os, time\ntime.sleep(os.path.exists({str(again)!r}))\n"
        "print('hello', rank)\nrank * 2",
        "out",
        f"%%distributed\nos.path.exists({str(again)!r})",
        "out[1]",
    )
    run(notebook)
    nbformat.write(notebook, saved)
    again.touch()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    options = ("-q", "-p", "no:cacheprovider", "-p", "nbval.plugin", "--nbval", str(saved))
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 4 passed" in done.stdout, done.stdout
    assert "saved.ipynb::Cell 3" in done.stdout


def test_papermill_parameters_reach_the_workers(tmp_path: Path) -> None:
    """A parameter that papermill sets is sent to the workers as any variable of the notebook is."""
    import papermill

    notebook = a_notebook("scale = 1", *CELLS, "%%distributed\nprint('scaled', scale * x)")
    notebook.cells[0].metadata["tags"] = ["parameters"]
    source, target = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    nbformat.write(notebook, source)
    with closing(Notebook()) as kernel, nbclient_manager(kernel) as manager:
        papermill.execute_notebook(source, target, {"scale": 10}, progress_bar=False, km=manager)
    text = nbformat.read(target, as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert text.endswith("── rank 0 ──\nscaled 10\n── rank 1 ──\nscaled 20")


# --- clients that ignore `update_display_data` ----------------------------------------------------

SLOW = "import time\nprint('first', rank)\ntime.sleep(0.6)\nprint('last', rank)"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    with closing(Notebook("%load_ext nbdist", "%%distributed -n 2\nx = rank")) as made:
        yield made


def printed(kernel: Notebook, source: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a cell by `execute_interactive`; return the printed streams, displays and error."""
    kernel.client.execute_interactive(source, timeout=SOON, stop_on_error=False)
    captured = capsys.readouterr()
    return strip(captured.out + captured.err)


def test_the_last_display_is_complete(kernel: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """A client that only shows new displays has all lines, also of a cell with several magics."""
    text = printed(kernel, f"%%distributed\n{SLOW}", capsys)
    whole = "── rank 0 ──\nfirst 0\nlast 0\n── rank 1 ──\nfirst 1\nlast 1"
    assert text.endswith(f"2 ranks · ✓ 2\n{whole}")
    call = "get_ipython().run_cell_magic('distributed', '', code)\n"
    text = printed(kernel, f"code = {SLOW!r}\n{call}print('between')\n{call}", capsys)
    assert text.count(whole) == 2
    assert text.count("between") == 1
    text = printed(kernel, "one = 1\n%dist_scale 3\n%dist_scale 2", capsys)
    assert text.count("now 3 workers") == text.count("now 2 workers") == 1


def test_a_traceback_is_printed_once(kernel: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """A client that only shows new displays has output and traceback once, and the error's line."""
    text = printed(kernel, f"%%distributed\n{SLOW}\nif rank: 1 / 0", capsys)
    final = text.partition("✓ 1 · ✗ 1")[2]
    assert "first 1\nlast 1\n----" in final
    assert final.count("Traceback (most recent call last)") == 1
    assert "----> 6 if rank: 1 / 0\n" in final
    assert re.search(r"rank 1 failed, of 2, after [\d.]+ s: ZeroDiv", final)


PRINTS = """class Prints:
    def __reduce__(self):
        print('packed'); warnings.warn('and warned'); return int, (7,)
import warnings
value = Prints()"""


def test_output_of_the_notebook_itself_stays(kernel: Notebook) -> None:
    """The cell's output is not cleared before the last drawing if the notebook has printed too."""
    kernel.run(PRINTS)
    ran = kernel.run(f"%%distributed\n{SLOW}\nprint('value', value)")
    assert "packed\n" in "".join(ran.streams)
    assert "and warned" in "".join(ran.streams)
    assert ran.seen.count("last 1\nvalue 7") == 1
    assert kernel.run(f"%%distributed\n{SLOW}").text.endswith("last 1")


def test_papermill_logs_the_whole_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `log_output`, papermill's log and the saved file have a cell's whole output once."""
    import papermill

    source, target = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    nbformat.write(a_notebook(*CELLS, f"%%distributed\n{SLOW}"), source)
    with (
        closing(Notebook()) as kernel,
        nbclient_manager(kernel) as manager,
        caplog.at_level("INFO", "papermill"),
    ):
        papermill.execute_notebook(source, target, progress_bar=False, log_output=True, km=manager)
    whole = "2 ranks · ✓ 2\n── rank 0 ──\nfirst 0\nlast 0\n── rank 1 ──\nfirst 1\nlast 1"
    assert caplog.messages.count(whole) == 1
    (output,) = nbformat.read(target, as_version=4).cells[-1].outputs
    assert output.data["text/plain"] == whole


def test_terminal_completes_names_of_workers(terminal: Terminal) -> None:
    """Tab offers attributes of workers' objects; in auto mode plain cells run on the workers."""
    terminal.enter("%%distributed -n 2", "import types", "net = types.SimpleNamespace(layer=5)")
    hint = "`net` is on ranks 0-1: begin the cell with %%distributed, or `%dist_gather net`"
    assert f"NameError: {hint}" in terminal.enter("net")
    terminal.child.send("%%distributed\rprint(net.lay\t")
    terminal.child.expect(r"lay\w*r")  # a dumb terminal draws only a part
    terminal.begin(" * 7)")
    assert {"[0-1] 35", "[0] 35"} & {*terminal.finish()}
    terminal.enter("%dist_auto on")
    lines = terminal.enter("print('there', rank)")
    assert "[1] there 1" in lines
    assert any("· auto mode: `%%local` on the first line" in line for line in lines)
    assert f"Out[{terminal.prompts}]: 42" in terminal.enter("%%local", "6 * 7")
    terminal.enter("%dist_auto off")


def test_terminal_ends_its_workers(terminal: Terminal) -> None:
    """`exit` in the terminal ends the workers too.  Must be the module's last test."""
    processes = psutil.Process(terminal.child.pid).children(recursive=True)
    assert len(processes) >= 4
    terminal.child.send("exit\r")
    terminal.child.expect(pexpect.EOF)
    assert psutil.wait_procs(processes, timeout=SOON)[1] == []

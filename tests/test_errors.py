"""Tests of `nbdist.errors`, and of `nbdist.words`, which formats values for messages."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import dataclass

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from nbdist import errors, words
from nbdist.words import LACKED_MEMORY


@dataclass(frozen=True)
class Failed:
    time_ns: int


def worker_error(message: str = "bad shard", failed: tuple[int, ...] = (5,), ran: int = 8):
    blame = errors.Blame(failed[0], "node1", 4711, {rank: Failed(rank) for rank in failed})
    return errors.WorkerError(blame, ran, 1.234, ("ValueError", message))


def worker_died(seconds: float | None = 3.21, exit_code: int | None = -9):
    blame = errors.Blame(2, "node1", 4711, {2: Failed(1)})
    return errors.WorkerDied(blame, seconds, exit_code)


WAITS = "rank 0 waits in barrier, line 2"

EVERY_ERROR = [
    (errors.UsageError("`--bogus` is not an option."), ""),
    (errors.BadTopology("-n", "x", "that is not a number of workers", "Use `-n 4`."), ""),
    (errors.UnknownArgument("nbdist.World", "workers", ["n"]), ""),
    (errors.NoValue(7, range(2)), ""),
    (errors.BadRanks("9", 4, "there is no rank 9"), ""),
    (errors.WrongVersion("torch", "2.3.1", ">=2.8"), ""),
    (errors.WorldNotStarted("`%dist_gather`"), ""),
    (errors.NoRuntimeFolder({"/run/user/1000": "No space left on device"}), ""),
    (errors.NotEnoughMemory(1500 << 20, "this machine", 2500 << 20, 900 << 20), ""),
    (errors.ForkedProcess("`%dist_status`"), ""),
    (errors.WorldBroken("a rank did not answer"), ""),
    (errors.StartError(1, "node1", "python -m x", "it exited with code 1", ["one", "two"]), ""),
    (errors.CodeNotSent("node1", "/tmp: No space left on device"), ""),
    (errors.ScaleError(2, 4, "rank 2 could not start: it was killed by SIGKILL"), ""),
    (errors.RanksReleased(errors.Blame(0, "node1", 4711, {0: Failed(0)}), WAITS, ""), ""),
    (errors.CellTimeout(30.0, WAITS, [1]), ""),
    (errors.JobTimeout("`job`", 5.0, WAITS), ""),
    (errors.JobCancelled("`job`", "Stopped on rank 0."), ""),
    (errors.JobLost("`job`", 12.3, "its workers were restarted"), ""),
    (errors.ValueLost([1], "is gone with its worker"), ""),
    (errors.LocalCellError(ValueError("bad shard"), 4), ""),
    (errors.AgentLost("node1", -9, "KeyError: 17"), ""),
    (
        errors.NotEnoughGpus(4, 2, "0,1"),
        "4 ranks asked, 2 GPUs visible (CUDA_VISIBLE_DEVICES=0,1), and nccl needs one for "
        "each rank. `-n 2`, `--share-gpus` for several on one (slow), or `--backend gloo`.",
    ),
    (
        errors.NotEnoughGpus(1, 0, ""),
        "1 rank asked, 0 GPUs visible (CUDA_VISIBLE_DEVICES=), and nccl needs one for each "
        "rank. `--backend gloo`.",
    ),
    (
        errors.WorldSizeMismatch(8, 4),
        "8 workers are running. `%dist_scale 4` keeps their variables, `%dist_restart -n 4` "
        "clears them, `-r 0-3` runs on some.",
    ),
    (
        errors.WorldSizeMismatch(1, 8),
        "1 worker is running. `%dist_scale 8` keeps their variables, `%dist_restart -n 8` "
        "clears them.",
    ),
    (
        errors.WorldBusy([2], 3),
        "rank 2 is still running an earlier cell or call (3.0 s). Wait for it: a rank runs one "
        "cell or call at a time, and the process group can only be formed again while no rank runs "
        "any. `%dist_interrupt`, or `world.interrupt()` in Python, stops it.",
    ),
    (
        errors.RanksNotStopped([0, 1], is_safe=True),
        "ranks 0-1 have not stopped yet; no variables were lost. The "
        "next cell there waits for them; `%dist_interrupt` presses Stop again, which may end them, "
        "and `%dist_restart -r 0-1` restarts them.",
    ),
    (
        errors.RanksNotStopped([2], "it sorts"),
        "rank 2 has not stopped yet (it sorts), and may have to be ended, with its variables. "
        "The next cell there waits for it; `%dist_interrupt` presses Stop again, and "
        "`%dist_restart -r 2` restarts it.",
    ),
    (errors.Interrupted([0, 1, 3]), "Stopped on ranks 0-1,3. No variables were lost."),
    (
        errors.Interrupted([0, 1], damage="Replicas may differ."),
        "Stopped on ranks 0-1. Replicas may differ.",
    ),
    (errors.Interrupted([]), "no workers were started."),
    (
        errors.VariableNotSent("f", "f", "generator", "it cannot be copied", "use a list"),
        "`f` (generator) cannot be sent to the workers: it cannot be copied; nothing has "
        "run. Use a list.",
    ),
    (
        errors.VariableNotSent("loader", "loader.lock", "lock", "it stays here", "omit it"),
        "`loader`: `loader.lock` (lock) cannot be sent to the workers: it stays here; "
        "nothing has run. Omit it.",
    ),
    (
        worker_error("", failed=(3, 0, 1, 2), ran=4),
        "ranks 0-3 failed, of 4; first: rank 3 after 1.2 s: ValueError",
    ),
    (
        worker_error("\n two\nlines"),
        "rank 5 failed, of 8, after 1.2 s: ValueError: two",
    ),
    (worker_died(), "rank 2 on node1 (pid 4711) was killed by SIGKILL 3.2 s into the cell."),
    (
        worker_died(None, exit_code=3),
        "rank 2 on node1 (pid 4711) exited with code 3 while no cell was running.",
    ),
    (
        errors.StartError(None, "node1", "python -m x", "it took more than 30 s"),
        "the agent on node1 could not start: it took more than 30 s. Started with "
        "`python -m x`; it left no output.",
    ),
]
"""An error of each class with its text, or "" if only the form of the text is checked."""


def test_every_class_of_errors_is_in_the_table_above():
    """Each class of errors is in EVERY_ERROR, so that the next test checks all of them."""
    kinds = {each for each in vars(errors).values() if isinstance(each, type)}
    ours = {each for each in kinds if issubclass(each, errors.NbdistError)}
    assert ours - {errors.NbdistError} <= {type(error) for error, _ in EVERY_ERROR}


@pytest.mark.parametrize(
    ("error", "text"), EVERY_ERROR, ids=[type(each).__name__ for each, _ in EVERY_ERROR]
)
def test_an_error_is_one_line_and_survives_pickle(error, text):
    """An error is a single line, and keeps its text and attributes through pickle and copy.

    The line of a failed start is followed by a log.  No line has the name of its class twice.
    """
    first, *rest = str(error).split("\n")
    assert ".." not in first
    assert first.strip() == first
    assert str(error) == text or not text
    if isinstance(error, errors.Interrupted):
        return
    assert bool(rest) == (isinstance(error, errors.StartError) and bool(error.log_lines))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
    [line] = error._render_traceback_()
    assert line.count(type(error).__name__) == 1


def test_ipython_shows_the_line_and_no_traceback():
    """IPython shows the line of an error alone; Stop's error is shown as KeyboardInterrupt."""
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.user_ns["error"] = worker_error()
    with capture_output() as shown:
        result = shell.run_cell("raise error", store_history=False)
    assert result.error_in_exec is not None
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert plain == "WorkerError: " + str(worker_error()) + "\n"
    stopped = errors.Interrupted([0])
    assert isinstance(stopped, KeyboardInterrupt)
    [line] = stopped._render_traceback_()
    assert line.endswith(f"KeyboardInterrupt\x1b[0m: {stopped}")


def test_a_failed_start_shows_the_end_of_the_log():
    """The first line of a failed start is followed by a limited number of the log's last lines."""
    log = [f"line {i}" for i in range(100)]
    first, *rest = str(errors.StartError(1, "node1", "python -m x", "it died", log)).split("\n")
    assert first.endswith("its last lines:")
    assert [line.strip() for line in rest] == log[-errors.START_LOG_LINES :]
    # An agent's last line is its reason; a killed agent has written one only for lack of memory.
    assert "exited with code 1 (KeyError: 17), and" in str(errors.AgentLost("a", 1, "KeyError: 17"))
    assert "(" not in str(errors.AgentLost("a", -9, "Extension loaded"))
    assert f"SIGKILL ({LACKED_MEMORY}: x), and" in str(
        errors.AgentLost("a", -9, f"{LACKED_MEMORY}: x")
    )


def test_a_worker_error_has_the_failures_of_all_ranks():
    """A worker error names the rank that failed first, and has the failure of each failed rank."""
    error = worker_error(failed=(5, 1))
    assert (error.rank, error.host, error.pid) == (5, "node1", 4711)
    assert error.errors == {5: Failed(5), 1: Failed(1)}
    # The class is left out if a rank itself has raised an error of nbdist.
    nested = errors.WorkerError(
        errors.Blame(0, "a", 1, {0: Failed(0)}), 1, 1.0, ("WorkerError", "no rank")
    )
    assert str(nested) == "rank 0 failed after 1.0 s: no rank"


WORDED = {
    words.format_ranks: {
        **{(0, 1, 2, 5): "0-2,5", (): "", (3,): "3", (2, 1, 2): "1-2"},
        range(1024): "0-1023",
    },
    words.word_exit: {
        **{None: "ended", 0: "exited with code 0", 3: "exited with code 3"},
        **{-11: "was killed by SIGSEGV", -40: "was killed by signal 40"},
        -100: "was killed by signal 100",
    },
    words.size_text: {
        **{0: "0 B", 512: "512 B", 1536: "1.5 KiB", 240 << 20: "240 MiB", 5 << 28: "1.25 GiB"},
        **{1000 << 20: "0.977 GiB", 999_900_000 << 10: "954 GiB", 1023 << 10: "0.999 MiB"},
        **{79 << 30: "79 GiB", 1 << 50: "1,024 TiB"},
    },
    words.size_range: {
        **{(5,): "5 B", (240 << 20, 318 << 20, 240 << 20): "240-318 MiB"},
        (1 << 20, 5 << 28): "1 MiB-1.25 GiB",
    },
    words.one_line: {"x" * 1000: f"{'x' * (words.LINE_LIMIT - 3)}..."},
}


@pytest.mark.parametrize("word", WORDED)
def test_words_of_messages_have_a_fixed_form(word):
    """Messages have ranks as `-r` reads them, names of signals, and sizes of three digits."""
    assert {value: word(value) for value in WORDED[word]} == WORDED[word]


def test_columns_are_aligned():
    """Columns are as wide as their longest text, and no line ends with spaces."""
    rows = [("rank", "state"), ("0", "busy 3 s"), ("11", "<idle>")]
    assert words.aligned(rows) == ["rank  state", "0     busy 3 s", "11    <idle>"]
    assert words.aligned([]) == []
    # The most similar name is suggested, or none.
    names = ["loss", "model", "_lss", "optimizer"]
    assert words.did_you_mean("lss", names) == " Did you mean `loss`?"
    assert words.did_you_mean("optimiser", names) == " Did you mean `optimizer`?"
    assert words.did_you_mean("x", names) == words.did_you_mean("rank", names) == ""

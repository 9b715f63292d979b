"""Failures, deaths and Stop as a notebook shows them; input boxes and debuggers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.notebook.front_end import Notebook, Outcome, body
from tests.traces import command_line
from tests.waiting import SOON
from tests.worlds import each_new_child

pytestmark = pytest.mark.shared_world


def test_a_rank_that_dies_while_idle_is_replaced(notebook: Notebook, tmp_path: Path) -> None:
    """A note under the last cell names the death before another cell runs; a new rank starts."""
    gate = tmp_path / "dies"
    notebook.run(
        "%%rank 1\nkept = 1\nimport os, signal, threading, time\ndef later():\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nthreading.Thread(target=later).start()"
    )
    last_request = notebook.client.execute("None")
    notebook.reply_to(last_request)
    gate.touch()
    pattern = (
        r"rank 1 was killed by SIGKILL while no cell was running · rank 1 was restarted and its "
        r"variables \(.+\) are gone; other ranks are unaffected"
    )
    shown, deadline = "", time.monotonic() + SOON
    while not re.fullmatch(pattern, shown):
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown = message["content"]["data"]["text/plain"]
            assert message["parent_header"]["msg_id"] == last_request
    outcome = notebook.run("%%distributed\ndist.barrier()")
    assert "rank 1" not in outcome.text
    assert "killed by SIGKILL while no cell was running" in notebook.run("%dist_why").text


BOMB = """
import os, signal
import nbdist.notebook.extension
class Bomb:
    def __reduce__(self):
        engine = {engine}
        # It is taken apart several times.
        if {pid} in engine.rank_table.pids.values() and not killed:
            killed.append({pid})
            os.kill({pid}, signal.SIGKILL)
            events = engine.connection.link.events
            while not any("Died" in repr(news) for news in [*events.waiting]): pass
        return int, (7,)
killed = []
bomb = Bomb()
"""


@pytest.mark.parametrize("magic", ["%%distributed -r 0\nbomb", "%dist_push bomb"])
def test_a_death_while_a_cell_is_sent_is_noted_once(notebook: Notebook, magic: str) -> None:
    """A death while a cell's variables are pickled is noted once, in this cell or in the next."""
    pid = notebook.run("%%rank 1\nimport os; os.getpid()").text.split()[-1]
    engine = "nbdist.notebook.extension._loaded[get_ipython()][0].default.world.engine"
    notebook.run(BOMB.format(engine=engine, pid=pid))
    outcomes = [notebook.run(magic), notebook.run("%%distributed\npass")]
    assert [each.errors for each in outcomes] == [[], []]
    note = "rank 1 was killed by SIGKILL while no cell was running · rank 1 was restarted"
    assert sum(each.text.count(note) for each in outcomes) == 1


def test_a_death_names_variables_that_the_notebook_has_replaced(notebook: Notebook) -> None:
    """A variable that ranks have changed is named as lost, even if the notebook has a new one."""
    notebook.run("class Box: pass\nlost_box = Box()\nlost_box.items = [1]")
    notebook.run("%%distributed\nlost_box.items.append(2)")
    notebook.run("%dist_scale 5\n%dist_scale 4")  # nbdist asks the ranks what they have changed
    notebook.run("lost_box = Box()")
    notebook.run("%distributed pass")
    cell = "%%distributed\nimport os\nif rank == 1: os._exit(3)\ndist.barrier()"
    pattern = r"Rank 1 was restarted and its variables \((.*)\) are gone"
    (lost_names,) = re.findall(pattern, notebook.run(cell).error)
    assert "lost_box" in lost_names


@pytest.mark.own_agent
def test_workers_can_be_restarted_after_their_agent_died(fresh: Callable[..., Notebook]) -> None:
    """The last cell and the next cell name the agent's death; `%dist_restart` starts workers."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\npass")
    started = notebook.process.children()
    (agent,) = (each for each in started if "nbdist.agent" in " ".join(command_line(each)))
    agent.kill()
    notebook.next_shown("was killed by SIGKILL, and its workers ended with it")
    assert "the agent" in notebook.run("%%distributed -n 2\n1").error
    assert "2 workers ready" in notebook.run("%dist_restart").text
    assert notebook.run("%%distributed\npass").errors == []


def test_dist_why_shows_the_last_exception(notebook: Notebook) -> None:
    """`%dist_why` shows a failure's place, traceback and released ranks, until the next failure."""
    notebook.run("%%distributed\nif rank == 1:\n    raise ValueError('bad shard')\ndist.barrier()")
    why = notebook.run("%dist_why").text
    assert re.match(r"\d\d:\d\d:\d\d · rank 1 on .* \(pid \d+\) · .* s into Cell In", why)
    assert "ValueError: bad shard" in why
    assert "\nranks 0,2-3: Released: waited in barrier (cell line 4)" in why
    notebook.run("%dist_restart")
    notebook.run("%%distributed\npass")
    assert notebook.run("%dist_why").text == why
    notebook.run("%%distributed\n1 / 0")
    why = notebook.run("%dist_why").text
    assert "ZeroDivisionError: division by zero" in why
    assert why.endswith(": the same")


def test_a_setup_cell_runs_again_in_new_workers(notebook: Notebook) -> None:
    """Each run of a set-up cell uses the notebook's variables; those that it binds are workers'."""
    notebook.run("start, base, seen = 40, 'of the notebook', []\ndef up(x): return x + 2")
    # At its first run, some variables that the set-up cell uses were sent before; then all were.
    assert notebook.run("%%distributed\nup(start), seen.append(rank)").errors == []
    for _ in range(2):
        setup = "%%distributed --setup\nbase, had = up(start), [*seen]"
        assert notebook.run(setup).errors == []
    outcome = notebook.run("%%distributed\nassert seen == had == [rank]")
    assert outcome.errors == []
    note = "rank 2 was restarted and its variables"
    for restart, expected in (("-r 2", note), ("", "worker variables cleared")):
        assert expected in notebook.run(f"%dist_restart {restart}").text
        outcome = notebook.run("%%distributed\nbase == 42")
        assert "True" in outcome.text
        assert "was not sent" not in outcome.text
    notebook.run("%dist_shutdown")


def test_restart_keeps_the_named_variables(notebook: Notebook) -> None:
    """Variables after `--keep` survive a restart, also if the notebook has the name too."""
    notebook.run("first = 'of the notebook'")
    notebook.run("%%distributed\nfirst, second = [rank], rank")
    answer = notebook.run("%dist_restart -r 1,3 --keep first").text
    assert "ranks 1,3 were restarted and their variables (" in answer
    assert ("second" in answer, "first" in answer) == (True, False)
    answer = notebook.run("%dist_restart --keep first").text
    assert "worker variables cleared except first" in answer
    outcome = notebook.run("%%distributed\nassert first == [rank]")
    assert "was not sent" not in outcome.text


def test_a_rank_is_restarted_alone_whatever_the_policy(notebook: Notebook) -> None:
    """With `--on-failure stop` a requested restart of a rank ends no other worker."""
    notebook.run("%%distributed --on-failure stop\nkept = rank")
    answer = notebook.run("%dist_restart -r 2").text
    assert re.fullmatch(r"rank 2 was restarted .* are gone; other ranks are unaffected\.", answer)
    outcome = notebook.run("%%distributed --on-failure heal\nassert rank == 2 or kept == rank")
    assert outcome.errors == []


def test_a_restart_names_ranks_that_died_meanwhile(notebook: Notebook) -> None:
    """If another rank dies while the group is formed, the answer says that it was restarted too."""
    notebook.run(
        "%%distributed\nimport os\nimport nbdist.worker.group.group as group_module\n"
        "if rank == 0: group_module.Group.regroup = lambda *_: os._exit(4)"
    )
    answer = notebook.run("%dist_restart -r 2").text
    assert "rank 0 exited with code 4 while no cell was running" in answer
    assert "ranks 0,2 were restarted and their variables" in answer
    assert "while no cell was running" not in notebook.run("%%distributed\npass").text
    assert "rank 0 on " in notebook.run("%dist_why").text


def test_a_failed_restart_of_a_rank_is_an_error(notebook: Notebook) -> None:
    """The magic fails; a later note says that the rank was restarted, not that it was killed."""
    agent = int(notebook.run("%%rank 0\nimport os; os.getppid()").text.split()[-1])
    notebook.run("%%distributed\nkept = other = rank")
    why = notebook.run("%dist_why").text
    with each_new_child(agent, psutil.Process.kill):
        failed = notebook.run("%dist_restart -r 2 --keep kept\nafter = 1")
    assert "WorldBroken: the workers could not rebuild their process group: rank 2" in failed.error
    assert "The next cell tries again, and gives back kept;" in failed.error
    # The group is formed again between the cells or by the next cell.
    request = notebook.client.execute("%%distributed\nassert kept == rank", stop_on_error=False)
    shown = notebook.next_shown("rank 2 was restarted")["data"]["text/plain"]
    assert notebook.reply_to(request)["status"] == "ok"
    (lost_names,) = re.findall(r"rank 2 was restarted and its variables \((.*)\) are gone", shown)
    assert ("other" in lost_names, "kept" in lost_names) == (True, False)
    assert "SIGKILL" not in shown
    assert notebook.value("'after' in globals()") is False
    assert notebook.run("%dist_why").text == why


def test_a_note_names_variables_that_cannot_be_given_back(notebook: Notebook) -> None:
    """If a new rank cannot unpickle variables of `--keep`, a note names them, and cells run."""
    agent = int(notebook.run("%%rank 0\nimport os; os.getppid()").text.split()[-1])
    notebook.run(
        "%%distributed\nclass Fragile:\n    def __reduce__(self): return int, ('x',)\n"
        "kept = Fragile()"
    )
    with each_new_child(agent, psutil.Process.kill):
        assert notebook.run("%dist_restart -r 2 --keep kept").errors != []
    request = notebook.client.execute("%%distributed\npass", stop_on_error=False)
    shown = notebook.next_shown("kept could not be given back: rank 2 failed")["data"]
    assert "ValueError: invalid literal for int()" in shown["text/plain"]
    assert notebook.reply_to(request)["status"] == "ok"


def test_a_hang_that_is_not_released_ends_with_stop(notebook: Notebook) -> None:
    """With `--no-release`, a line after `--hang-timeout` names waiting ranks; Stop frees them."""
    outcome = notebook.run(
        "%%distributed --no-release --hang-timeout 0.5\nif rank != 1: dist.barrier()",
        notebook.stop_at("ranks 0,2-3 wait in barrier, line 2 · rank 1 finished"),
    )
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    assert notebook.run("%%distributed\ndist.barrier()").errors == []


TRAINS = """%%distributed
net = torch.nn.Linear(2, 1)
ddp = torch.nn.parallel.DistributedDataParallel(net)
adam = torch.optim.Adam(ddp.parameters())
for step in range(10 ** 9):
    ddp(torch.ones(1, 2)).sum().backward()
    if step == 20:
        print("trains")
        {then}
    adam.step()
"""


def test_stop_in_a_training_ends_at_a_common_step(notebook: Notebook) -> None:
    """All ranks end at the same step; if a rank cannot, the error says how to make ranks equal."""
    outcome = notebook.run(TRAINS.format(then="pass"), notebook.stop_at("trains"))
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-3. No variables were lost."
    assert "ranks 0-3 agree" in notebook.run("%dist_diff net").text
    stuck = "if rank == 2: import time; time.sleep(600)"
    outcome = notebook.run(TRAINS.format(then=stuck), notebook.stop_at("trains"))
    assert outcome.error == (
        "KeyboardInterrupt: Stopped on ranks 0-3. Gradients of `ddp` on ranks 0-1,3 may hold a "
        "part of the result (backward, line 6). Replicas may differ: ranks 0-1,3 ended after "
        "optimizer step 21, rank 2 after step 20. `%dist_diff ddp` shows the differences, "
        "`%dist_sync ddp net adam --from 0 -r all` copies from rank 0."
    )
    notebook.run("%dist_sync ddp net adam --from 0 -r all")
    assert "ranks 0-3 agree" in notebook.run("%dist_diff ddp").text


LATE = """import time
        try:
            print("waits" * (rank == 2))
            time.sleep(600 * (rank == 2))
        finally:
            time.sleep(12 * (rank == 2))
            print("saved" * (rank == 2))"""


def test_a_late_rank_is_reported_by_the_next_cell(notebook: Notebook) -> None:
    """If a rank stops only after the stopped cell has ended, the next cell says how ranks differ.

    The panel of the stopped cell says so too.  Before the next cell runs, this panel already shows
    the late output of the rank, and that the rank has stopped.
    """
    outcome = notebook.run(TRAINS.format(then=LATE), notebook.stop_at("waits"))
    assert outcome.error.startswith("RanksNotStopped: rank 2 has not stopped yet (")
    assert " · ● 1" in outcome.displays[0]["data"]["text/plain"]
    update = notebook.next_shown("saved", "■ 4 stopped")
    assert update["transient"] == outcome.displays[0]["transient"]
    next_outcome = notebook.run("%%distributed\nprint('next')")
    shown = [each["data"]["text/plain"] for each in (*next_outcome.displays, *next_outcome.updates)]
    (stopped_text,) = [text for text in shown if "saved" in text]
    *_, next_text = [text for text in shown if "saved" not in text]
    assert "next" in next_text
    assert "the stopped cell: Gradients of `ddp` on ranks 0-1,3 may hold a part of" in next_text
    for text in (stopped_text, next_text):
        assert "Replicas may differ: ranks 0-1,3 ended after optimizer step 21, rank 2" in text
    assert "the stopped cell" not in notebook.run("%%distributed\nprint('next')").text


# --- input boxes; `%debug` and `%pdb` after a failure on the workers --------------------------


FAILED = "%%distributed -n 2\ndef divide(x):\n    return 1 / x\ndivide(1 - rank)"


def test_each_rank_is_asked_in_turn(two: Notebook) -> None:
    """Ranks ask one after another, below their output; one panel remains, with the typed text."""
    result = two.run("%%distributed\nprint('hi')\nname = input('name? ')", typed=["ada", "bob"])
    assert result.prompts == ["[rank 0] name? ", "[rank 1] name? "]
    assert body(result) == ["── rank 0 ──", "hi", "name? ada", "── rank 1 ──", "hi", "name? bob"]
    secret_cell = "%%rank 1\nimport getpass\nprint(getpass.getpass('word: ')[::-1])"
    result = two.run(secret_cell, typed=["secret"])
    assert result.prompts == ["[rank 1] word: "]
    assert body(result) == ["── rank 1 ──", "word: ", "terces"]
    before: list[str] = []

    def record(outcome: Outcome) -> None:
        before.extend(shown["data"]["text/plain"] for shown in outcome.displays)

    cell = "%%distributed\nprint('first', end=' ')\nif rank == 0: input('? ')"
    two.run(cell, meanwhile=record, typed=["x"])
    head, question, *lines = before[0].splitlines()
    assert head.startswith("2 ranks · ")
    assert question == "rank 0 waits for your input"
    assert lines[-2:] == ["── ranks 0-1 (same) ──", "first "]


def test_a_debugger_line_can_go_to_all_ranks(two: Notebook) -> None:
    """`-r all c` continues all ranks in the debugger; other lines only go to the asking rank."""
    cell = "%%distributed\nx = 1\nbreakpoint()\nprint('x is', x)"
    outcome = two.run(cell, typed=["x = 7", "-r all c"])
    assert outcome.prompts == ["[rank 0] ipdb> "] * 2
    assert [line for line in body(outcome) if line.startswith("x is")] == ["x is 7", "x is 1"]


def test_stop_at_a_prompt_ends_the_cell(two: Notebook) -> None:
    """Stop ends a prompt or a debugger's long step; no variable is lost, and no rank asks again."""
    definition = "def asks():\n try: input('a')\n except KeyboardInterrupt: input('again')\n"
    for statement in ("breakpoint()", "input()", "asks()"):
        begin = f"%%distributed\n{definition}kept = rank\n"
        outcome = two.run(f"{begin}if rank:\n {statement}\n kept = 'lost'\ndist.barrier()")
        assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
        assert len(outcome.prompts) == 1
        assert body(two.run("%%distributed\ndist.barrier(); kept")) == [
            "── rank 0 ──", "0", "── rank 1 ──", "1"
        ]  # fmt: skip
    cell = "%%rank 0\nimport time\ndef long():\n    print('be' + 'gun')\n    time.sleep(600)\n"
    outcome = two.run(f"{cell}breakpoint()\nlong()", meanwhile=two.stop_at("begun"), typed=["n"])
    assert outcome.error == "KeyboardInterrupt: Stopped on rank 0. No variables were lost."
    assert len(outcome.prompts) == 1
    assert "BdbQuit" not in outcome.panel["text/plain"]


def test_debug_magics_open_the_frames_of_the_failure(two: Notebook) -> None:
    """`%dist_debug`, `%debug` and `%pdb` open the frames of the last failure, on a rank or here."""
    assert "rank 1 failed, of 2, after" in two.run(FAILED).error
    for magic in ("%debug", "%dist_debug", "%dist_debug -r 1"):
        outcome = two.run(magic, typed=["p x", "up", "up", "q"])
        assert outcome.prompts == ["[rank 1] ipdb> "] * 4
        lines = body(outcome)
        assert lines[1] == "ZeroDivisionError: division by zero"
        assert "----> 3     return 1 / x" in lines
        assert lines[lines.index("ipdb> p x") + 1] == "0"
        assert "*** Oldest frame" in lines
    assert two.run("%dist_debug").error.startswith("KeyboardInterrupt: Stopped on rank 1")
    assert "p x\n0" in two.run("%debug", typed=["p x", "q"]).text  # Stop has kept the failure
    two.run("%pdb on")
    outcome = two.run(FAILED, typed=["q"])
    assert outcome.prompts == ["[rank 1] ipdb> "]
    assert outcome.errors
    # A cell with a syntax error has not run, so `%pdb` must not open the earlier failure.
    outcome = two.run("%%distributed\nx = = 3", typed=["q"])
    assert (outcome.prompts, outcome.errors[0]["ename"]) == ([], "CellSyntaxError")
    two.run("%pdb off")
    two.run("%dist_clean")
    assert "no exception:" in two.run("%debug").errors[0]["evalue"]
    two.run("def mine(y):\n    1 / y\nmine(0)")
    outcome = two.run("%debug", typed=["p y", "q"])
    assert outcome.prompts == ["ipdb> "] * 2

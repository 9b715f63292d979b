"""`%debug` and `%pdb` of IPython, where what failed is a cell on the workers."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook, Outcome, body

pytestmark = pytest.mark.shared_world

FAILED = "%%distributed -n 2\ndef divide(x):\n    return 1 / x\ndivide(1 - rank)"


@pytest.fixture
def pair(kernel: Notebook) -> Notebook:
    """The notebook with two workers, which last through the module."""
    assert kernel.run("%%distributed -n 2\npass").errors == []
    return kernel


def test_each_rank_is_asked_in_turn(pair: Notebook) -> None:
    """Below what it has printed; one panel stays, with what was typed."""
    said = pair.run("%%distributed\nprint('hi')\nname = input('name? ')", typed=["ada", "bob"])
    assert said.prompts == ["[rank 0] name? ", "[rank 1] name? "]
    assert body(said) == ["── rank 0 ──", "hi", "name? ada", "── rank 1 ──", "hi", "name? bob"]
    asked = "%%rank 1\nimport getpass\nprint(getpass.getpass('word: ')[::-1])"
    said = pair.run(asked, typed=["secret"])
    assert said.prompts == ["[rank 1] word: "]
    assert body(said) == ["── rank 1 ──", "word: ", "terces"]
    before: list[str] = []

    def look(outcome: Outcome) -> None:
        before.extend(shown["data"]["text/plain"] for shown in outcome.displays)

    cell = "%%distributed\nprint('first', end=' ')\nif rank == 0: input('? ')"
    pair.run(cell, meanwhile=look, typed=["x"])
    head, asks, *rest = before[0].splitlines()
    assert head.startswith("2 ranks · ")
    assert asks == "rank 0 waits for your input"
    assert rest[-2:] == ["── ranks 0-1 (same) ──", "first "]


def test_a_line_for_all_that_are_in_the_debugger(pair: Notebook) -> None:
    """`-r all c`; each has bound what was typed for it alone before."""
    cell = "%%distributed\nx = 1\nbreakpoint()\nprint('x is', x)"
    said = pair.run(cell, typed=["x = 7", "-r all c"])
    assert said.prompts == ["[rank 0] ipdb> "] * 2
    assert [line for line in body(said) if line.startswith("x is")] == ["x is 7", "x is 1"]


def test_stop_at_a_prompt(pair: Notebook) -> None:
    """It ends the cell, also in a long step; nothing is lost or asked again."""
    asks = "def asks():\n try: input('a')\n except KeyboardInterrupt: input('again')\n"
    for waits in ("breakpoint()", "input()", "asks()"):
        begin = f"%%distributed\n{asks}kept = rank\n"
        said = pair.run(f"{begin}if rank:\n {waits}\n kept = 'lost'\ndist.barrier()")
        assert said.error == "KeyboardInterrupt: Stopped on ranks 0-1. No variables were lost."
        assert len(said.prompts) == 1
        assert body(pair.run("%%distributed\ndist.barrier(); kept")) == [
            "── rank 0 ──", "0", "── rank 1 ──", "1"
        ]  # fmt: skip
    cell = "%%rank 0\nimport time\ndef long():\n    print('be' + 'gun')\n    time.sleep(600)\n"
    said = pair.run(f"{cell}breakpoint()\nlong()", meanwhile=pair.stop_at("begun"), typed=["n"])
    assert said.error == "KeyboardInterrupt: Stopped on rank 0. No variables were lost."
    assert len(said.prompts) == 1
    assert "BdbQuit" not in said.panel["text/plain"]


def test_post_mortem(pair: Notebook) -> None:
    """`%dist_debug`, `%debug` and `%pdb` lead to the frames of what failed, on ranks or here."""
    assert "rank 1 after" in pair.run(FAILED).error
    for magic in ("%debug", "%dist_debug", "%dist_debug -r 1"):
        said = pair.run(magic, typed=["p x", "up", "up", "q"])
        assert said.prompts == ["[rank 1] ipdb> "] * 4
        lines = body(said)
        assert lines[1] == "ZeroDivisionError: division by zero"
        assert "----> 3     return 1 / x" in lines
        assert lines[lines.index("ipdb> p x") + 1] == "0"
        assert "*** Oldest frame" in lines
    assert pair.run("%dist_debug").error.startswith("KeyboardInterrupt: Stopped on rank 1")
    assert "p x\n0" in pair.run("%debug", typed=["p x", "q"]).text  # Stop has lost nothing
    pair.run("%pdb on")
    said = pair.run(FAILED, typed=["q"])
    assert said.prompts == ["[rank 1] ipdb> "]
    assert said.errors
    # Nothing has run: the failure before is not looked at in its place.
    said = pair.run("%%distributed\nx = = 3", typed=["q"])
    assert (said.prompts, said.errors[0]["ename"]) == ([], "CellSyntaxError")
    pair.run("%pdb off")
    pair.run("%dist_clean")
    assert "no exception:" in pair.run("%debug").errors[0]["evalue"]
    pair.run("def mine(y):\n    1 / y\nmine(0)")
    said = pair.run("%debug", typed=["p y", "q"])
    assert said.prompts == ["ipdb> "] * 2

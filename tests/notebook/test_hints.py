"""Tests of `nbdist.notebook.extension`: a plain cell that uses a name of the workers."""

from __future__ import annotations

import pytest

from nbdist.output.ansi import strip
from tests.notebook.front_end import Notebook, body, lasting

two = lasting(
    "%load_ext nbdist",
    "shipped = 1",
    "%%distributed -n 2\nimport torch.nn as nn\nmodel, used = nn.Linear(1, 1), shipped",
    "%%rank 1\nlonely = 1",
    "%%distributed --pool other -n 1\ntheirs = 1",
)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("model", "`model` is on ranks 0-1: begin the cell with %%distributed, or "
                  "`%dist_gather model`"),
        ("lonely + 1", "`lonely` is on rank 1: begin the cell with %%distributed, or "
                       "`%dist_gather lonely`"),
        ("def f():\n    return model\nf()", "`model` is on ranks 0-1: begin the cell with "
                                            "%%distributed, or `%dist_gather model`"),
        ("nn", "`nn` is on ranks 0-1: begin the cell with %%distributed, or import it here too"),
        ("del shipped\nshipped", "`shipped` is on ranks 0-1: begin the cell with "
                                 "%%distributed, or `%dist_gather shipped`"),
        ("theirs", "`theirs` is on rank 0: begin the cell with %%distributed --pool other, or "
                   "`%dist_gather --pool other theirs`"),
        ("rank", "`rank` is each worker's own: begin the cell with %%distributed"),
        ("dist", "the workers have `dist`: begin the cell with %%distributed, or "
                 "`import torch.distributed as dist` here"),
        ("modle", "name 'modle' is not defined"),
    ],
)  # fmt: skip
def test_where_a_name_is(two: Notebook, source: str, said: str) -> None:
    """The error says who has it and how to come by it; the user's own line stays above."""
    ran = two.run(source)
    (error,) = ran.errors
    assert (error["ename"], error["evalue"]) == ("NameError", said)
    assert ran.reply["evalue"] == said
    text = strip("\n".join(error["traceback"]))
    assert source.splitlines()[-1] in text
    assert text.endswith(f"NameError: {said}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("!touch {model}.bak", "`model` is on ranks 0-1: begin the cell with %%distributed"),
        ("mine = 1\n!touch $mine $model", "; `$$model` is the shell's own. Nothing has run."),
        ("files = !touch $rank", "`rank` is each worker's own: begin the cell"),
        ("%cd {model.path}", "`model` is on ranks 0-1"),
        ("def f(own):\n    !touch {own} {model}\nf(1)", "`model` is on ranks 0-1"),
    ],
)
def test_what_a_command_cannot_fill_in(two: Notebook, source: str, said: str) -> None:
    """It is refused with the name, and nothing runs; names that are here are filled in."""
    error = two.run(source).errors[0]
    assert said in error["evalue"]
    assert error["evalue"].endswith("Nothing has run.")


def test_what_a_command_fills_in(two: Notebook) -> None:
    """The notebook's, the calling function's, the shell's; not those of some ranks."""
    two.run("mine = 'm'\ndef f(own):\n    !echo {own} {mine}")
    for source, said in (
        ("f('o')", "o m"),
        ("!for model in 1 2; do echo $model; done", "1 2"),
        ("!echo [$$model] $mine", "[] m"),
        ("!echo {elsewhere}", "{elsewhere}"),
        ("found = !echo {mine}\nprint(found)", "['m']"),
    ):
        assert " ".join("".join(two.run(source).streams).split()) == said
    said = two.run("%%distributed\n!touch {lonely}.bak").error
    assert "is on rank 1 and not on rank 0: `%dist_sync lonely --from 1` copies it" in said
    assert body(two.run("%%rank 1\n!echo {lonely}")) == ["── rank 1 ──", "1"]
    said = two.run("%%distributed\ndef f(lonely):\n    !echo {lonely}\nf(7)")
    assert body(said) == ["── ranks 0-1 (same) ──", "7"]
    said = two.run("%%distributed -r 0\nlonely = 8\n!echo {lonely}")
    assert body(said) == ["── rank 0 ──", "8"]
    two.run("%%rank 0\ndel lonely")


def test_errors_that_lead_to_one_another(two: Notebook) -> None:
    """Ours is one line among them, whatever it was raised beside, with the user's calls alone."""
    gather = "get_ipython().run_line_magic('dist_gather', 'nowhere')"
    source = f"try: raise ExceptionGroup('', [OSError()])\nexcept* OSError: {gather}"
    (error,) = two.run(source).errors
    assert error["ename"] == "UsageError"
    assert "UsageError: no rank has `nowhere`." in strip("\n".join(error["traceback"]))


def test_after_the_workers_have_ended(two: Notebook) -> None:
    """Nobody has it any more, and once the extension is out IPython's own words are back."""
    two.run("%dist_shutdown")
    assert two.run("model").errors[0]["evalue"] == "name 'model' is not defined"
    two.run("%unload_ext nbdist")
    assert two.run("theirs").errors[0]["evalue"] == "name 'theirs' is not defined"
    assert two.value("'showtraceback' in vars(get_ipython())") is False

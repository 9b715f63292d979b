"""Tests of `nbdist.notebook.exporting.shell_code`, with what IPython really makes of magics."""

from __future__ import annotations

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.notebook.exporting.shell_code import is_shell_call, is_transparent, plain_call, quoted

TRANSFORM = TransformerManager().transform_cell


def call_in(source: str) -> ast.Call:
    tree = ast.parse(TRANSFORM(source))
    [call] = [node for node in ast.walk(tree) if is_shell_call(node)]
    assert isinstance(call, ast.Call)
    return call


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("%time f(x)", "f(x)"),
        ("%time x = f()", "x = f()"),
        ("%cd data", 'os.chdir("data")'),
        ("%cd ~/data", 'os.chdir(os.path.expanduser("~/data"))'),
        ("%env KEY=some value", 'os.environ["KEY"] = "some value"'),
        ("%set_env KEY 1", 'os.environ["KEY"] = "1"'),
        ("!ls", 'subprocess.run("ls", shell=True, check=False)'),
        ("!echo {rank} $n $HOME", 'subprocess.run(f"echo {rank} {n} $HOME", shell=True, '
         "check=False)"),
        ("!awk '{print $1}'", "subprocess.run(\"awk '{print $1}'\", shell=True, check=False)"),
        ("files = !ls", 'subprocess.run("ls", shell=True, check=False, capture_output=True, '
         "text=True).stdout.splitlines()"),
    ],
)  # fmt: skip
def test_what_has_a_counterpart(typed: str, code: str) -> None:
    """It does the same, and is Python."""
    plain = plain_call(call_in(typed), {"n"})
    assert plain.code == code
    ast.parse(plain.code)
    assert plain.needs == {name for name in ("os", "subprocess") if f"{name}." in code}
    assert plain.lost == ""


@pytest.mark.parametrize(
    ("typed", "why", "lost"),
    [
        ("%matplotlib inline", "for a notebook only", ""),
        ("%autoreload 2", "for a notebook only", ""),
        ("x?", "for a notebook only", ""),
        ("%pip install x", "install it before", "`%pip install x`: install it before the run"),
        ("%timeit f()", "runs its code many times", "`%timeit f()`: it only measures"),
        ("%mine 1", "has no counterpart", "`%mine 1` has no counterpart in a script"),
    ],
)
def test_what_has_none(typed: str, why: str, lost: str) -> None:
    """The reason is for the comment; what is worth a word is said."""
    plain = plain_call(call_in(typed), ())
    assert (plain.code, plain.why, plain.lost) == ("", why, lost)


def test_looking_on() -> None:
    """The code under these is the cell's own."""
    assert [is_transparent(name) for name in ("time", "capture", "timeit", "bash")] == [
        *(True, True),
        *(False, False),
    ]


@pytest.mark.parametrize("text", ["a\nb\n", "one", 'say """x"""\n\n', "back\\slash\n\n", 'end"'])
def test_texts_stay_what_they_are(text: str) -> None:
    """However it is quoted."""
    assert ast.literal_eval(quoted(text)) == text

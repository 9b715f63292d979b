"""Tests of `nbdist.tools.cell_code`, with what IPython really makes of magics."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.tools.cell_code import (
    cell_code,
    guarded,
    indented,
    is_shell_call,
    is_transparent,
    plain_call,
    quoted,
)

TRANSFORM = TransformerManager().transform_cell


def code(source: str, **options: Any) -> str:
    return cell_code(source, TRANSFORM, **options).text


def test_our_line_goes_and_the_rest_stays_as_it_was_typed() -> None:
    """Comments, quotes and empty lines too."""
    body = "# why\nx = {'a':1}   # here\n\n\ny = 'ä' + '''\n  b'''"
    assert code(f"# %%distributed -n 4 -r 0\n{body}") == body
    assert code(f"%%rank 0\n{body}") == body


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x", "print(repr(x))"),
        ("a = 1\nf(\n    a\n)  # last", "a = 1\nprint(repr(f(\n    a\n)))  # last"),
        ("print(x)", "print(x)"),
        ("x = 1", "x = 1"),
        ("'ä', x", "print(repr(('ä', x)))"),
        ("('ä', x)", "print(repr(('ä', x)))"),
        ("(1), (2)", "print(repr(((1), (2))))"),
        ("x;", "print(repr(x));"),
    ],
)
def test_the_last_value(source: str, told: str) -> None:
    """It is printed where the notebook showed it, and the code is as it was where it did not."""
    assert code(source) == source
    assert code(source, shows_value=True) == told
    ast.parse(told)


def test_a_tuple_is_one_value() -> None:
    """`a, b` has no brackets of its own."""
    said: list[str] = []
    exec(code("1, 2", shows_value=True), {"print": said.append})
    assert said == ["(1, 2)"]


def test_magics_in_their_places() -> None:
    """Alone they are comments, inside of something `pass` keeps this whole."""
    found = cell_code("%matplotlib inline\nif x:\n    %who\n    y = 1\n!ls $x", TRANSFORM, {"x"})
    assert found.text.split("\n") == [
        "# %matplotlib inline: for a notebook only",
        "if x:",
        "    pass  # %who: for a notebook only",
        "    y = 1",
        'subprocess.run(f"ls {x}", shell=True, check=False)',
    ]
    assert found.needs == {"subprocess"}
    assert found.lost == ()


@pytest.mark.parametrize(
    ("source", "text", "lost"),
    [
        ("%%time\nx = 1", "x = 1", 0),
        ("%%capture out\nx = 1", "x = 1", 0),
        ("# %%distributed\n%%bash\nls\npwd\n",
         'subprocess.run(["bash", "-c", """\\\nls\npwd\n"""], check=True)', 0),
        ("%%writefile a.txt\nx\n", 'Path("a.txt").write_text("x\\n")', 0),
        ("%%html\n<b>\n", "# left out, as it has no counterpart:\n# %%html\n# <b>", 1),
        ("%%timeit\nf()", "# left out, as it runs what is under it many times:\n# %%timeit\n# f()",
         1),
    ],
)  # fmt: skip
def test_cell_magics(source: str, text: str, lost: int) -> None:
    """The code under those that look on runs; others become code or are named."""
    found = cell_code(source, TRANSFORM)
    assert found.text == text
    assert len(found.lost) == lost
    ast.parse(found.text)


def test_the_group_is_the_script_s() -> None:
    """What a tutorial does to it itself is left out, wherever it stands."""
    source = 'dist.init_process_group("gloo")\ndef end():\n    dist.destroy_process_group()'
    assert code(source).split("\n") == [
        '# dist.init_process_group("gloo"): the script calls init_process_group itself',
        "def end():",
        "    pass  # dist.destroy_process_group(): the script calls destroy_process_group itself",
    ]


def test_awaiting() -> None:
    """The cell becomes a function whose names are the script's; it runs and does the same."""
    source = "import asyncio\nx = await f()\nasync with y as z:\n    pass\nx"
    found = cell_code(source, TRANSFORM, shows_value=True, title="cell_3")
    assert found.text.startswith("async def cell_3():\n    global x, z\n    x = await f()\n")
    assert found.text.endswith("    print(repr(x))\n\n\nasyncio.run(cell_3())")
    assert found.needs == {"asyncio"}
    assert [each.name for each in found.imports] == ["asyncio"]
    assert "cell_3" in found.lost[0]
    assert code("async def f():\n    await g()") == "async def f():\n    await g()"


@pytest.mark.parametrize(
    ("source", "left", "names"),
    [
        ("# one\nimport os\nfrom a import b as c, d\n\nx = 1", "# one\n\nx = 1", "os c d"),
        ("x = 1\nimport os\nos.getcwd()", "x = 1\nos.getcwd()", "os"),
        ("os = 1\nimport os", "os = 1\nimport os", ""),
        ("import os; x = 1", "import os; x = 1", ""),
        ("import sys\nsys.path.append('x')\nimport mine",
         "sys.path.append('x')\nimport mine", "sys"),
        ("try:\n    import os\nexcept E: pass", "try:\n    import os\nexcept E: pass", ""),
        ("from x import *", "from x import *", ""),
    ],
)  # fmt: skip
def test_imports_that_can_stand_at_the_top(source: str, left: str, names: str) -> None:
    """Not those that come after what they may have to see."""
    found = cell_code(source, TRANSFORM)
    assert found.text == left
    assert [each.name for each in found.imports] == names.split()


def test_some_ranks() -> None:
    """The texts in the code keep their lines."""
    text = "x = '''a\n  b\nc'''\nif y:\n    pass"
    assert guarded(text, [2]) == ("if rank == 2:\n    x = '''a\n  b\nc'''\n    if y:\n        pass")
    assert guarded("# nothing", [0, 3]).split("\n")[0] == "if rank in (0, 3):"
    ast.parse(guarded("# nothing", [0, 3]))


LINES = some.lists(
    some.sampled_from(
        ["x = '''a", "b'''", 'f"""{1', '}"""', "if 1:", "    y = 1", "(", ")", "# c", "", '"""a"""']
    ),
    max_size=8,
)


@given(LINES)
def test_indenting_changes_nothing(lines: list[str]) -> None:
    """Whatever the code, under a condition it is the same code."""
    text = "\n".join(lines)
    try:
        plain = ast.parse(text)
    except SyntaxError:
        return
    if plain.body:
        [found] = ast.parse(f"if True:\n{indented(text)}").body
        assert isinstance(found, ast.If)
        assert [ast.dump(each) for each in found.body] == [ast.dump(each) for each in plain.body]


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

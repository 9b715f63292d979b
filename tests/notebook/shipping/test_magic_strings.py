"""The Python in magics and `!` lines, as IPython's transformer leaves them."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.shipping.magic_strings import code_in_magic


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("get_ipython().run_line_magic('time', 'x = f(y)')", ["x = f(y)"]),
        ("get_ipython().run_line_magic('timeit', '-n 10 -q f(y)')", ["f(y)"]),
        ("get_ipython().run_cell_magic('time', '', 'a\\n%matplotlib inline\\nb')", ["a", "b"]),
        ("get_ipython().run_cell_magic('bash', '', 'echo $x')", ["f'{x}'"]),
        ("get_ipython().run_cell_magic('distributed', '', 'theirs = 1')", []),
        ("get_ipython().run_line_magic('cd', '{folder}')", ["f'{folder}'"]),
        ("get_ipython().run_line_magic('pip', 'install x')", []),
        ("get_ipython().system('ls {a:>3} ${b} $$PID')", ["f'{a:>3}'", "f'{b}'", "f'{b}'"]),
        ("get_ipython().getoutput('cat $file')", ["f'{file}'"]),
        ("get_ipython().run_line_magic(name, text)", []),
        ("get_ipython().ask_exit('f(x)')", []),
        ("shell.run_line_magic('time', 'f(x)')", []),
        ("f('x')", []),
    ],
)
def test_what_a_magic_would_run(call: str, code: list[str]) -> None:
    """Statements, and what braces and dollars would fill in; nothing of other languages."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert [ast.unparse(each) for each in code_in_magic(node)] == code

"""Tests of `nbdist.cluster.why_not_there`: what ssh, shells and Python say, in words with a remedy.

That they say it is seen in `tests/hosts/test_bad_input.py`.
"""

from __future__ import annotations

import pytest

from nbdist import __version__
from nbdist.cluster.why_not_there import why_refused


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "ssh: Could not resolve hostname b.invalid: Name or service not known",
            "the name b.invalid cannot be resolved: ",
        ),
        ("root@10.0.0.2: Permission denied (publickey).", "it refused the login (publickey): `ssh"),
        (
            "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
            "Host key verification failed.",
            "its host key is not the one that ssh knows: `ssh b` in",
        ),
        (
            "No ED25519 host key is known for b and you have requested strict checking.\n"
            "Host key verification failed.",
            "ssh does not know its host key yet: `ssh b` once",
        ),
        (
            "ssh: connect to host 10.0.0.2 port 22: No route to host",
            "ssh cannot reach 10.0.0.2:22: No route to host",
        ),
        (
            "/usr/bin/python3: Error while finding module specification for 'nbdist.agent' "
            "(ModuleNotFoundError: No module named 'nbdist')",
            f"the interpreter there has no nbdist: `pip install nbdist=={__version__}` there",
        ),
        ("ModuleNotFoundError: No module named 'zmq'", "the interpreter there has no zmq: "),
        ("bash: line 1: /no/python: No such file or directory", "there is no /no/python there: "),
        ("bash: line 1: exec: /no/python: not found", "there is no /no/python there: "),
        ("sh: 1: exec: /no/python: not found", "there is no /no/python there: "),
        ("env: ‘pythonx’: No such file or directory", "there is no pythonx there: "),  # noqa: RUF001
        ("sh: 1: exec: /etc/passwd: Permission denied", "/etc/passwd cannot be executed there: "),
        (
            "nbdist: b cannot reach the notebook's machine at 10.0.0.1:4000: no answer within 5 s",
            "b cannot reach the notebook's machine at 10.0.0.1:4000: no answer within 5 s",
        ),
    ],
)
def test_known_reasons(line: str, said: str) -> None:
    """The first that is known among the lines; whatever else stands there."""
    found = why_refused("b", ["Welcome to b", *line.splitlines(), "bye"])
    assert found.startswith(said)
    assert "\n" not in found


def test_other_reasons() -> None:
    """They are for the lines themselves to tell."""
    assert why_refused("b", ["Segmentation fault"]) == ""
    assert why_refused("b", []) == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sh: 1: exec: no-such: not found", "there is no no-such there: `--wrap` names it"),
        ("apptainer: /no/img: No such file or directory", "there is no /no/img there: `--wrap`"),
        ("sh: 1: /etc/passwd: Permission denied", "/etc/passwd cannot be executed there: `--wrap`"),
        (
            "no-such: /no/python: not found",
            "there is no /no/python there: `--python` names the int",
        ),
    ],
)
def test_a_wrapper_is_not_the_interpreter(line: str, said: str) -> None:
    """The option is named by which the program was asked for."""
    command = "ssh b -- 'exec no-such /no/img /etc/passwd /no/python -P -m nbdist.agent --ticket'"
    assert why_refused("b", [line], command).startswith(said)

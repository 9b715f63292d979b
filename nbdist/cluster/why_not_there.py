"""Why an agent did not start on another machine, by what ssh, a shell or Python said; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist import __version__
from nbdist.wire.interpreter import MODULE

_KNOWN = (
    (
        r"Could not resolve hostname (\S+?):",
        "the name {0} cannot be resolved: an address, or a `HostName` in ~/.ssh/config",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that ssh knows: `ssh {host}` in a terminal says which",
    ),
    (
        r"Host key verification failed",
        "ssh does not know its host key yet: `ssh {host}` once, in a terminal",
    ),
    (
        r"Permission denied \((.*?)\)",
        "it refused the login ({0}): `ssh {host} true` has to work without a password",
    ),
    (
        r"ssh: connect to host (\S+) port (\d+): (.*)",
        "ssh cannot reach {0}:{1}: {2}",
    ),
    (
        r"No module named '?nbdist",
        "the interpreter there has no nbdist: `pip install nbdist=={version}` there, or `--python`"
        " names another one",
    ),
    (
        r"No module named '?(torch|zmq|psutil|ipykernel)\b",
        "the interpreter there has no {0}: `--python` names one that has it",
    ),
    (
        r"(?:exec: |env: |sh: .*?: )*['\u2018]?(/?[^\s:'\u2018\u2019]+)['\u2019]?: "
        r"(?:not found|No such file or directory|command not found)",
        "there is no {0} there: {named_by}, by its path on all machines",
    ),
    (
        r"(?:exec: )?(\S+): Permission denied",
        "{0} cannot be executed there: {named_by}",
    ),
    (r"^nbdist: (.*)", "{0}"),
)


def why_refused(host: str, lines: Sequence[str], command: str = "") -> str:
    """Word the first reason that is known among these lines, and the remedy; "" for none.

    The lines were left by `command`.
    """
    text = "\n".join(lines)
    for pattern, said in _KNOWN:
        if found := re.search(pattern, text, re.MULTILINE):
            named_by = _named_by(found.groups(), command)
            known = {"host": host, "version": __version__, "named_by": named_by}
            return said.format(*found.groups(), **known).rstrip(". ")
    return ""


def _named_by(programs: Sequence[str], command: str) -> str:
    """Say which option names a program of this command: the interpreter, or what wraps it."""
    *wrapper, _ = re.split(r"[\s'\"]+", command.partition(f" {' '.join(MODULE)} ")[0])
    is_wrapper = not {*wrapper}.isdisjoint(programs)
    return "`--wrap` names it" if is_wrapper else "`--python` names the interpreter"

"""What IPython makes of magics and `!` lines, as plain Python for a script; pure.

`transform_cell` has made calls of them, `get_ipython().system("ls")`: each becomes code that does
the same under torchrun, or a comment with the reason why there is none.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass

from nbdist.notebook.exporting.origins import quoted as in_quotes

_BRACES = re.compile(r"\{([^{}]+)\}")
_DOLLAR = re.compile(r"\$(\$?)\{?([A-Za-z_]\w*)\}?")
_OPTIONS = re.compile(r"^(?:\s*-\w+(?:\s+\d+)?)+\s+")

_FOR_NOTEBOOKS = frozenset(
    {
        *("matplotlib", "pylab", "config", "load_ext", "reload_ext", "autoreload", "colors"),
        *("pinfo", "pinfo2", "psource", "who", "whos", "history", "precision", "xmode"),
    }
)
_INSTALLS = frozenset({"pip", "conda", "mamba", "uv"})
_TIMES = frozenset({"time", "prun", "memit", "mprun", "lprun"})


@dataclass(frozen=True, slots=True)
class Plain:
    """A call of IPython's as Python: `code`, or "" and why there is none.

    `lost` says what is not carried over, "" for nothing worth a word.
    """

    code: str
    needs: frozenset[str] = frozenset()
    why: str = ""
    lost: str = ""


def is_shell_call(node: ast.AST) -> bool:
    """Say whether it is a call such as `get_ipython().run_line_magic("time", "f()")`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")))):
            return True
        case _:
            return False


def plain_call(call: ast.Call, known: Collection[str]) -> Plain:
    """Write a call of the shell as Python; `known` are names that `$name` can stand for."""
    assert isinstance(call.func, ast.Attribute)
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    match call.func.attr, texts:
        case "system" | "system_raw" | "system_piped", [str(command)]:
            return _command(command, known, "subprocess.run({}, shell=True, check=False)")
        case "getoutput" | "getoutput_all", [str(command)]:
            run = "subprocess.run({}, shell=True, check=False, capture_output=True, text=True)"
            return _command(command, known, f"{run}.stdout.splitlines()")
        case "run_line_magic", [str(name), str(line), *_]:
            return _line_magic(name, line)
        case "run_cell_magic", [str(name), str(line), str(body)]:
            return cell_magic(name, line, body)
        case _:
            why = "IPython is not there"
            return Plain("", why=why, lost=f"`get_ipython().{call.func.attr}`: {why}")


def cell_magic(name: str, line: str, body: str) -> Plain:
    """Write a cell of another language, or a file, as Python; see `is_transparent` for the rest."""
    if name in ("bash", "sh") and not line.strip():
        code = f'subprocess.run(["{name}", "-c", {quoted(body)}], check=True)'
        return Plain(code, frozenset({"subprocess"}))
    if name in ("writefile", "file") and len(words := shlex.split(line)) == 1:
        return Plain(f'Path("{words[0]}").write_text({quoted(body)})', frozenset({"Path"}))
    why = "runs what is under it many times" if name == "timeit" else "has no counterpart"
    return Plain("", why=why, lost=f"`%%{name}` {why}; what is under it is left out")


def is_transparent(name: str) -> bool:
    """Say whether a cell magic only looks on while the code under it runs."""
    return name in _TIMES or name == "capture"


def quoted(text: str) -> str:
    """Write a text of several lines as a person would."""
    if text.count("\n") > 1 and '"""' not in text and "\\" not in text and not text.endswith('"'):
        return f'"""\\\n{text}"""'
    return in_quotes(text)


def _line_magic(name: str, line: str) -> Plain:
    shown, line = f"%{name} {line}".strip(), line.strip()
    if name in _TIMES:
        code = _OPTIONS.sub("", line)
        return Plain(code) if code and _is_python(code) else Plain("", why="nothing to run")
    if name == "cd" and line and not line.startswith("-"):
        path = f'os.path.expanduser("{line}")' if line.startswith("~") else f'"{line}"'
        return Plain(f"os.chdir({path})", frozenset({"os"}))
    if name in ("env", "set_env") and (parts := re.split(r"\s*=\s*|\s+", line, maxsplit=1))[1:]:
        return Plain(f'os.environ["{parts[0]}"] = {in_quotes(parts[1])}', frozenset({"os"}))
    if name in _FOR_NOTEBOOKS or name in ("env", "cd"):
        return Plain("", why="for a notebook only")
    if name in _INSTALLS:
        return Plain("", why="install it before", lost=f"`{shown}`: install it before the run")
    if name == "timeit":
        return Plain("", why="runs its code many times", lost=f"`{shown}`: it only measures")
    return Plain("", why="has no counterpart", lost=f"`{shown}` has no counterpart in a script")


def _command(command: str, known: Collection[str], form: str) -> Plain:
    """Write a command for the system, with what IPython fills in as an f-string."""
    fills_in = any(_is_python(inner) for inner in _BRACES.findall(command))

    def name(found: re.Match[str]) -> str:
        nonlocal fills_in
        if found[1] or found[2] not in known:
            return found[0].replace("$$", "$")
        fills_in = True
        return f"{{{found[2]}}}"

    text = in_quotes(_DOLLAR.sub(name, command))
    text = f"f{text}" if fills_in else text
    if not _is_python(text):
        why = "what is filled in cannot be written"
        return Plain("", why=why, lost=f"`!{command}`: {why} here")
    return Plain(form.format(text), frozenset({"subprocess"}))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):  # ValueError: null bytes.
        return False
    return True

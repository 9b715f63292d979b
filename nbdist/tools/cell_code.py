"""A cell as part of a script: what is under its magic line, as plain Python; pure.

The text stays as it was typed, comments included; only the places change that a script has to
have otherwise.  IPython's `transform_cell` has made calls of magics and `!` lines,
`get_ipython().system("ls")`: each becomes code that does the same under torchrun, or a comment
with the reason why there is none.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import textwrap
import tokenize
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from nbdist.notebook.shipping.free_names import names_bound, names_used
from nbdist.tools.origins import quoted as in_quotes
from nbdist.tools.script_text import Imported, imported_by

Transform = Callable[[str], str]
"""IPython's, which makes Python of magics: `shell.transform_cell`."""

_OUR_LINE = re.compile(r"#[ ]%%(?:distributed|rank)\b[^\n]*(?:\n|$)")
_MAGIC = re.compile(r"\s*%%(\w+)([^\n]*)(?:\n|$)")
EARLY = re.compile(r"environ|sys\.path|putenv|set_start_method|chdir")
"""What code can do that an import after it has to see."""

_GROUP = ("init_process_group", "destroy_process_group")


@dataclass(frozen=True, slots=True)
class CellCode:
    """A cell's code, and the imports that it began with, which can stand at the top.

    `needs` are modules that the code uses of its own, `lost` what is not carried over.
    """

    text: str
    imports: tuple[Imported, ...] = ()
    needs: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()


def cell_code(
    source: str,
    transform: Transform,
    known: Collection[str] = (),
    *,
    shows_value: bool = False,
    title: str = "cell",
) -> CellCode:
    """Make a script's code of a cell as it was sent to the workers.

    `known` are names that `$name` in a command can stand for; with `shows_value` the last
    line's value is printed; `title` is a word that names the cell.
    """
    source = _OUR_LINE.sub("", source, count=1) if source.startswith("# %%") else source
    if magic := _MAGIC.match(source):
        name, line, body = magic[1], magic[2].strip(), source[magic.end() :]
        if name in ("distributed", "rank") or is_transparent(name):
            return cell_code(body, transform, known, shows_value=shows_value, title=title)
        return _statement(cell_magic(name, line, body), source)
    try:
        text = transform(source)
        tree = ast.parse(text)
    except SyntaxError:
        why = "it cannot be read as Python"
        return CellCode(_commented(source, why), lost=(f"{title}: {why}",))
    editing = _Editing(text, known)
    editing.read(tree)
    if shows_value:
        editing.print_last(tree)
    code = CellCode(editing.text.strip("\n"), (), editing.needs, tuple(editing.lost))
    code = _without_imports(code)
    return _in_event_loop(code, title) if _awaits(tree) else code


def guarded(text: str, ranks: Collection[int]) -> str:
    """Have it run on these ranks only."""
    first, *others = sorted(ranks)
    condition = (
        f"rank in ({first}, {', '.join(map(str, others))})" if others else f"rank == {first}"
    )
    body = text if _has_code(text) else f"{text}\npass"
    return f"if {condition}:\n{indented(body)}"


def indented(text: str) -> str:
    """Indent code by four spaces, but not the lines inside its strings."""
    inside: set[int] = set()
    begun = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            begun = token.start[0]
        elif kind in ("STRING", "FSTRING_END", "TSTRING_END"):
            first = token.start[0] if kind == "STRING" else begun
            inside.update(range(first + 1, token.end[0] + 1))
    lines = text.split("\n")
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(lines, 1)
    )


# --- changes in the text ----------------------------------------------------------------------


class _Editing:
    """Replaces parts of a source; what lies between stays as it was typed."""

    def __init__(self, source: str, known: Collection[str]) -> None:
        self._bytes = source.encode()
        starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._known = known
        self._edits: list[tuple[int, int, str]] = []
        self.needs: frozenset[str] = frozenset()
        self.lost: list[str] = []

    @property
    def text(self) -> str:
        """The source with all changes."""
        made, at = b"", 0
        for begin, end, text in sorted(self._edits):
            made += self._bytes[at:begin] + text.encode()
            at = end
        return (made + self._bytes[at:]).decode()

    def read(self, tree: ast.Module) -> None:
        """Replace what only IPython can run, and what the script does itself."""
        for statement in _statements(tree):
            inner = [node for node in _own_parts(statement) if is_shell_call(node)]
            plains = [(call, plain_call(call, self._known)) for call in inner]  # type: ignore[arg-type]
            for _, plain in plains:
                self.needs |= plain.needs if plain.code else frozenset()
                self.lost += [plain.lost] if plain.lost else []
            missing = [plain for _, plain in plains if not plain.code]
            if missing:
                self._leave_out(statement, missing[0].why)
            for call, plain in [] if missing else plains:
                self._replace(call, plain.code)
            if not plains and (name := _group_call(statement)):
                self._leave_out(statement, f"the script calls {name} itself")

    def print_last(self, tree: ast.Module) -> None:
        """Print the value of the last line, as the notebook showed it."""
        match tree.body:
            case [*_, ast.Expr(value) as last] if not is_shell_call(value):
                if not ast.unparse(value).startswith("print("):
                    begin, end = self._span(value)
                    # `a, b` has no brackets of its own.
                    typed = self._bytes[begin:end].decode()
                    bare = isinstance(value, ast.Tuple) and ast.unparse(
                        ast.parse(f"f({typed})")
                    ) != ast.unparse(ast.parse(f"f(({typed}))"))
                    opening, closing = ("((", ")))") if bare else ("(", "))")
                    self._edits += [
                        (begin, begin, f"print(repr{opening}"),
                        (end, self._span(last)[1], closing),
                    ]

    def _leave_out(self, statement: ast.stmt, why: str) -> None:
        begin, end = self._span(statement)
        typed = self._bytes[begin:end].decode()
        comment = f"# {as_typed(typed)}: {why}"
        self._edits.append((begin, end, f"pass  {comment}" if statement.col_offset else comment))

    def _replace(self, node: ast.AST, text: str) -> None:
        self._edits.append((*self._span(node), text))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return begin, end


def as_typed(python: str) -> str:
    """Write what IPython has made of a line as it was typed; the first line of others."""
    line = re.compile(r"get_ipython\(\)\.run_line_magic\((['\"])(\w+)\1, (.*)\)$")
    system = re.compile(r"get_ipython\(\)\.(?:system|getoutput)\((.*)\)$")
    first = python.strip().split("\n")[0]
    if found := line.search(first):
        return f"{first[: found.start()]}%{found[2]} {_literal(found[3])}".strip()
    if found := system.search(first):
        return f"{first[: found.start()]}!{_literal(found[1])}"
    return first


def _literal(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        return text


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _own_parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Walk a statement's expressions, and not the statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        if not is_shell_call(node):
            waiting += [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt)]


def _group_call(statement: ast.stmt) -> str:
    """Name the function of torch.distributed that it calls, where the script does so itself."""
    match statement:
        case ast.Expr(ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name if name in _GROUP else ""
        case _:
            return ""


# --- the whole --------------------------------------------------------------------------------


def _statement(plain: Plain, source: str) -> CellCode:
    """Make a cell of one statement, or of a comment."""
    lost = (plain.lost,) if plain.lost else ()
    text = plain.code or _commented(source, plain.why)
    return CellCode(text, (), plain.needs if plain.code else frozenset(), lost)


def _commented(source: str, why: str) -> str:
    lines = [f"# {line}".rstrip() for line in source.strip("\n").split("\n")]
    return "\n".join([f"# left out, as it {why.removeprefix('it ')}:", *lines])


def _has_code(text: str) -> bool:
    return bool(ast.parse(text).body)


def _without_imports(code: CellCode) -> CellCode:
    """Take out the imports that the cell makes at any rate, each on lines of its own.

    Only those that it begins with where it does what later ones may have to see.
    """
    lines, imports, taken = code.text.split("\n"), list[Imported](), set[int]()
    body = ast.parse(code.text).body
    for at, node in enumerate(body):
        found = imported_by(node)
        numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        shares = any(other.lineno in numbers for other in body[at + 1 : at + 2])
        before = "\n".join(lines[: node.lineno - 1])
        if found is None or shares or numbers & taken or _is_read_before(found, before):
            if EARLY.search(ast.unparse(node)):
                break
            continue
        imports += found
        taken |= numbers
    rest = "\n".join(line for number, line in enumerate(lines, 1) if number not in taken)
    return replace(code, text=rest.strip("\n"), imports=tuple(imports))


def _is_read_before(found: list[Imported], before: str) -> bool:
    names = {each.name.partition(".")[0] for each in found}
    return not names.isdisjoint(names_used(before) | names_bound(before))


def _awaits(tree: ast.Module) -> bool:
    """Say whether it awaits outside of functions."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if isinstance(node, ast.comprehension) and node.is_async:
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def _in_event_loop(code: CellCode, title: str) -> CellCode:
    """Wrap a cell that awaits into a function of its own, whose names are the script's."""
    bound = ", ".join(sorted(names_bound(code.text)))
    names = [f"    global {line.rstrip(',')}" for line in textwrap.wrap(bound, 70)]
    body = "\n".join([f"async def {title}():", *names, indented(code.text)])
    lost = (f"tasks that {title} leaves running end with its event loop",)
    text = f"{body}\n\n\nasyncio.run({title}())"
    return replace(code, text=text, needs=code.needs | {"asyncio"}, lost=(*code.lost, *lost))


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

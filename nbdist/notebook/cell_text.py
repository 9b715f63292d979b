"""Reads the text of cells: their magics, the ranks that magics name, and whether cells are Python.

Runs in the notebook's process, for cells that the user runs, and for completion while users type.
The functions may read from the shell, but change neither the shell nor the workers.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from IPython.core.inputtransformer2 import make_tokens_by_line

from nbdist.errors import UsageError
from nbdist.notebook.free_names import names_bound, names_in_commands
from nbdist.notebook.options import HELP_FLAGS, HELP_MAGIC, POOL, RANKS, join_ranks
from nbdist.words import format_ranks, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.name_table import NameTable
    from nbdist.world.world import World


CELL_MAGICS = ("distributed", "rank")  # the magics whose cells run on the workers

_FIRST = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*%%(\w+)")
_MAGIC_LINE = re.compile(r"[ \t]*%%?(\w+)(.*)")
_ROOT_NAME = re.compile(
    r"(?<![\w.)\]}'\"])([^\W\d]\w*)"
    r"((?:\.\w*|\[[^][]*\]|\([^()]*\))*(?:\[\s*[\"'][^\"'\]]*)?)$"
)
"""Matches the expression at the end of a text, such as `losses`, `losses[0].it` or `config["l`.

The expression is a name, perhaps with attributes, calls and items, and with an unfinished key.
"""


# Shown while auto mode is on: below distributed cells, and in panels also below magics.
AUTO_NOTE = "auto mode: `%%local` on the first line runs a cell here"


@dataclass
class AutoMode:
    """The state of auto mode, which is on if `pool` names the pool on which plain cells run."""

    pool: str | None = None
    running: str = ""  # the code that runs in place of the last cell; "" if the cell itself runs
    typed: str = ""  # the last cell as the user typed it
    ran: dict[int, str] = field(default_factory=dict)  # code that replaced cells, by cell number
    loaded: set[str] = field(default_factory=set)  # packages of extensions that cells have loaded


@dataclass(frozen=True, slots=True)
class MagicLine:
    """A line that begins with a magic.

    `name` is the magic without `%`, `text` is the line after the name, and `start` is the position
    of `text` in the cell.
    """

    name: str
    text: str
    start: int

    @property
    def pool(self) -> str | None:
        """The value of `--pool` in the line; None if the line has no `--pool`."""
        match = POOL.search(self.text)
        return match[1] if match else None

    @property
    def ranks(self) -> str | None:
        """The text in the line that selects ranks, such as `0,2-3`; None if no text does.

        After `%%rank` it is the line without `--pool NAME` and without blanks.  After other magics
        it is the value of `-r`; several values are joined by commas.
        """
        if self.name == "rank":
            return "".join(POOL.sub(" ", self.text).split()) or None
        return join_ranks(RANKS.findall(self.text))


def cell_magic(code: str) -> MagicLine | None:
    """Return the cell magic that begins a cell, perhaps below comments and blank lines.

    Returns None if the cell begins with other code.
    """
    match = _FIRST.match(code)
    if match is None:
        return None
    text = code[match.end() :].partition("\n")[0]
    return MagicLine(match[1], text, match.end())


def magic_at(code: str, cursor: int) -> MagicLine | None:
    """Return the magic that begins the line with the cursor; None if no magic begins it."""
    match = _MAGIC_LINE.match(code, code.rfind("\n", 0, cursor) + 1)
    return MagicLine(match[1], match[2], match.start(2)) if match else None


def as_comment(code: str) -> str:
    """Return a cell with `# ` in place of the `%%` of its cell magic.

    All characters keep their positions, so a position of the cursor is right in the returned code
    too.  A cell without a cell magic is returned unchanged.
    """
    match = _FIRST.match(code)
    if match is None:
        return code
    place = code.index("%%", match.start(1) - 2)
    return f"{code[:place]}# {code[place + 2 :]}"


def root_at(code: str, cursor: int) -> tuple[str, bool]:
    """Return the first name of the expression that ends at the cursor, and whether more follows it.

    Returns ("losses", True) for `losses[0]`, ("losses", False) for `losses`, and ("", False) if no
    such expression ends at the cursor.
    """
    match = _ROOT_NAME.search(code[:cursor])
    return (match[1], bool(match[2])) if match else ("", False)


# --- lines above a cell's magic, which IPython itself does not allow --------------------------

NBDIST_CELL_MAGICS = ("distributed", "rank", "local")

AT = "at line "
"""The beginning of "at line 3", which tells users where a misplaced cell magic is."""

_CELL_MAGIC_LINE = re.compile(
    rf"[ \t]*%%({'|'.join(NBDIST_CELL_MAGICS)})(?=[\s\[]|$)(.*)", re.DOTALL
)
_BRACKETS = re.compile(r"\s*\[([^\]\n]*)\]")
_LOAD_NBDIST = re.compile(r"[ \t]*%load_ext[ \t]+nbdist[ \t]*(?:#.*)?$", re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'?|\"[^\"]*\"?")
_COMMENT_START = re.compile(r"(?:^|\s)#")
_NOTEBOOKS = re.compile(r"(?:(\w+)\s*=\s*)?%(dist_\w+)(?:[ \t]+(.*))?")


LineMagic = tuple[str, str, str]
"""A line magic: its name, the text after the name, and the variable to assign, or ""."""


def transform_first_lines(lines: list[str], *, local_is_plain: bool = True) -> list[str]:
    """Return a cell's lines with nbdist's cell magic as the first line, as IPython requires.

    Blank lines, comments and `%load_ext nbdist` above the magic move below it, and `%load_ext`
    becomes a comment, so that all other lines keep their numbers.  A cell whose magic is below
    other code becomes a line that raises an error.  A cell without a cell magic of nbdist is
    returned unchanged.

    `%%rank[0,1]` of nbdistributed becomes `%%rank 0,1`.  `%%distributed -h` without more lines,
    which IPython refuses, becomes `%dist_help distributed`.  With `local_is_plain`, `%%local`
    becomes a comment, so that the cell is a plain cell.  A terminal needs `%%local` itself: the
    terminal would run a cell without a cell magic as soon as the first line is complete.
    """
    if place := find_misplaced_magic(lines):
        name, number = place
        return [f"get_ipython().run_line_magic('%{name}', '{AT}{number}')\n"]
    above = _count_above(lines)
    match = _CELL_MAGIC_LINE.fullmatch(lines[above]) if above < len(lines) else None
    if match is None:
        return lines
    name, text = match.groups()
    if {*HELP_FLAGS} & {*text.split()} and not any(map(str.strip, lines[above + 1 :])):
        return [f"%{HELP_MAGIC} {name}\n"]
    if name == "rank":
        text = _BRACKETS.sub(lambda ranks: " " + "".join(ranks[1].split()), text, count=1)
    first = f"{'# ' * (name == 'local' and local_is_plain)}%%{name}{text}"
    if not first.endswith("\n"):
        first += "\n"
    comments = [f"# {line}" if _LOAD_NBDIST.match(line) else line for line in lines[:above]]
    return [first, *comments, *lines[above + 1 :]]


def find_misplaced_magic(lines: Sequence[str]) -> tuple[str, int] | None:
    """Return the name and the line number of the first cell magic of nbdist below other code.

    Returns None if there is no such magic, or if a cell magic of another package begins the cell or
    the lines below nbdist's own magic.
    """
    begin = _count_above(lines)
    is_first = begin < len(lines) and _CELL_MAGIC_LINE.fullmatch(lines[begin]) is not None
    begin += is_first
    body = [*lines[begin:]]
    code = next(iter(body[_count_above(body) :]), "")
    is_of_another = code.lstrip().startswith("%%") and not _CELL_MAGIC_LINE.match(code)
    if is_of_another or not any("%%" in line and _CELL_MAGIC_LINE.match(line) for line in body):
        return None
    added = int(is_first and "--auto" in lines[begin - 1].split())
    for tokens in make_tokens_by_line(body):
        token = next((each for each in tokens if each.string.strip()), None)
        if token is not None and token.string == "%":
            row = token.start[0]
            if match := _CELL_MAGIC_LINE.fullmatch(body[row - 1]):
                return match[1], begin + row - added
    return None


def split_off_magics(cell: str) -> tuple[str, list[LineMagic]]:
    """Split a cell into the part for the ranks and the `%dist_...` magics at the cell's end.

    Returns the whole cell and an empty list if the cell begins with a cell magic, or if it has no
    other code than such magics.
    """
    lines, magics = cell.splitlines(keepends=True), list[LineMagic]()
    if cell.lstrip().startswith("%%"):
        return cell, magics
    end = at = len(lines)
    while at:
        at -= 1
        if _is_comment(lines[at]):
            continue
        if (magic := _NOTEBOOKS.fullmatch(lines[at].rstrip())) is None:
            return "".join(lines[:end]), magics
        magics.insert(0, (magic[2], magic[3] or "", magic[1] or ""))
        end = at
    return cell, []


def remove_comment(line: str) -> str:
    """Return a magic's line without the comment at its end.

    A comment begins with `#` at the start of the line or after a space, but not in quotes.
    """
    plain = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), line)
    match = _COMMENT_START.search(plain)
    return line[: match.start()] if match else line


def _count_above(lines: Sequence[str]) -> int:
    """Return how many lines at the beginning are blank, comments or `%load_ext nbdist`."""
    code = (
        at for at, line in enumerate(lines) if not (_is_comment(line) or _LOAD_NBDIST.match(line))
    )
    return next(code, len(lines))


def _is_comment(line: str) -> bool:
    text = line.strip()
    return not text or text.startswith("#")


# --- a cell as it was typed -------------------------------------------------------------------

LOADING = ("load_ext", "reload_ext", "unload_ext")

REMEDIES = {
    "'return' outside function": "The last line of a cell is its value: leave `return` out.",
    "'yield' outside function": "`yield` belongs in a function: `print` shows values one by one.",
}
"""Advice to users, by the message of Python's SyntaxError."""

_TRAINING = re.compile(
    r"\b(?:DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|optim)\b"
)

_WORD = re.compile(r"\s*([^\W\d]\w*)(?:[ \t]+[^=\s].*)?\s*")
"""Matches a cell of one line that may be a magic typed without `%`."""


class CellSyntaxError(UsageError, SyntaxError):
    """The error for a cell that is not Python, shown as IPython shows a syntax error."""

    def __init__(self, error: SyntaxError, shown: list[str]) -> None:
        line = f" (line {error.lineno} of the cell)" if error.lineno else ""
        remedy = REMEDIES.get(error.msg, "")
        super().__init__(f"{error.msg}{line}; nothing has run. {remedy}".rstrip())
        self._shown = [*shown, f"Nothing has run on the workers. {remedy}".rstrip()]

    def _render_traceback_(self) -> list[str]:
        return self._shown


def check_source(shell: InteractiveShell, first_line: str, cell: str) -> str:
    """Return a cell for the ranks as Python, in which IPython has turned magics into calls.

    `first_line` is the line of the cell's magic, which counts as line 1 in errors; "" in auto mode.
    Raises CellSyntaxError if the cell is not Python, and UsageError if it has a line magic that
    ranks cannot run (`check_magics`).
    """
    source = in_notebook_lines(first_line, cell)
    try:
        python: str = shell.transform_cell(source)
        module = _compiled(python)
    except SyntaxError as error:
        lines = source.splitlines()
        error.filename = "<cell>"  # Python's tokenizer sets another name
        if error.text is None and 0 < (error.lineno or 0) <= len(lines):
            error.text = lines[(error.lineno or 0) - 1]
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    if "run_line_magic" in python:
        check_magics(module)
    return python


def has_code(cell: str) -> bool:
    """Return True if the cell has a line that is neither blank nor a comment."""
    lines = map(str.strip, cell.splitlines())
    return any(line and not line.startswith("#") for line in lines)


def names_training(cell: str) -> bool:
    """Return True if a cell probably trains: its text has a name of DDP or FSDP, or `optim`."""
    return bool(_TRAINING.search(cell))


def is_python(shell: InteractiveShell, cell: str) -> bool:
    """Return True if a cell is Python after IPython has transformed the cell's magics."""
    try:
        _compiled(shell.transform_cell(cell))
    except SyntaxError:
        return False
    return True


def as_magic(shell: Any, cell: str, world: World | None) -> str:
    """Return a cell such as `cd /tmp` as `%cd /tmp` if IPython would do so for a plain cell.

    Any other cell is returned unchanged, and so is this cell if a rank has a variable `cd`.
    `world` is None if there are no workers.  IPython adds `%` only in cells of one line.  With the
    cell magic above it, the cell has two lines, so nbdist must add `%`.
    """
    match = _WORD.fullmatch(cell)
    if match is None or (world and world.engine.names.ranks_with(match[1])):
        return cell
    if not shell.find_line_magic(match[1]):
        return cell
    is_meant = shell.prefilter_manager.prefilter_lines(cell.strip()) != cell.strip()
    return f"%{cell.lstrip()}" if is_meant else cell


def check_commands(
    python: str, names: NameTable, ranks: Collection[int], user_ns: Container[str]
) -> None:
    """Raise UsageError if a command such as `!ls {x}` needs a variable that some of `ranks` lack.

    `python` is the cell in which IPython has turned commands into calls, and `names` knows which
    ranks have which variables.  No error is raised if no rank has the variable, if the notebook has
    it (`user_ns`), or if the cell may bind it.
    """
    for name in names_in_commands(python):
        have = names.ranks_with(name)
        lacking = [rank for rank in ranks if rank not in have]
        if have and lacking and name not in user_ns and name not in names_bound(python):
            raise UsageError(
                f"`{name}`, which a command fills in, is on {name_ranks(have)} and not on "
                f"{name_ranks(lacking)}: `%dist_sync {name} --from {have[0]}` copies it, or begin "
                f"the cell with `%%rank {format_ranks(have)}`. Nothing has run."
            )


def _compiled(python: str) -> ast.Module:
    """Parse and compile a cell, and return its syntax tree; raise SyntaxError if that fails.

    Compiling finds errors that parsing does not find, such as a `return` outside of a function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn when they compile the cell
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        module = compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | flags)
        compile(module, "<cell>", "exec", flags)
    assert isinstance(module, ast.Module)
    return module


def check_magics(module: ast.Module) -> None:
    """Raise UsageError if a cell for the ranks has a magic of nbdist, or loads or unloads nbdist.

    `module` is the cell's syntax tree, in which IPython has turned magics into calls.
    """
    for node in ast.walk(module):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_line_magic"),
                args=[ast.Constant(str(name)), ast.Constant(str(text))],
            ):
                if name.lstrip("%") in NBDIST_CELL_MAGICS and name.startswith("%"):
                    raise place_error(name, text if text.startswith(AT) else f"{AT}{node.lineno}")
                is_load = name in LOADING and text.split()[:1] == ["nbdist"]
                if name.startswith("dist_") or name in NBDIST_CELL_MAGICS or is_load:
                    raise UsageError(
                        f"line {node.lineno}: `%{name}` is for the notebook, not for the ranks: "
                        "put it in a cell of its own, or last in this one. Nothing has run."
                    )


def place_error(name: str, where: str) -> UsageError:
    """Return the error that a cell magic is below other code.

    `name` is the name of the magic with one `%`.  `where` says where to split the cell, as in "at
    line 3".
    """
    return UsageError(f"%{name} must be the first line of its cell: split the cell {where}.")


def refuse_magic(shell: InteractiveShell, name: str, text: str) -> None:
    """Raise the error that a cell magic is below other code.

    IPython takes `%%distributed` in the middle of a cell for a line magic named `%distributed`, so
    this function is registered as that line magic.  If nbdist has transformed the cell, `text` says
    where the cell magic is, such as "at line 3".  If IPython has transformed the cell before nbdist
    was loaded, `text` is the rest of the magic's line, and this function looks for the line itself.
    """
    cell = [*shell.history_manager.input_hist_raw][-1]  # type: ignore[union-attr]
    place = find_misplaced_magic(cell.splitlines(keepends=True))
    where = f"{AT}{place[1]}" if place else "there"
    raise place_error(name, text if text.startswith(AT) else where)


def in_notebook_lines(first_line: str, cell: str) -> str:
    """Return the source to send to ranks: the magic's line as a comment, and the cell below it.

    With the comment, lines have the same numbers as in the notebook.  No comment is added if the
    cell begins with another cell magic, which must be on the first line, or if `first_line` is "",
    as in auto mode.  The comment is indented like the cell's first line, because IPython dedents a
    whole cell by the indentation of its first line.
    """
    is_whole = not first_line or cell.lstrip().startswith("%%")
    indent = re.match(r"\s*?([ \t]*)(?=\S|$)", cell)
    return cell if is_whole else f"{indent[1] if indent else ''}# {first_line}\n{cell}"


def execution_count(shell: InteractiveShell) -> int:
    """Return the number of the running cell, as in `In[5]`.

    IPython has already stored the running cell's input, so the count of inputs includes it.
    """
    inputs = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    return max(1, len(inputs) - 1)


def cell_id(shell: InteractiveShell) -> str:
    """Return the front end's id of the running cell; "" if the front end sends none."""
    return str(request_of(shell).get("metadata", {}).get("cellId") or "")


def cell_file(shell: InteractiveShell) -> str:
    """Return the file name that the front end's debugger expects for the running cell.

    The name has a hash of the text of the whole cell.  Returns "" in a terminal.
    """
    code = request_of(shell).get("content", {}).get("code", "")
    if not code:
        return ""
    compiler: Any = shell.compile
    return str(compiler.get_code_name(code, code, 0))


def page_of(request: dict[str, Any]) -> str:
    """Return the id of the page that sent a request; "" if the request has none, as in a terminal.

    A reloaded page has a new id.
    """
    return str(request.get("header", {}).get("session", ""))


def request_of(shell: InteractiveShell) -> dict[str, Any]:
    """Return the Jupyter message that runs the present cell; an empty dict in a terminal."""
    request: dict[str, Any] = getattr(shell, "get_parent", dict)()
    return request


def is_attended(shell: InteractiveShell) -> bool:
    """Return True if a user can type input for the running cell.

    Programs such as papermill run a notebook without a user, and say so in their requests.
    """
    return bool(request_of(shell).get("content", {}).get("allow_stdin", True))

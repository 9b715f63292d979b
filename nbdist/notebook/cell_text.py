"""The text of a cell while the user types it: where it runs, and its magic's line; pure."""

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
from nbdist.notebook.options import POOL, RANKS
from nbdist.words import format_ranks, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.names import NameTable
    from nbdist.world.world import World


CELL_MAGICS = ("distributed", "rank")  # those whose cells the workers run

_FIRST = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*%%(\w+)")
_MAGIC_LINE = re.compile(r"[ \t]*%%?(\w+)(.*)")
_ROOT = re.compile(
    r"(?<![\w.)\]}'\"])([^\W\d]\w*)"
    r"((?:\.\w*|\[[^][]*\]|\([^()]*\))*(?:\[\s*[\"'][^\"'\]]*)?)$"
)
"""A name at the end of what is typed, and which attribute, item or key of it."""


# What every panel says while auto mode is on.
AUTO_NOTE = "auto mode: `%%local` on the first line runs a cell here"


@dataclass
class AutoMode:
    """What is known of it; it is on while `pool` says where plain cells run."""

    pool: str | None = None
    running: str = ""  # what the kernel runs in place of the last cell
    typed: str = ""  # what that was
    ran: dict[int, str] = field(default_factory=dict)  # in place of those in the history
    loaded: set[str] = field(default_factory=set)  # packages of extensions on the ranks


@dataclass(frozen=True, slots=True)
class MagicLine:
    """A line that begins with a magic: its name, what follows, where that begins in the cell."""

    name: str
    text: str
    start: int

    @property
    def pool(self) -> str | None:
        """What it says after `--pool`."""
        found = POOL.search(self.text)
        return found[1] if found else None

    @property
    def ranks(self) -> str | None:
        """What it says after `-r`; of `%%rank` all but the options."""
        if self.name == "rank":
            return "".join(POOL.sub(" ", self.text).split()) or None
        found = RANKS.search(self.text)
        return found[1] if found else None


def cell_magic(code: str) -> MagicLine | None:
    """Find the cell magic that a cell begins with, below comments perhaps."""
    found = _FIRST.match(code)
    if found is None:
        return None
    rest = code[found.end() :].partition("\n")[0]
    return MagicLine(found[1], rest, found.end())


def magic_at(code: str, cursor: int) -> MagicLine | None:
    """Find the magic in whose line the cursor is."""
    found = _MAGIC_LINE.match(code, code.rfind("\n", 0, cursor) + 1)
    return MagicLine(found[1], found[2], found.start(2)) if found else None


def as_comment(code: str) -> str:
    """Return the cell as Python with each character in its place: the magic's line is a comment."""
    found = _FIRST.match(code)
    if found is None:
        return code
    place = code.index("%%", found.start(1) - 2)
    return f"{code[:place]}# {code[place + 2 :]}"


def root_at(code: str, cursor: int) -> tuple[str, bool]:
    """Find the first name of what is typed before the cursor, and whether a part of it is."""
    found = _ROOT.search(code[:cursor])
    return (found[1], bool(found[2])) if found else ("", False)


# --- what may stand around a cell's magic besides what IPython itself understands -------------

MAGICS = ("distributed", "rank", "local")

AT = "at line "
"""What comes before the number in the line that a cell with a misplaced magic becomes."""

_MAGIC = re.compile(rf"[ \t]*%%({'|'.join(MAGICS)})(?=[\s\[]|$)(.*)", re.DOTALL)
_BRACKETS = re.compile(r"\s*\[([^\]\n]*)\]")
_LOADS = re.compile(r"[ \t]*%load_ext[ \t]+nbdist[ \t]*(?:#.*)?$", re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'?|\"[^\"]*\"?")
_COMMENT = re.compile(r"(?:^|\s)#")
_NOTEBOOKS = re.compile(r"(?:(\w+)\s*=\s*)?%(dist_\w+)(?:[ \t]+(.*))?")


LineMagic = tuple[str, str, str]
"""A line of a cell that is a magic: its name, its text, and what its value is bound to."""


def transform_first_lines(lines: list[str], *, local_is_plain: bool = True) -> list[str]:
    """Put the magic of a cell of ours first; all lines below keep their numbers.

    Comments above it change places with it, and so does `%load_ext nbdist`, which has been done.
    `%%rank[0,1]`, nbdistributed's, is `%%rank 0,1`.  A cell of `%%local` is a plain one, but not in
    a terminal (`local_is_plain` False), which would take it for complete at the end of each line.
    A cell with one of them elsewhere becomes a line that raises: nothing of it runs.
    """
    if place := misplaced(lines):
        name, number = place
        return [f"get_ipython().run_line_magic('%{name}', '{AT}{number}')\n"]
    above = _count_above(lines)
    found = _MAGIC.fullmatch(lines[above]) if above < len(lines) else None
    if found is None:
        return lines
    name, rest = found.groups()
    if name == "rank":
        rest = _BRACKETS.sub(lambda ranks: " " + "".join(ranks[1].split()), rest, count=1)
    first = f"{'# ' * (name == 'local' and local_is_plain)}%%{name}{rest}"
    if not first.endswith("\n"):
        first += "\n"
    comments = [f"# {line}" if _LOADS.match(line) else line for line in lines[:above]]
    return [first, *comments, *lines[above + 1 :]]


def misplaced(lines: Sequence[str]) -> tuple[str, int] | None:
    """Find one of our cell magics that is not its cell's first line, and its line as typed."""
    begin = _count_above(lines)
    is_first = begin < len(lines) and _MAGIC.fullmatch(lines[begin]) is not None
    begin += is_first
    rest = [*lines[begin:]]
    code = next(iter(rest[_count_above(rest) :]), "")
    is_of_another = code.lstrip().startswith("%%") and not _MAGIC.match(code)
    if is_of_another or not any("%%" in line and _MAGIC.match(line) for line in rest):
        return None
    unseen = int(is_first and "--auto" in lines[begin - 1].split())
    for tokens in make_tokens_by_line(rest):
        token = next((each for each in tokens if each.string.strip()), None)
        if token is not None and token.string == "%":
            row = token.start[0]
            if found := _MAGIC.fullmatch(rest[row - 1]):
                return found[1], begin + row - unseen
    return None


def divide(cell: str) -> tuple[str, list[LineMagic]]:
    """Take the notebook's own magics off the end of a cell for the ranks: `%dist_gather loss`.

    None where nothing else would be left, nor from the text of another cell magic.
    """
    lines, found = cell.splitlines(keepends=True), list[LineMagic]()
    if cell.lstrip().startswith("%%"):
        return cell, found
    end = at = len(lines)
    while at:
        at -= 1
        if _is_comment(lines[at]):
            continue
        if (magic := _NOTEBOOKS.fullmatch(lines[at].rstrip())) is None:
            return "".join(lines[:end]), found
        found.insert(0, (magic[2], magic[3] or "", magic[1] or ""))
        end = at
    return cell, []


def without_comment(line: str) -> str:
    """Take a comment off the end of a magic's line: `#` after a space, outside of quotes."""
    plain = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), line)
    found = _COMMENT.search(plain)
    return line[: found.start()] if found else line


def _count_above(lines: Sequence[str]) -> int:
    """Count the lines at the beginning that say nothing, or load nbdist."""
    code = (at for at, line in enumerate(lines) if not (_is_comment(line) or _LOADS.match(line)))
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
"""What to do instead, by what Python says."""

_TRAINING = re.compile(
    r"\b(?:DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|optim)\b"
)

_WORD = re.compile(r"\s*([^\W\d]\w*)(?:[ \t]+[^=\s].*)?\s*")
"""A cell of one line that may be a magic without its `%`."""


class CellSyntaxError(UsageError, SyntaxError):
    """The cell is not Python; shown as IPython shows a syntax error, without a traceback."""

    def __init__(self, error: SyntaxError, shown: list[str]) -> None:
        line = f" (line {error.lineno} of the cell)" if error.lineno else ""
        remedy = REMEDIES.get(error.msg, "")
        super().__init__(f"{error.msg}{line}; nothing has run. {remedy}".rstrip())
        self._shown = [*shown, f"Nothing has run on the workers. {remedy}".rstrip()]

    def _render_traceback_(self) -> list[str]:
        return self._shown


def check_source(shell: InteractiveShell, first_line: str, cell: str) -> str:
    """Return the cell as Python, magics transformed; raises before anything runs if it is none."""
    source = in_notebook_lines(first_line, cell)
    try:
        python: str = shell.transform_cell(source)
        module = _compiled(python)
    except SyntaxError as error:
        lines = source.splitlines()
        error.filename = "<cell>"  # also where Python's tokenizer has found it
        if error.text is None and 0 < (error.lineno or 0) <= len(lines):
            error.text = lines[(error.lineno or 0) - 1]
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    if "run_line_magic" in python:
        check_magics(module)
    return python


def has_code(cell: str) -> bool:
    """Return False for a cell of comments and blank lines alone."""
    lines = map(str.strip, cell.splitlines())
    return any(line and not line.startswith("#") for line in lines)


def names_training(cell: str) -> bool:
    """Return True if a cell names DDP, FSDP or torch's optimizers, perhaps only to import them."""
    return bool(_TRAINING.search(cell))


def is_python(shell: InteractiveShell, cell: str) -> bool:
    """Return True if a cell is Python, with its magics transformed."""
    try:
        _compiled(shell.transform_cell(cell))
    except SyntaxError:
        return False
    return True


def as_magic(shell: Any, cell: str, world: World | None) -> str:
    """Write `cd /tmp` as `%cd /tmp` where IPython takes it for that, and no rank has a `cd`.

    IPython does that for cells of one line; a magic's line above would make it two.
    """
    found = _WORD.fullmatch(cell)
    if found is None or (world and world.session.names.ranks_with(found[1])):
        return cell
    if not shell.find_line_magic(found[1]):
        return cell
    is_meant = shell.prefilter_manager.prefilter_lines(cell.strip()) != cell.strip()
    return f"%{cell.lstrip()}" if is_meant else cell


def check_commands(
    python: str, names: NameTable, ranks: Collection[int], ours: Container[str]
) -> None:
    """Raise UsageError where a command would fill in a variable that one of the ranks lacks."""
    for name in names_in_commands(python):
        have = names.ranks_with(name)
        lacking = [rank for rank in ranks if rank not in have]
        if have and lacking and name not in ours and name not in names_bound(python):
            raise UsageError(
                f"`{name}`, which a command fills in, is on {name_ranks(have)} and not on "
                f"{name_ranks(lacking)}: `%dist_sync {name} --from {have[0]}` copies it, or begin "
                f"the cell with `%%rank {format_ranks(have)}`. Nothing has run."
            )


def _compiled(python: str) -> ast.Module:
    """Compile all of it, as `return 5` parses; return it parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks give them
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        module = compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | flags)
        compile(module, "<cell>", "exec", flags)
    assert isinstance(module, ast.Module)
    return module


def check_magics(module: ast.Module) -> None:
    """Raise UsageError where the cell has a magic that only the notebook has."""
    for node in ast.walk(module):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_line_magic"),
                args=[ast.Constant(str(name)), ast.Constant(str(text))],
            ):
                if name.lstrip("%") in MAGICS and name.startswith("%"):
                    raise not_first(name, text if text.startswith(AT) else f"{AT}{node.lineno}")
                is_load = name in LOADING and text.split()[:1] == ["nbdist"]
                if name.startswith("dist_") or name in MAGICS or is_load:
                    raise UsageError(
                        f"line {node.lineno}: `%{name}` is for the notebook, not for the ranks: "
                        "put it in a cell of its own, or last in this one. Nothing has run."
                    )


def not_first(name: str, where: str) -> UsageError:
    """Make the error of a cell magic that is below other lines; `name` begins with one `%`."""
    return UsageError(f"%{name} must be the first line of its cell: split the cell {where}.")


def refuse_place(shell: InteractiveShell, name: str, text: str) -> None:
    """Raise that error, as the line magic `%distributed`, which IPython makes of such a line.

    `text` says where, if `transform_first_lines` was there before the cell; else the cell does,
    as where `nbdist enable` has this magic load the extension.
    """
    cell = [*shell.history_manager.input_hist_raw][-1]  # type: ignore[union-attr]
    found = misplaced(cell.splitlines(keepends=True))
    where = f"{AT}{found[1]}" if found else "there"
    raise not_first(name, text if text.startswith(AT) else where)


def in_notebook_lines(first_line: str, cell: str) -> str:
    """Make the source to send: the magic's line as a comment, so that lines have their numbers.

    Not where another cell magic comes next, which must be on the first line; nor where
    `first_line` is "" in auto mode.  It is indented as the cell's first line is:
    by so much IPython moves all lines of a cell that was cut out of a function.
    """
    is_whole = not first_line or cell.lstrip().startswith("%%")
    indent = re.match(r"\s*?([ \t]*)(?=\S|$)", cell)
    return cell if is_whole else f"{indent[1] if indent else ''}# {first_line}\n{cell}"


def execution_count(shell: InteractiveShell) -> int:
    """Return the number of the cell that is running: IPython has stored its input already."""
    inputs = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    return max(1, len(inputs) - 1)


def cell_id(shell: InteractiveShell) -> str:
    """Return the front end's id of the cell that is running; "" where it gives none."""
    return str(request_of(shell).get("metadata", {}).get("cellId") or "")


def page_of(request: dict[str, Any]) -> str:
    """Return the id of the page that the cell was run from, each load has its own; "" for none."""
    return str(request.get("header", {}).get("session", ""))


def request_of(shell: InteractiveShell) -> dict[str, Any]:
    """Return the front end's request that the cell runs for; a terminal's shell has none."""
    request: dict[str, Any] = getattr(shell, "get_parent", dict)()
    return request


def is_attended(shell: InteractiveShell) -> bool:
    """Return False if nobody can type, as nbclient, nbconvert and papermill say in each request."""
    return bool(request_of(shell).get("content", {}).get("allow_stdin", True))

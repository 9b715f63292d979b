"""Finds the global names that the source of a cell reads and binds, without running the cell.

Called in the notebook's process, mostly to decide which variables to send.  The functions read the
bytecode that Python compiles from the source.  IPython has transformed the source before: magics
and `!` lines are calls of `get_ipython()`, and names in their strings count as read.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import types
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from nbdist.values.payload import Identity, is_atomic

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")
_OWN_READS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME")
"""The instructions of `_READS` that look in the body of a class before they look in the globals."""
_BINDS = ("STORE_NAME", "STORE_GLOBAL")
_UNBINDS = ("DELETE_NAME", "DELETE_GLOBAL")
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_JUMPS_AWAY = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_NO_NEXT = (*_RETURNS, *_JUMPS_AWAY, "RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
_DOTS = ("LOAD_ATTR", "LOAD_METHOD")
_GENERIC = "<generic parameters of "
# Names of code objects of comprehensions; from Python 3.12 on, most comprehensions have none.
_INLINE_CODE = ("<listcomp>", "<dictcomp>", "<setcomp>")
_PYTHONS_OWN = (
    *("__annotations__", "__doc__", "__name__"),
    *("__annotate__", "__conditional_annotations__"),  # from Python 3.14 on
)

# Magics whose text is not Python, or is Python for the ranks: of the names in the text, the cell
# reads only those in `{x}` and `$x`.
_NOT_PYTHON = re.compile(
    "distributed|rank|bash|cmd|perl|ruby|script|sh|system|sx|html|javascript|js|latex|markdown|svg|"
    "writefile|cat|cd|cp|ls|man|mkdir|more|mv|pushd|rm|rmdir|alias|autoreload|bookmark|colors|"
    "config|env|load|load_ext|matplotlib|pylab|reload_ext|run|set_env|unload_ext|conda|pip|uv"
)
_BRACES = re.compile(r"\{([^{}]+)\}")
_DOLLAR = re.compile(r"(?<!\$)\$\{?([A-Za-z_]\w*)")
_OPTION = re.compile(r"\s*(-\S+|\d+)")
_IPYTHON_LINE = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)

_State = frozenset[str | int]
"""What is certain when an instruction begins, in whatever way the code has reached it.

A text is a name that is certainly bound.  A number is the index of an instruction that makes a
function, and means that the function does certainly not exist yet.
"""


_Reads = dict[str, frozenset[str]]
"""Maps each name that is read to the names that are certainly bound at every read of it."""

_NONE: frozenset[str] = frozenset()


def names_used(source: str) -> frozenset[str]:
    """Return the global names that a cell reads before it has certainly bound them.

    A name that is bound only under a condition counts as used if it is read later.  A function
    counts as called wherever its name is read.  Raises SyntaxError.
    """
    return frozenset(_cell(source).used)


def bound_before(source: str) -> Mapping[str, frozenset[str]]:
    """Map each name that a cell uses (`names_used`) to the names that the cell has bound before.

    A name counts only if it is certainly bound at each use.  In the cell `lock = Lock(); work()`,
    `work` is mapped to `lock`: if `work` is a function of the notebook, it will use the cell's
    `lock`, so the notebook's `lock` need not be sent.  Raises SyntaxError.
    """
    cell = _cell(source)
    return {name: bound - cell.unbound for name, bound in cell.used.items()}


def names_used_later(source: str) -> frozenset[str]:
    """Return the global names that functions, classes and lambdas of a cell read when they run."""
    return frozenset(_cell(source).inner)


def names_bound(source: str) -> frozenset[str]:
    """Return the names that a cell may bind, or delete, at global level.  Raises SyntaxError."""
    return frozenset(_cell(source).bound)


def names_read_first(source: str) -> frozenset[str]:
    """Return the names that a cell, read from top to bottom, reads or deletes before it binds them.

    The bodies of the cell's functions and classes, and magics, are left out.  Raises SyntaxError.
    """
    return frozenset(name for name, opname in _cell(source).first.items() if opname in _READS)


def names_certainly_bound(source: str) -> frozenset[str]:
    """Return the names that a cell has bound whenever it ends without an error."""
    return _cell(source).certain


def dotted_names(source: str) -> frozenset[tuple[str, ...]]:
    """Return the dotted names that a cell reads, as tuples: ("xml", "dom") for `xml.dom`."""
    return frozenset(_cell(source).chains)


def names_in_commands(source: str) -> list[str]:
    """Return the names whose values `!` lines and line magics fill in: `path` in `!ls {path}`.

    Lines inside of functions do not count.
    """
    texts = _cell(source).commands
    return [*dict.fromkeys(name for text in texts for name in names_filled_in(text))]


def names_filled_in(text: str) -> list[str]:
    """Return the names whose values `{x}` and `$x` fill into a command: `path` in `ls $path`.

    Variables that the shell command itself sets are left out: `i` in `for i in 1 2; do echo $i`.
    """
    names = (name for source in _filled_in([text]) for name in sorted(names_used(source)))
    return [name for name in dict.fromkeys(names) if not _is_the_shells(name, text)]


@functools.lru_cache(maxsize=64)
def _cell(source: str) -> _Code:
    # The result is cached, since callers ask several questions about the same source.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns when the cell runs
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        return _Code(compile(source, "<cell>", "exec", flags, dont_inherit=True, optimize=0))


class _Code:
    """The global names that a code object (a cell, a class's body or a function) reads and binds.

    - `used`: names that the code reads while they may be unbound.  For a cell, these include names
      that its functions read when they are called.  Each name is mapped to the names that are
      certainly bound at every read of it.
    - `later`: names that the functions defined in the code read when they are called.  If the code
      is itself a function, these include the names that it reads.
    - `inner`: all names that functions, classes and lambdas in the code read, at any time.
    - `certain`: names that are bound whenever a cell ends without an error.
    - `bound`: names that the code may bind or delete.
    - `unbound`: global names that functions delete.
    - `chains`: the dotted names that the code reads (`dotted_names`).
    - `commands`: texts of `!` lines and line magics.
    - `first`: by name, the opname of the first instruction that reads, binds or deletes the name.
    """

    def __init__(self, code: types.CodeType) -> None:
        self.used: _Reads = {}
        self.later: set[str] = set()
        self.inner: set[str] = set()
        self.certain = frozenset[str]()
        self.bound: set[str] = set()
        self.unbound: set[str] = set()
        self.chains: set[tuple[str, ...]] = set()
        self.first: dict[str, str] = {}
        self.commands: list[str] = []
        self._code = code
        self._is_cell = code.co_name == "<module>"
        self._is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        self._may_swallow = bool({"suppress", "raises"}.intersection(code.co_names))
        self._functions: dict[int, tuple[str, set[str]]] = {}
        bytecode = dis.Bytecode(code)
        self._steps = [step for step in bytecode if step.opname != "EXTENDED_ARG"]
        of_class = (step.argval for step in self._steps if step.opname == "STORE_NAME")
        self._own = frozenset[str](() if self._is_cell else of_class)
        reads = [self._reads(index, step) for index, step in enumerate(self._steps)]
        self.later.update(*(later for _, later in self._functions.values()))
        if self._is_function and not code.co_name.startswith(_GENERIC):
            self.later = self.later.union(*reads)
        else:
            self._record_all_reads(reads, self._states(bytecode))
        del self._steps

    # --- what an instruction reads and binds ----------------------------------------------

    def _reads(self, index: int, step: dis.Instruction) -> _Reads:
        """Return the names that an instruction reads.

        Also records the names that it binds or deletes, and what `chains` and `commands` need.
        """
        name = step.argval
        if step.opname in _DOTS:
            self._record_chain(index)
            return self._reads_in_magic(index)
        if isinstance(name, types.CodeType):
            return self._reads_of_definition(index, name)
        if name in _PYTHONS_OWN:
            return {}
        if step.opname in (*_BINDS, *_READS):
            self.first.setdefault(name, step.opname)
        if step.opname in (*_BINDS, *_UNBINDS) and (self._is_cell or "GLOBAL" in step.opname):
            self.bound.add(name)
        if step.opname == "DELETE_GLOBAL":
            self.unbound.add(name)
        return {name: _NONE} if step.opname in _READS else {}

    def _reads_of_definition(self, index: int, code: types.CodeType) -> _Reads:
        """Return the names that are read when the function or class of this `code` is made.

        Records the names that are read when the function is called.  A lambda or a comprehension
        may run at once, so its names are returned and not recorded.
        """
        inner = _Code(code)
        self.bound |= inner.bound
        self.unbound |= inner.unbound
        self.chains |= inner.chains
        self.commands += inner.commands
        self.inner |= inner.inner
        if code.co_name in _INLINE_CODE:
            self.first = inner.first | self.first
        else:
            self.inner |= inner.used.keys() | inner.later
        name = code.co_name.removeprefix(_GENERIC).removesuffix(">")
        if not name.isidentifier():  # such as a lambda, which may run at once
            return inner.used | dict.fromkeys(inner.later, _NONE)
        before = [later for other, later in self._functions.values() if other == name]
        self._functions[index] = name, inner.later
        # A decorator, which is above the function, may call the function at once.
        place = self._steps[index].positions
        is_plain = place is not None and place.lineno == code.co_firstlineno
        called = set() if is_plain else inner.later - {name}
        if (
            not is_plain and name in inner.later
        ):  # while the decorator runs, this name still means the function that had it before
            called = called.union(*before)
        return inner.used | dict.fromkeys(called, _NONE)

    def _record_chain(self, index: int) -> None:
        chain: list[str] = []
        while self._steps[index].opname in _DOTS:
            chain.insert(0, self._steps[index].argval)
            index -= 1
        if self._steps[index].opname in _READS:
            self.chains.add((self._steps[index].argval, *chain))

    def _reads_in_magic(self, index: int) -> _Reads:
        """Return the names read by a call such as `get_ipython().run_line_magic("time", "f()")`."""
        method, before = self._steps[index].argval, self._steps[max(0, index - 3) : index]
        if not any(step.argval == "get_ipython" for step in before):
            return {}
        following = takewhile(lambda step: step.opname == "LOAD_CONST", self._steps[index + 1 :])
        texts = [step.argval for step in following if isinstance(step.argval, str)]
        if method in ("system", "getoutput", "run_line_magic") and not self._is_function:
            self.commands += texts
        sources = code_in_magic(method, texts)
        if self._is_cell:
            self.bound.update(*map(names_bound, sources))
        local_names = {*self._code.co_varnames, *self._code.co_cellvars, *self._code.co_freevars}
        reads: _Reads = {}
        for source in sources:
            _add(reads, bound_before(source))
        return {name: bound for name, bound in reads.items() if name not in local_names}

    # --- in which order -------------------------------------------------------------------

    def _record_all_reads(self, reads: list[_Reads], states: list[_State | None]) -> None:
        """Fill in `used` and `certain` from the reads and states of all instructions.

        A name is in `used` if there is any path to a read on which the name may be unbound.
        """
        for step, names, state in zip(self._steps, reads, states, strict=True):
            if state is not None:
                # Comprehensions, functions and classes in the body of a class do not see the names
                # that the body has bound.
                self._record_reads(names, state if step.opname in _OWN_READS else state - self._own)
        if not self._is_cell:
            return
        pairs = zip(self._steps, states, strict=True)
        exits = [state for step, state in pairs if step.opname in _RETURNS and state is not None]
        at_end = frozenset.intersection(*exits) if exits else frozenset()
        self.certain = _names_in(at_end).difference(_PYTHONS_OWN)
        unbound = {step.argval for step in self._steps if step.opname in _UNBINDS}
        for index, (_, later) in self._functions.items():  # later cells may call the functions
            when_made = states[index] or frozenset()
            bound = _names_in(at_end | (when_made - unbound))
            _add(self.used, dict.fromkeys(later - bound, bound))

    def _record_reads(self, names: _Reads, state: _State) -> None:
        bound_here = _names_in(state) - self._own
        waiting = [(name, bound | bound_here) for name, bound in names.items()]
        done = set[tuple[str, frozenset[str]]]()
        while waiting:
            name, bound = read = waiting.pop()
            if read in done:
                continue
            done.add(read)
            if name not in state:
                _add(self.used, {name: bound})
            for index, (function, later) in self._functions.items():
                # Where a function's name is read, the function may be called, and then reads the
                # names in `later`.  A method does not see names that its class's body has bound.
                if function == name and index not in state:
                    called = dict.fromkeys(later, bound)
                    if self._is_cell:
                        waiting.extend(called.items())
                    else:
                        _add(self.used, called)

    def _states(self, bytecode: dis.Bytecode) -> list[_State | None]:
        """Return the state before each instruction; None for an instruction that never runs."""
        offsets = [step.offset for step in self._steps]
        handlers = {
            index: bisect_left(offsets, entry.target)
            for entry in bytecode.exception_entries  # type: ignore[attr-defined]  # not in stubs
            for index in range(bisect_left(offsets, entry.start), bisect_left(offsets, entry.end))
        }
        after_with = self._after_with(handlers)
        states: list[_State | None] = [None] * len(offsets)
        waiting: list[tuple[int, _State]] = [(0, frozenset(self._functions))]
        while waiting:
            index, state = waiting.pop()
            former, step = states[index], self._steps[index]
            if former is not None and former <= state:
                continue
            states[index] = state = state if former is None else former & state
            if index in handlers:
                waiting.append((handlers[index], state))
            if step.opname in _BINDS:
                state |= {step.argval}
            state -= {step.argval if step.opname in _UNBINDS else index}
            if step.opcode in _JUMPS:
                target = bisect_left(offsets, step.argval)
                waiting.append((target, state.union(after_with.get(index, ()))))
            if step.opname not in _NO_NEXT:
                waiting.append((index + 1, state))
        return states

    def _after_with(self, handlers: dict[int, int]) -> dict[int, set[str]]:
        """Return the names that count as bound after each `with` whose body has raised an error.

        The code goes on after such a `with` if the context manager hides the error.  Almost no
        context manager does, so all names that the body binds count as bound.  A key of the result
        is the index of the instruction that jumps behind the `with`.  The result is empty if the
        code names `suppress` or `raises`, which do hide errors.
        """
        bound_by_jump: dict[int, set[str]] = {}
        for start, step in enumerate(self._steps):
            if step.opname == "WITH_EXCEPT_START" and not self._may_swallow:
                jump = next(
                    i for i in range(start, len(self._steps)) if "IF_TRUE" in self._steps[i].opname
                )
                body = [index for index, handler in handlers.items() if handler == start - 1]
                inside = self._steps[min(body) : max(body) + 1]
                bound_by_jump[jump] = {step.argval for step in inside if step.opname in _BINDS}
        return bound_by_jump


def _names_in(state: _State) -> frozenset[str]:
    return frozenset(each for each in state if isinstance(each, str))


def _add(reads: _Reads, more: Mapping[str, frozenset[str]]) -> None:
    """Add `more` to `reads`; for a name in both, keep the names that are bound at both reads."""
    for name, bound in more.items():
        reads[name] = reads.get(name, bound) & bound


# --- the Python in the strings that IPython makes of magics and `!` lines -----------------------


def code_in_magic(method: str, texts: list[str]) -> list[str]:
    """Return the Python sources in a call such as `get_ipython().run_line_magic("time", "f(x)")`.

    `method` is the method's name and `texts` its arguments.  Each `{x}` and `$x` is a source of
    its own.  Returns [] for methods that run neither a magic nor a command of the system.
    """
    if method in ("system", "getoutput", "getoutput_all"):
        return _filled_in(texts)
    if method not in ("run_line_magic", "run_cell_magic") or not texts:
        return []
    name, *texts = texts
    code = [] if _NOT_PYTHON.fullmatch(name) else filter(None, map(_python, texts))
    return [*_filled_in(texts), *code]


def _filled_in(texts: list[str]) -> list[str]:
    parts = [part for text in texts for part in (*_BRACES.findall(text), *_DOLLAR.findall(text))]
    # Read each part as an f-string: Python then separates an expression from its format, `{x:.3f}`.
    return [*filter(_is_python, (f"f{'{' + part + '}'!r}" for part in parts))]


def _python(text: str) -> str:
    """Return the Python code in a magic's text, or "" if there is none.

    First tries the whole text, and then the text without lines that begin with `%` or `!`.  If
    neither is Python, removes an option or number from the beginning, as in `-n 3 f(x)`, and tries
    again.
    """
    while True:
        code = next(filter(_is_python, (text, _IPYTHON_LINE.sub("", text))), "")
        option = _OPTION.match(text)
        if code or not option:
            return code
        text = text[option.end() :].lstrip(" ")


def _is_python(text: str) -> bool:
    try:
        _cell(text)
    except (SyntaxError, ValueError):  # ValueError, for example, for a lone surrogate
        return False
    return True


def _is_the_shells(name: str, text: str) -> bool:
    """Return True if a shell command sets the variable `name`: `for i in 1 2; do echo $i; done`.

    `text` is the command.
    """
    given = rf"(?:\bfor\s+{name}\s+in\b|\bread\s+(?:\w+\s+)*{name}\b|(?:^|[\s;]){name}=)"
    return re.search(given, text) is not None


# --- variables of the notebook that `%dist_gather` has bound ----------------------------------

_ABSENT = object()


class Gathered:
    """The notebook's variables that hold values gathered from ranks, to test `name in gathered`.

    A name counts until the notebook binds another object to it.  Python may use one object for
    equal numbers or texts, so a new assignment need not bring another object.  For numbers and
    texts `record_assigned` looks at the names that a cell has assigned instead.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._values: dict[str, Identity] = {}
        self._of_this_cell: set[str] = set()

    def __contains__(self, name: object) -> bool:
        value = self._values.get(name) if isinstance(name, str) else None
        return value is not None and value.is_still(self._namespace.get(str(name), _ABSENT))

    @property
    def has_any(self) -> bool:
        """Whether there are gathered variables that `record_assigned` has to watch."""
        return bool(self._values)

    def add(self, names: Iterable[str]) -> None:
        """Record names that were just bound to values of ranks."""
        for name in names:
            self._values[name] = Identity(self._namespace[name])
            self._of_this_cell.add(name)

    def record_assigned(self, names: Iterable[str]) -> None:
        """Forget gathered names to which the cell that has just ended has assigned other values.

        `names` are the names that the cell may have assigned.  For a number or a short text it is
        not known whether the value is another one, so its name is always forgotten, unless this
        very cell has gathered it.
        """
        for name in self._values.keys() & set(names):
            may_be_equal = is_atomic(self._namespace.get(name)) and name not in self._of_this_cell
            if may_be_equal or name not in self:
                del self._values[name]
        self._of_this_cell.clear()


GATHERS = "get_ipython().run_line_magic('dist_gather'"


def assigned_in(source: str) -> frozenset[str]:
    """Return the names that statements such as `x = %dist_gather y` assign, anywhere in a cell.

    `source` is the cell after IPython's transformation to Python.
    """
    assigned: set[str] = set()
    if GATHERS in source:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(GATHERS):
                inside = [each for target in node.targets for each in ast.walk(target)]
                names = [each for each in inside if isinstance(each, ast.Name)]
                assigned |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return frozenset(assigned)

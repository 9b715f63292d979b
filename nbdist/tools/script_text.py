"""The text of a script: imports in the order of isort and ruff, what is around cells; pure."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WIDTH = 88


@dataclass(frozen=True, slots=True)
class Imported:
    """What binds one name: `attribute` of `module`, or with "" the module itself."""

    name: str
    module: str
    attribute: str = ""

    @property
    def target(self) -> str:
        """What the name stands for, however it is imported: `torch.nn` in two ways."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


def imported_by(node: ast.stmt) -> list[Imported] | None:
    """Read an import statement; None for another one, a relative one, or one of all names.

    `import a.b` binds `a`, and stands here under its whole name.
    """
    match node:
        case ast.Import(names):
            return [Imported(each.asname or each.name, each.name) for each in names]
        case ast.ImportFrom(str(module), names, 0) if all(each.name != "*" for each in names):
            return [Imported(each.asname or each.name, module, each.name) for each in names]
        case _:
            return None


class ImportBlock:
    """The imports of a script so far."""

    def __init__(self) -> None:
        self._by_name: dict[str, Imported] = {}

    def __repr__(self) -> str:
        return f"<ImportBlock {', '.join(self._by_name)}>"

    @property
    def names(self) -> frozenset[str]:
        """The names that it binds."""
        return frozenset(name.partition(".")[0] for name in self._by_name)

    def takes(self, wanted: Imported) -> bool:
        """Say whether it can stand here: no other import has the name."""
        known = self._by_name.get(wanted.name)
        return known is None or known.target == wanted.target

    def add(self, wanted: Imported) -> None:
        """Have it at the top; the first way to write it stays."""
        if wanted.module == "__future__" or self.takes(wanted):
            self._by_name.setdefault(wanted.name, wanted)

    def lines(self) -> str:
        """Write them: the future, the standard library, others, in blocks."""
        blocks = ["\n".join(self._block(section)) for section in range(3)]
        return "\n\n".join(filter(None, blocks))

    def _block(self, section: int) -> Iterator[str]:
        own = [each for each in self._by_name.values() if _section(each.module) == section]
        for each in sorted((e for e in own if not e.attribute), key=lambda e: e.module.lower()):
            alias = "" if each.name == each.module else f" as {each.name}"
            yield f"import {each.module}{alias}"
        whole = [each for each in own if each.attribute]
        for module in sorted({each.module for each in whole}, key=str.lower):
            yield from _from(module, [each for each in whole if each.module == module])


def _from(module: str, members: list[Imported]) -> Iterator[str]:
    plain = [each.name for each in members if each.name == each.attribute]
    if plain:
        names = sorted(plain, key=_member_key)
        line = f"from {module} import {', '.join(names)}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n    {(',' + chr(10) + '    ').join(names)},\n)"
        yield line
    for each in sorted(members, key=lambda each: _member_key(each.attribute)):
        if each.name != each.attribute:
            yield f"from {module} import {each.attribute} as {each.name}"


def _member_key(name: str) -> tuple[int, str]:
    """Constants first, then classes, then what else there is."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name.lower()


def _section(module: str) -> int:
    root = module.partition(".")[0]
    return 0 if root == "__future__" else 1 if root in sys.stdlib_module_names else 2


_DEFINES = re.compile(r"^(def |class |async def |@)", re.MULTILINE)

DISPLAY = '''\
def display(*values):
    """Print values, which a notebook would draw."""
    print(*map(repr, values), sep="\\n")'''


@dataclass(frozen=True, slots=True)
class Setting:
    """What a script is for: its file's `stem`, how many ranks, and the group that they form.

    `backend` is the one that was asked for, "" for the one that suits the machine, "none" for no
    group; `notebook` names where the cells stand; `words` are lines for the script's reader.
    """

    stem: str
    ranks: int
    backend: str
    notebook: str
    words: tuple[str, ...] = ()


def docstring(setting: Setting, lost: Iterable[str]) -> str:
    lines = [
        f'"""The distributed cells of {setting.notebook}, written by `%dist_export` of nbdist.',
        "",
        f"    torchrun --nproc-per-node {setting.ranks} {setting.stem}.py",
    ]
    for word in setting.words:
        lines += ["", *textwrap.wrap(word, WIDTH)]
    if lost := [*lost]:
        lines += ["", "Not carried over:"]
        for each in lost:
            each = each.replace("\\", "/").replace('"""', "'''")
            lines += textwrap.wrap(f"- {each}", WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, '"""'])


def prologue(backend: str) -> str:
    """Write what every worker of a notebook finds: its names, its device, the group."""
    lines = [f'{name} = int(os.environ["{name.upper()}"])' for name in
             ("rank", "world_size", "local_rank")]  # fmt: skip
    shared = " % torch.cuda.device_count()" if backend not in ("", "none") else ""
    chosen = not backend
    lines += [
        "if torch.cuda.is_available():",
        f'    device = torch.device("cuda", local_rank{shared})',
        "    torch.cuda.set_device(device)",
        *(['    dist.init_process_group("cpu:gloo,cuda:nccl")'] if chosen else []),
        "else:",
        '    device = torch.device("cpu")',
        *(['    dist.init_process_group("gloo")'] if chosen else []),
    ]
    if backend not in ("", "none"):
        lines.append(f'dist.init_process_group("{backend}")')
    return "\n".join(lines)


def spaced(texts: Iterable[str]) -> list[str]:
    """Part definitions from what stands around them by two empty lines."""
    lines: list[str] = []
    was_block = False
    for text in texts:
        is_block = _DEFINES.search(text) is not None
        lines += ["", ""] if lines and (is_block or was_block) else []
        lines.append(text)
        was_block = is_block
    return [*lines, "", ""] if was_block else lines


def joined(parts: Iterable[str]) -> str:
    """Put parts below one another: an empty line between them, two around definitions."""
    text, was_block = "", False
    for part in filter(None, (each.strip("\n") for each in parts)):
        begins = [line for line in part.split("\n") if re.match(r"[A-Za-z_@]", line)]
        is_block = bool(begins and _DEFINES.match(begins[0]))
        text += ("\n\n" if is_block or was_block else "\n") if text else ""
        text += f"{part}\n"
        was_block = bool(begins and _DEFINES.match(begins[-1]))
    return text

"""The parts of a script that are the same in each: its docstring, group, spacing; pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

WIDTH = 88

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

"""A script for torchrun, put together of the cells that made what the workers have.

`Composer` decides what stands where; `nbdist.tools.export` writes it down.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.notebook.shipping.free_names import names_bound, names_used
from nbdist.tools.cell_code import EARLY, CellCode, Transform, cell_code, guarded
from nbdist.tools.origins import File, Origin, Origins, Written, file_of, literal, sharing
from nbdist.tools.script_text import (
    DISPLAY,
    ImportBlock,
    Imported,
    Setting,
    docstring,
    joined,
    prologue,
    spaced,
)
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.identity import is_atomic
from nbdist.words import count
from nbdist.world.names import WORKERS_OWN, list_names
from nbdist.world.past import Past, PastTask, Sent

_ALWAYS_THERE = (frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "DATA", "Path"}) - {
    *("display", "get_ipython"),  # IPython's
}


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A script's text, the files that lie beside it, and what it does not have."""

    text: str
    files: tuple[File, ...]
    cells: int
    lost: tuple[str, ...]


@dataclass(slots=True)
class _Section:
    """A cell in its place: names of the notebook that it takes stand before its code."""

    task: PastTask
    code: CellCode
    before: list[str] = field(default_factory=list)


class Composer:
    """Puts one script together."""

    def __init__(
        self,
        past: Past,
        namespace: dict[str, Any],
        origins: Origins,
        transform: Transform,
        version_of: Callable[[str], object],
    ) -> None:
        """`version_of` gives a name's value now as `Shipped.version` has what was sent."""
        self._past = past
        self._namespace = namespace
        self._origins = origins
        self._version_of = version_of
        self._imports = ImportBlock()
        self._top: list[str] = []
        self._files: dict[str, File] = {}
        self._groups: tuple[tuple[str, ...], list[list[str]]] = (), []
        self._lost: list[str] = []
        self._given: dict[str, Sent | None] = {}  # names of the notebook that are written
        self._rebound: set[str] = set()  # of these, those that cells have bound since
        self._known: set[str] = {*WORKERS_OWN, "torch", "dist", "os"}
        self._needs: set[str] = set()
        self._sections = self._translated(transform)
        self._own = set[str]().union(*(names_bound(each.code.text) for each in self._sections))

    def compose(self, setting: Setting) -> BatchScript:
        """Put it together, for these ranks; what could not be carried over is in it too."""
        self._hoist_imports()
        bound: set[str] = set()
        for section in self._sections:
            sent = self._past.sent_before(section.task.last)
            for name in self._in_need(section.code.text, sent):
                self._give(name, sent[name], section, bound)
            for name in self._not_seen(section.code.text, sent):
                self._lost.append(f"when `{name}` was sent: the script has it as it is")
                self._given[name] = None
                self._write(name, section, bound)
            bound |= names_bound(section.code.text)
            self._rebound |= names_bound(section.code.text)
        body = [self._text_of(section) for section in self._sections]
        self._say_what_is_missing(body)
        self._lost += _left_out(self._past)
        lost = tuple(dict.fromkeys(self._lost))
        text = self._whole(setting, body, lost)
        return BatchScript(text, (*self._files.values(),), len(self._sections), lost)

    # --- the cells ------------------------------------------------------------------------

    def _translated(self, transform: Transform) -> list[_Section]:
        sections = []
        known = {each.name for each in self._past.sent}.union(
            *(task.made for task in self._past.tasks)
        )
        tasks = [each for each in self._past.tasks if (each.kind, each.status) == ("cell", "ok")]
        codes = {}
        for task in tasks:
            codes[task.first] = code = cell_code(
                task.text,
                transform,
                known | WORKERS_OWN,
                shows_value=task.shows_value,
                title=title_of(task).replace(" ", "_"),
            )
            self._needs |= code.needs
            lost = [*code.lost, *(["its figures are drawn and not shown"] if task.draws else [])]
            self._lost += [f"{title_of(task, shown=True)}: {each}" for each in lost]
        for task in in_order(tasks, {first: code.text for first, code in codes.items()}):
            sections.append(_Section(task, codes[task.first]))
        return sections

    def _hoist_imports(self) -> None:
        """Have the imports at the top that cells began with, where that is no matter."""
        bound: set[str] = set()
        early = any(EARLY.search(each.code.text) for each in self._sections)
        for section in self._sections:
            code, stay = section.code, list[Imported]()
            for each in code.imports:
                name = each.name.partition(".")[0]
                is_free = self._imports.takes(each) and name not in bound | WORKERS_OWN
                is_first = each.module == "__future__" or (section.task.on_all and not early)
                if is_free and is_first:
                    self._imports.add(each)
                else:
                    stay.append(each)
            bound |= names_bound(code.text)
            if stay:
                block = ImportBlock()
                for each in stay:
                    block.add(each)
                text = "\n\n".join(filter(None, [block.lines(), code.text]))
                section.code = CellCode(text)

    def _text_of(self, section: _Section) -> str:
        task, text = section.task, section.code.text
        if text.strip() and not task.on_all:
            text = guarded(text, task.ranks)
        times = f", which ran {task.runs} times" if task.runs > 1 else ""
        head = f"# --- {title_of(task, shown=True)}{times} ---"
        return "\n".join([head, *spaced(section.before), text]).rstrip("\n")

    # --- names of the notebook ------------------------------------------------------------

    def _in_need(self, text: str, sent: Mapping[str, Sent]) -> list[str]:
        """List names of the notebook that code uses, and before each those that it needs."""
        found: dict[str, None] = {}
        waiting = [(name, False) for name in sorted(names_used(text), reverse=True)]
        seen: set[str] = set()
        while waiting:
            name, is_done = waiting.pop()
            if is_done:
                found[name] = None
            elif name in sent and name not in seen and self._is_users(name):
                seen.add(name)
                waiting.append((name, True))
                waiting += [
                    (need, False) for need in sorted(sent[name].shipped.needs, reverse=True)
                ]
        return [*found]

    def _not_seen(self, text: str, sent: Mapping[str, Sent]) -> list[str]:
        """List names of the notebook that code uses though no task is known to have brought them.

        A set-up cell has brought them along to new workers.
        """
        made = set[str]().union(*(task.made for task in self._past.tasks))
        there = self._own | made | self._known | self._imports.names | _ALWAYS_THERE | {*sent}
        used = names_used(text) - there - self._given.keys()
        return [name for name in sorted(used) if name in self._namespace and self._is_users(name)]

    def _is_users(self, name: str) -> bool:
        return not SYSTEM_NAMES.fullmatch(name) and name not in WORKERS_OWN

    def _give(self, name: str, sent: Sent, section: _Section, bound: set[str]) -> None:
        """Have a name of the notebook there for this cell, as it was sent to it."""
        version, known = sent.shipped.version, self._given.get(name, sent)
        is_new, self._given[name] = name not in self._given, sent
        # What cells have bound since is theirs, until the notebook's is sent again.
        is_same = known is None or (known.shipped.version == version and name not in self._rebound)
        if not is_new and (is_same or known is sent):
            return
        if (text := _text_of(version)) is not None:
            self._place(name, Written(f"{name} = {text}"), section, bound)
            return
        if name not in self._namespace:
            self._lost.append(f"`{name}` was sent to the workers and is gone from the notebook")
            return
        if known is not None and known.shipped.version != version:
            self._lost.append(f"`{name}` was sent in several versions: the script has the last")
        elif self._version_of(name) != version:
            self._lost.append(f"`{name}` has changed since it was sent: the script has it as it is")
        self._write(name, section, bound)

    def _write(self, name: str, section: _Section, bound: set[str]) -> None:
        """Write a name as it is in the notebook now, and before it what it needs."""
        value = self._namespace[name]
        same = self._same_object(name, value)
        origin: Origin = Written(f"{name} = {same}", frozenset({same})) if same else None
        origin = origin or self._origins.of(name, value)
        if isinstance(origin, list):
            for each in origin:
                if self._imports.takes(each):
                    self._imports.add(each)
                else:
                    block = ImportBlock()
                    block.add(each)
                    section.before.append(block.lines())
            return
        if origin is None:
            self._write_file(name, section, bound)
            return
        self._require(origin.needs, origin.first, section, bound)
        self._place(name, origin, section, bound)

    def _write_file(self, name: str, section: _Section, bound: set[str]) -> None:
        for known in self._files.values():
            if name in known.names:
                if name in self._rebound:
                    again = Written(known.code, known.needs, known.needs)
                    self._place(name, again, section, bound)
                return
        values = {
            each: self._namespace[each]
            for each in {name: None, **dict.fromkeys(each.name for each in self._past.sent)}
            if each in self._namespace and self._origins.of(each, self._namespace[each]) is None
        }
        if self._groups[0] != (*values,):
            self._groups = (*values,), sharing(values, self._namespace)
        [group] = [each for each in self._groups[1] if name in each]
        file = file_of([name, *(each for each in group if each != name)], self._namespace)
        if isinstance(file, str):
            line = self._origins.statement(name)
            if isinstance(line, Written):
                self._lost.append(f"`{name}` cannot be saved: its own line makes it again")
                self._require(line.needs, line.first, section, bound)
                self._place(name, line, section, bound)
            else:
                self._lost.append(f"`{name}` cannot be saved ({file})")
            return
        self._files[name] = file
        self._given |= {each: self._given.get(each) for each in file.names}
        if file.module != "torch":
            self._imports.add(Imported(file.module, {"np": "numpy"}.get(file.module, file.module)))
        self._require(file.needs, file.needs, section, bound)
        self._place(name, Written(file.code, file.needs, file.needs), section, bound)

    def _require(
        self, needs: Iterable[str], first: Iterable[str], section: _Section, bound: set[str]
    ) -> None:
        """Have what code of the notebook uses: what cells make themselves comes with these."""
        for need in sorted(needs):
            value_is_here = need in self._namespace and self._is_users(need)
            is_there = need in self._given or need in self._imports.names | _ALWAYS_THERE
            if is_there or not value_is_here or need in self._known:
                continue
            if need in self._own and need not in first:
                continue
            self._given[need] = None
            self._write(need, section, bound)

    def _place(self, name: str, written: Written, section: _Section, bound: set[str]) -> None:
        """Write it at the top, or before this cell where earlier ones make what it takes."""
        self._rebound.discard(name)
        there = self._imports.names | _ALWAYS_THERE | self._known
        is_late = name in bound | self._known or (written.first - there) & self._own
        if is_late or (written.first & set(self._late)):
            section.before.append(written.text)
        else:
            self._top.append(written.text)
            self._known.add(name)

    @property
    def _late(self) -> set[str]:
        texts = (text for section in self._sections for text in section.before)
        return set[str]().union(*map(names_bound, texts))

    def _same_object(self, name: str, value: Any) -> str:
        """Find a name that is written already and stands for the very same object."""
        if is_atomic(value) or isinstance(value, tuple):
            return ""
        others = (each for each in self._known if self._namespace.get(each) is value)
        return next((each for each in others if each != name and each in self._given), "")

    # --- what is missing ------------------------------------------------------------------

    def _say_what_is_missing(self, body: list[str]) -> None:
        text = "\n".join([*self._top, *body])
        there = names_bound(text) | self._imports.names | _ALWAYS_THERE | self._known | self._needs
        for name in sorted(names_used(text) - there):
            if name == "display":
                self._needs.add(name)
            else:
                self._lost.append(f"`{name}` is used and not there: {self._why_missing(name)}")
        later = self._own - self._known - self._imports.names - _ALWAYS_THERE
        for section in self._sections:
            early = names_used(section.code.text) & later
            early -= names_bound(section.code.text) | names_bound("\n".join(section.before))
            if early:
                title = title_of(section.task, shown=True)
                self._lost.append(f"{title} uses {list_names(early)}, which a later cell binds")
            later -= names_bound(section.code.text)

    def _why_missing(self, name: str) -> str:
        for task in self._past.tasks:
            if name not in task.made:
                continue
            what = title_of(task, shown=True)
            return f"{what} {task.status}" if task.status != "ok" else f"{what} bound it"
        if SYSTEM_NAMES.fullmatch(name):
            return "it is IPython's"
        return "no cell binds it"

    # --- the whole ------------------------------------------------------------------------

    def _whole(self, setting: Setting, body: list[str], lost: tuple[str, ...]) -> str:
        text = "\n".join([*self._top, *body])
        for each in sorted(self._needs & {"os", "subprocess", "asyncio"}):
            self._imports.add(Imported(each, each))
        if self._files or "Path(" in text:
            self._imports.add(Imported("Path", "pathlib", "Path"))
        self._imports.add(Imported("os", "os"))
        self._imports.add(Imported("torch", "torch"))
        if setting.backend != "none" or "dist" in names_used(text):
            self._imports.add(Imported("dist", "torch.distributed"))
        data = [f'DATA = Path(__file__).with_name("{setting.stem}_data")'] if self._files else []
        display = [DISPLAY] if "display" in self._needs else []
        parts = [
            docstring(setting, lost),
            self._imports.lines(),
            prologue(setting.backend),
            "\n".join(spaced([*display, *data, *self._top])),
            *body,
            "dist.destroy_process_group()" if setting.backend != "none" else "",
        ]
        return joined(parts)


def _left_out(past: Past) -> list[str]:
    """Say which tasks are not in a script, and what they had made."""
    said = []
    if past.forgotten:
        said.append(f"the first {count(past.forgotten, 'cell')}: they are no longer known")
    for task in past.tasks:
        made = f", which bound {list_names(task.made)}" if task.made else ""
        if task.kind == "cell" and task.status != "ok":
            why = f" ({task.error})" if task.error else ""
            said.append(f"{title_of(task, shown=True)} {_ended(task)}{why}{made}")
        elif task.kind in ("script", "call"):
            said.append(f"{title_of(task, shown=True)}{made}")
    if past.gathered:
        said.append(
            f"what the notebook itself did with {list_names(past.gathered)}, which were gathered"
        )
    return said


def _ended(task: PastTask) -> str:
    return "was interrupted" if task.status == "interrupted" else "failed"


def _text_of(version: object) -> str | None:
    """Read a value off its version, where it is so plain that its text stands for it."""
    match version:
        case (str(kind), str(text)) if kind != "module":
            return literal(eval(text, {"inf": math.inf, "nan": math.nan, "Ellipsis": ...}))
        case _:
            return None


_MAGICS = {
    "values.bind_scattered": "%dist_scatter",
    "values.bind_synced": "%dist_sync",
    "values.give_back": "%dist_restart --keep",
    **{"snapshot": "%dist_restore", "call": "World.run"},
}
"""What people have typed, by op, or the op's module."""

_TITLES = {"script": "`%dist_run {}`", "push": "`%dist_push`"}


def in_order(tasks: Iterable[PastTask], codes: Mapping[int, str]) -> list[PastTask]:
    """Order cells as they ran; `codes` has their Python by `first`.

    A cell that was run again stands where it ran last, unless one that ran since it first did
    uses what it binds: then where it ran first, as in a notebook that is read from the top.
    """
    tasks = [*tasks]
    places = {task.first: task.last for task in tasks}
    used = {first: names_used(code) for first, code in codes.items()}
    for task in tasks:
        if task.runs == 1:
            continue
        bound = names_bound(codes[task.first])
        since = (each for each in tasks if task.first < places[each.first] < task.last)
        if any(used[each.first] & bound for each in since):
            places[task.first] = task.first
    return sorted(tasks, key=lambda task: places[task.first])


def title_of(task: PastTask, *, shown: bool = False) -> str:
    """Name a task: `cell 5` for code, `In [5]` as people see it."""
    if task.kind == "call":
        op, module = task.text, task.text.partition(".")[0]
        return f"`{_MAGICS.get(op) or _MAGICS.get(module, op)}`"
    if task.kind != "cell":
        return _TITLES[task.kind].format(task.text)
    if shown and task.number is not None:
        return f"In [{task.number}]"
    return f"cell {task.first if task.number is None else task.number}"

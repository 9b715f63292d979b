"""Random programs whose statements run in the notebook or on the ranks, by rules that are static.

Both sides are compared with a plain kernel, `Plain`, which runs all statements of a rank in one
namespace.  `Plain` also keeps which side has changed which object, and refuses a statement whose
result depends on changes that its side cannot see:

- The notebook may change its objects until the ranks change them for the first time; such objects
  belong to the ranks then, as do all objects that the ranks make.
- A name belongs to the side that has bound it last.  The notebook uses only its own names, and
  objects whose contents are its own; the ranks use all names and objects.
- An object is lost, and no side uses it, if the ranks have changed it and no longer hold it under
  any name.  So is an object that the notebook has changed and no longer holds when the next cell
  of the ranks begins.
"""

from __future__ import annotations

import ast
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from tests.objects.describe import describe, is_atom, parts, walk

Side = Literal["notebook", "ranks"]
HERE: Side = "notebook"
THERE: Side = "ranks"

NAMES = [*"abcdefghijkl"]
HELPERS = ["P", "S", "D", "counters"]
PRELUDE = """
import torch
import numpy as np
from collections import defaultdict, deque
from dataclasses import dataclass
from tests.objects.describe import describe, trained
from tests.objects.nets import net, sgd, train
"""
CLASSES = """
class P:
    def __init__(self, tag, x=None): self.tag, self.x = tag, x
class S:
    __slots__ = ("tag", "x", "y")
    def __init__(self, tag, x=None): self.tag, self.x = tag, x
@dataclass(eq=False)
class D:
    tag: int
    x: object = None
def counters():
    n, seen = 0, []
    def up(v):
        nonlocal n
        n += 1
        seen.append(v)
        return n
    def other(v):
        seen.append(v)
    return up, other
"""


class Illegal(Exception):
    """A statement that the rules forbid to its side, or that fails."""


@dataclass(frozen=True)
class Step:
    """A statement, the names that it binds, and the objects that it changes or looks into."""

    side: Side
    source: str
    binds: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    conflicts: bool = False

    @property
    def names(self) -> set[str]:
        """The variables that the statement uses."""
        found = {each.id for each in ast.walk(ast.parse(self.source)) if isinstance(each, ast.Name)}
        return found & {*NAMES, *HELPERS}

    def __str__(self) -> str:
        text = self.source.replace("\n", "\n          ")
        told = f"   # then describe {' '.join(self.told)}" if self.told else ""
        side = f"{self.side}!" if self.conflicts else self.side
        return f"{side:<9} {text}{told}"


Key = tuple[str, int]


def keys(value: Any) -> set[Key]:
    """Return the keys of a value's object and of an array's memory; an atom has no keys."""
    if is_atom(value):
        return set()
    found = {("object", id(value))}
    if (memory := _memory(value)) is not None:
        found.add(("memory", memory))
    return found


def _memory(value: Any) -> int | None:
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr()
    return value.__array_interface__["data"][0] if isinstance(value, np.ndarray) else None


class Plain:
    """A plain kernel for each rank, and which side owns the objects and names of rank 0's."""

    def __init__(self, ranks: int) -> None:
        self.spaces: list[dict[str, Any]] = []
        for rank in range(ranks):
            space: dict[str, Any] = {"__name__": "__main__", "rank": rank}
            exec(PRELUDE + CLASSES, space)
            self.spaces.append(space)
        self.space = self.spaces[0]
        self.binder: dict[str, Side] = dict.fromkeys(HELPERS, HERE)
        self.here: dict[str, Any] = {name: self.space[name] for name in HELPERS}
        self.there: dict[str, Any] = {}
        # Objects that the notebook has changed since the ranks' last cell, and changed objects
        # that the notebook did not hold any longer when a cell of the ranks began.
        self.unsent: set[Key] = set()
        self.missed: set[Key] = set()
        self.owner: dict[Key, Side] = {}
        self.made_by: dict[int, Side] = {}
        self._alive: list[Any] = []
        self._register(HERE)

    def run(self, step: Step) -> None:
        """Run a statement; raises Illegal if the rules forbid the statement or if it fails."""
        changed = self._check(step)
        before = self._held()
        if step.side == THERE:
            self.use(({*step.names, *step.told} & self.space.keys()) - {*step.binds})
        code = compile(step.source, "<step>", "exec")
        for space in self.spaces:
            try:
                exec(code, space)
            except Exception as error:  # noqa: BLE001 (whatever the program raises)
                self.here, self.there, self.unsent, self.missed = before
                raise Illegal(repr(error)) from None
        if step.side == THERE:
            self.owner.update(dict.fromkeys(changed, THERE))
        else:
            self.unsent |= changed
        bound = self.there if step.side == THERE else self.here
        for name in step.binds:
            if name in self.space:
                self.binder[name] = step.side
                bound[name] = self.space[name]
            else:
                self.binder.pop(name, None)
                self.here.pop(name, None)
                self.there.pop(name, None)
        self._register(step.side)
        if step.side == HERE and step.told:
            self.use({*step.told})

    def tell(self, step: Step) -> list[str]:
        """Describe the variables that a statement asks the ranks for, once for each rank."""
        if missing := {*step.told} - self.space.keys():
            raise Illegal(f"{missing} are not there")
        return [describe(**{name: space[name] for name in step.told}) for space in self.spaces]

    def use(self, names: set[str]) -> None:
        """Note that a cell of the ranks uses variables; raises Illegal if one of them is lost."""
        before = self._held()
        held = {key for each in walk(self.here.values()).values() for key in keys(each)}
        self.missed |= self.unsent - held
        self.unsent = set()
        gone = names & self.lost_names()
        there = walk(self.there.values())
        # A name of an object that the ranks have arrives, whether the cell uses it or not.
        self._arrive(names | {n for n, each in self.here.items() if id(each) in there})
        if gone := gone or names & self.lost_names():
            self.here, self.there, self.unsent, self.missed = before
            raise Illegal(f"{gone} are lost")

    def _held(self) -> tuple[dict[str, Any], dict[str, Any], set[Key], set[Key]]:
        return dict(self.here), dict(self.there), set(self.unsent), set(self.missed)

    def _check(self, step: Step) -> set[Key]:
        names = step.names
        for name in names - {*step.binds} - self.space.keys():
            raise Illegal(f"{name} is not there")
        own = {name for name in names & self.space.keys() if self.binder.get(name) != HERE}
        if step.side == HERE and own - {*step.binds}:
            raise Illegal(f"{own} are the ranks'")
        try:
            looked = [eval(each, self.space) for each in step.looks]
            changed = [eval(each, self.space) for each in step.changes]
        except Exception as error:  # noqa: BLE001 (whatever the program raises)
            raise Illegal(repr(error)) from None
        found = set[Key]()
        self._alive += changed  # otherwise a new object could get the same id
        for each in changed:
            is_several = isinstance(each, list) and each and isinstance(each[0], str)
            for one in each if is_several and each[0] == ALL else [each]:
                found |= keys(one)
        if step.side == HERE and not step.conflicts:
            for key in found.union(*map(keys, looked)):
                if self.owner.get(key) == THERE:
                    raise Illegal("it is the ranks'")
        return found

    def _register(self, side: Side) -> None:
        for number, value in walk(self.space[name] for name in self.variables).items():
            if number not in self.made_by:
                self.made_by[number] = side
                self._alive.append(value)
            for key in keys(value):
                self.owner.setdefault(key, side)

    @property
    def variables(self) -> list[str]:
        """The names that are bound, in order."""
        return [name for name in (*NAMES, *HELPERS) if name in self.space]

    def _arrive(self, names: set[str]) -> None:
        """Note that the ranks get names of the notebook, and names that their functions read."""
        waiting, seen = [*names], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.space:
                continue
            seen.add(name)
            if self.binder.get(name) == HERE:
                self.there[name] = self.space[name]
            for value in walk([self.space[name]]).values():
                if isinstance(value, types.FunctionType):
                    waiting += {*NAMES, *HELPERS}.intersection(value.__code__.co_names)

    def lost_names(self) -> set[str]:
        """Return the names that lead to an object which the ranks do not hold any longer."""
        held = walk(self.there.values())
        known = {key for number, each in held.items() for key in keys(each)
                 if self.made_by[number] == HERE}  # fmt: skip
        all_held = {key for each in held.values() for key in keys(each)}
        gone = {key for key, side in self.owner.items() if side == THERE and key not in all_held}
        # The notebook's memory is lost if the ranks hold it only by arrays that they have made.
        gone |= {key for key in all_held - known if key[0] == "memory" and key in self._memories}
        gone |= self.missed
        if not gone:
            return set()
        return {
            name
            for name in self.variables
            if any(gone & keys(each) for each in walk([self.space[name]]).values())
        }

    @property
    def _memories(self) -> set[Key]:
        """The memory of arrays that the notebook has made."""
        return {
            key
            for each in self._alive
            if self.made_by.get(id(each)) == HERE
            for key in keys(each)
            if key[0] == "memory"
        }


ALL = "all of these"


# --- statements -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """An expression for an object, and the containers that it leads through."""

    text: str
    value: Any
    looks: tuple[str, ...] = ()


class Writer:
    """Writes a program as a sequence of legal statements."""

    def __init__(self, seed: str, ranks: int, *, both: bool = False) -> None:
        self.chance = random.Random(seed)
        self.plain = Plain(ranks)
        self.both = both
        self._number = 0

    def step(self) -> Step:
        """Return the next statement, which `plain` has run."""
        while True:
            side: Side = HERE if self.chance.random() < 0.45 else THERE
            weights = [weight for weight, _ in STATEMENTS]
            (_, write), = self.chance.choices(STATEMENTS, weights)  # fmt: skip
            step = write(self, side)
            if step is None:
                continue
            with suppress(Illegal):
                if step.side == THERE:
                    step = self._asking(step)
                self.plain.run(step)
                return step if step.side == THERE or step.conflicts else self._asking_after(step)

    def _asking(self, step: Step) -> Step:
        """Return the step with a request to ranks for some variables: its own, and a few others."""
        usable = {*self.plain.variables, *step.binds} - {"counters"}
        named = usable & {*step.names, *step.binds}
        if step.side == HERE and self.chance.random() < 0.3:
            named = set()  # other names must show the change too
        usable -= named | self.plain.lost_names()
        count = min(self.chance.choice([0, 1, 2, 3, len(usable)]), len(usable))
        more = self.chance.sample(sorted(usable), count)
        is_gone = step.source.startswith("del ")
        return replace(step, told=tuple(sorted({*named, *more} - {*step.binds * is_gone})))

    def _asking_after(self, step: Step) -> Step:
        """Return the step, in about half of all cases with a request to ranks for variables."""
        if self.chance.random() < 0.5:
            return step
        asking = self._asking(step)
        with suppress(Illegal):
            if asking.told:
                self.plain.use({*asking.told})
                return asking
        return step

    def number(self, side: Side) -> str:
        """Return an expression for a new number, which on ranks may differ by rank."""
        self._number += 1
        is_by_rank = side == THERE and self.chance.random() < 0.3
        return f"{self._number} + rank" if is_by_rank else f"{self._number}"

    def name(self) -> str:
        """Return a name to be bound."""
        return self.chance.choice(NAMES)

    def paths(self, side: Side, wanted: Callable[[Any], bool]) -> list[Path]:
        """Return expressions for objects of a kind that a side can reach."""
        found, plain = [], self.plain
        for name in plain.variables:
            if name in HELPERS or (side == HERE and plain.binder.get(name) != HERE):
                continue
            waiting = [Path(name, plain.space[name])]
            for depth in range(3):
                found += [each for each in waiting if wanted(each.value)]
                deeper = waiting if depth < 2 else []
                waiting = [one for each in deeper for one in self._inside(side, each)]
        return found

    def path(self, side: Side, wanted: Callable[[Any], bool] = lambda _: True) -> Path | None:
        """Return an expression for an object that a side can reach; None if nothing is in reach."""
        found = self.paths(side, wanted)
        return self.chance.choice(found) if found else None

    def _inside(self, side: Side, path: Path) -> Iterator[Path]:
        value, looks = path.value, (*path.looks, path.text)
        if side == HERE and any(self.plain.owner.get(key) == THERE for key in keys(value)):
            return
        for text, each in _children(value):
            if not is_atom(each):
                yield Path(path.text + text, each, looks)

    def value(self, side: Side) -> tuple[str, tuple[str, ...]]:
        """Return an expression for a new or old value, and the objects into which it looks."""
        chosen = self.chance.random()
        if chosen < 0.25 or (path := self.path(side)) is None:
            return self.number(side), ()
        if chosen < 0.6:
            return path.text, path.looks
        new = self.chance.choice(
            ["[{p}]", "{{'k0': {p}}}", "P({n}, {p})", "S({n}, {p})", "D({n}, {p})", "({p}, {n})",
             "[]", "{{}}", "[{p}, {p}]"]
        )  # fmt: skip
        return new.format(p=path.text, n=self.number(side)), path.looks


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, deque)):
        yield from ((f"[{number}]", each) for number, each in [*enumerate(value)][:3])
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items() if isinstance(key, str))
    elif isinstance(value, torch.nn.Linear):
        yield (".weight", value.weight)
    elif isinstance(value, torch.Tensor):
        if value.grad is not None:
            yield (".grad", value.grad)
    elif type(value).__module__ == "__main__" or isinstance(value, (type, types.FunctionType)):
        for label, each in parts(value):
            if label.isidentifier() and label not in ("type", "defaults"):
                yield (f".{label}", each)


Write = Callable[[Writer, Side], Step | None]
"""Returns a random statement for a side; None if the side has no object for the statement."""


def _kind(*types_: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types_)


def _is_instance(value: Any) -> bool:
    return type(value).__module__ == "__main__"


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and value.__module__ == "__main__"


def new(*templates: str) -> Write:
    """Return a function that writes a statement which binds a name to something new."""

    def write(writer: Writer, side: Side) -> Step:
        x, y = writer.chance.sample(NAMES, 2)
        value, looks = writer.value(side)
        text = writer.chance.choice(templates)
        source = text.format(x=x, y=y, n=writer.number(side), e=value)
        binds = (x, y) if "{y}" in text else (x,)
        return Step(side, source, binds, looks=looks if "{e}" in text else ())

    return write


def of(wanted: Callable[[Any], bool], *templates: str, looks: bool = False) -> Write:
    """Return a function that binds a name to something made of an object that `wanted` accepts.

    That is an alias, a view or a copy of the object, or an object that refers to it.
    """

    def write(writer: Writer, side: Side) -> Step | None:
        if (path := writer.path(side, wanted)) is None:
            return None
        x = writer.name()
        source = writer.chance.choice(templates).format(x=x, p=path.text, n=writer.number(side))
        looked = (*path.looks, path.text) if looks else path.looks
        return Step(side, source, (x,), looks=looked)

    return write


def change(wanted: Callable[[Any], bool], *templates: str, every: str = "{p}") -> Write:
    """Return a function that writes a change in place of an object that `wanted` accepts.

    `every` is an expression for what the statement changes, with `{p}` for the object.
    """

    def write(writer: Writer, side: Side) -> Step | None:
        if (path := writer.path(side, wanted)) is None:
            return None
        value, looks = writer.value(side)
        key = f"k{writer.chance.randrange(4)}"
        text = writer.chance.choice(templates)
        source = text.format(p=path.text, n=writer.number(side), e=value, k=key)
        if "{e}" not in text:
            looks = ()
        changes = (every.format(p=path.text),)
        return Step(side, source, (), changes, (*path.looks, *looks))

    return write


def call(writer: Writer, side: Side) -> Step | None:
    """Write a call of a function that changes its default, captured variables or a global list."""
    path = writer.path(side, lambda value: isinstance(value, types.FunctionType) and (
        value.__name__ != "counters"))  # fmt: skip
    if path is None:
        return None
    function, text = path.value, path.text
    looks = path.looks
    if function.__closure__:
        cells = f"{text}.__closure__"
        changes = f"[{ALL!r}, *{cells}, *(each.cell_contents for each in {cells})]"
    elif function.__defaults__:
        changes = f"{text}.__defaults__[0]"
    else:
        (name, *_) = function.__code__.co_names
        plain = writer.plain
        if not isinstance(plain.space.get(name), list):
            return None
        if side == HERE and plain.binder.get(name) != HERE:
            return None
        if side == THERE and name in plain.lost_names():
            return None
        changes = name
    return Step(side, f"{text}({writer.number(side)})", (), (changes,), (*looks, text))


def use_global(writer: Writer, side: Side) -> Step | None:
    """Write a function that appends to a list by the list's name."""
    lists = [path for path in writer.paths(side, _kind(list)) if path.text in NAMES]
    if not lists:
        return None
    x, a = writer.name(), writer.chance.choice(lists).text
    return None if x == a else Step(side, f"def {x}(v):\n    {a}.append(v)", (x,))


def step_of_training(writer: Writer, side: Side) -> Step | None:
    """Write a training step of a network by an optimizer that has the network's parameters."""
    optimizers = writer.paths(side, _kind(torch.optim.Optimizer))
    models = writer.paths(side, _kind(torch.nn.Module))
    pairs = [
        (model, optimizer)
        for optimizer in optimizers
        for model in models
        if next(model.value.parameters()) is optimizer.value.param_groups[0]["params"][0]
    ]
    if not pairs:
        return None
    m, o = writer.chance.choice(pairs)
    changes = f"[{ALL!r}, *trained({m.text}, {o.text})]"
    looks = (*m.looks, *o.looks, m.text, o.text, f"{o.text}.param_groups[0]")
    return Step(side, f"train({m.text}, {o.text}, 1)", (), (changes,), looks)


def delete(writer: Writer, side: Side) -> Step | None:
    """Write a statement that deletes a name."""
    names = [name for name in writer.plain.variables if name in NAMES]
    if side == HERE:
        names = [name for name in names if writer.plain.binder[name] == HERE]
    if not names or writer.chance.random() < 0.5:
        return None
    name = writer.chance.choice(names)
    return Step(side, f"del {name}", (name,))


def conflict(writer: Writer, side: Side) -> Step | None:
    """Write a change of an object that the ranks have changed, at a new key if it has keys."""
    if not writer.both:
        return None
    plain = writer.plain

    def is_theirs(value: Any) -> bool:
        return plain.made_by.get(id(value)) == HERE and any(
            plain.owner.get(key) == THERE for key in keys(value)
        )

    theirs = [
        path
        for path in writer.paths(HERE, is_theirs)
        if path.text in NAMES and path.text not in plain.lost_names()
        and plain.there.get(path.text) is path.value
    ]  # fmt: skip
    if not theirs:
        return None
    path, n = writer.chance.choice(theirs), writer.number(HERE)
    match path.value:
        case list() | deque():
            text = f"{path.text}.append({n})"
        case dict():
            text = f"{path.text}['n{n}'] = {n}"
        case set():
            text = f"{path.text}.add({n})"
        case torch.nn.Parameter() | torch.nn.Module() | torch.optim.Optimizer() | tuple():
            return None
        case torch.Tensor() | np.ndarray() if not len(path.value):
            return None
        case torch.Tensor():
            text = f"{path.text}.add_({n})"
        case np.ndarray():
            text = f"{path.text}[...] += {n}"
        case bytearray():
            text = f"{path.text}.append({n} % 256)"
        case _:
            if hasattr(type(path.value), "__slots__") or isinstance(path.value, types.MethodType):
                return None
            text = f"{path.text}.n{n} = {n}"
    return Step(HERE, text, (), (path.text,), (), (path.text,), conflicts=True)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.dim() > 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.base is None and value.size > 0


FUNCTION = "def {x}(v, seen=[]):\n    seen.append(v)\n    return len(seen)"
STATEMENTS: list[tuple[float, Write]] = [
    (6, new("{x} = {e}")),
    (3, new("{x} = [{e}]", "{x} = {{'k0': {e}}}", "{x} = P({n}, {e})", "{x} = S({n}, {e})",
            "{x} = D({n}, {e})", "{x} = ({e}, [])", "{x} = deque([{e}], maxlen=4)",
            "{x} = defaultdict(list, k0=[{n}])", "{x} = {{{n}}}", "{x} = bytearray(3)",
            "{x} = {{P({n}, {e})}}")),
    (2, new("class {x}:\n    v = {n}\n    items = []", "{x}, {y} = counters()", FUNCTION)),
    (2, new("{x} = torch.arange(4.)", "{x} = np.arange(5.)", "{x} = torch.zeros(2, 2)",
            "{x} = torch.nn.Parameter(torch.zeros(2))")),
    (2, new("{x} = net()", "{x} = net(); {y} = sgd({x}, momentum=.9)")),
    (5, of(lambda _: True, "{x} = {p}")),
    (2, of(_kind(list, dict, set), "{x} = {p}.copy()", looks=True)),
    (2, of(_is_class, "{x} = {p}()", "class {x}({p}):\n    w = {n}")),
    (1, of(_kind(list), "def {x}(v, seen={p}):\n    seen.append(v)")),
    (3, of(_is_leaf, "{x} = {p}[1:]", "{x} = {p}.view(-1)[:2]" , "{x} = {p}.numpy()",
           "{x} = {p}.detach()")),
    (2, of(_kind(np.ndarray), "{x} = {p}[::2]", "{x} = {p}[1:]")),
    (1, of(_is_whole, "{x} = torch.from_numpy({p})")),
    (1, of(_kind(torch.nn.Parameter), "{x} = {p}.data")),
    (2, of(_kind(torch.nn.Linear), "{x} = sgd({p}, momentum=.9)", "{x} = {p}.weight",
           "{x} = torch.nn.Sequential({p}, torch.nn.Identity())", "{x} = [*{p}.parameters()]")),
    (6, change(_kind(list), "{p}.append({e})", "{p}.insert(0, {e})", "{p}.pop()", "{p}[0] = {e}",
               "{p}.reverse()", "{p}.extend([{n}])", "{p}.clear()")),
    (5, change(_kind(dict), "{p}[{k!r}] = {e}", "{p}.pop({k!r}, None)", "{p}.update({k}={e})")),
    (1, change(_kind(defaultdict), "{p}[{k!r}]")),
    (2, change(_kind(set), "{p}.add({n})", "{p}.add(P({n}))", "{p}.pop() if len({p}) < 2 else 0")),
    (2, change(_kind(deque), "{p}.append({e})", "{p}.popleft()", "{p}.rotate(1)")),
    (5, change(_is_instance, "{p}.x = {e}", "{p}.y = {e}", "del {p}.y")),
    (3, change(_is_class, "{p}.v = {n}", "{p}.w = {e}", "{p}.items = [{e}]")),
    (2, change(_kind(types.FunctionType), "{p}.note = {e}")),
    (4, change(_is_leaf, "{p}.add_({n})", "{p}[0] = {n}", "{p}.mul_(2)")),
    (3, change(_kind(np.ndarray), "{p}[0] = {n}", "{p}[...] += {n}")),
    (1, change(_kind(bytearray), "{p}[0] = ({n}) % 256", "{p}.append(7)")),
    (2, change(_kind(torch.nn.Parameter), "{p}.data.add_({n})", "{p}.requires_grad_()",
               "{p}.grad = None")),
    (1, change(_kind(torch.nn.Linear), "{p}.eval()", "{p}.train()")),
    (1, change(_kind(torch.optim.Optimizer), "{p}.param_groups[0]['lr'] = .01 * {n}",
               every="{p}.param_groups[0]")),
    (5, call),
    (1, use_global),
    (5, step_of_training),
    (2, delete),
    (12, conflict),
]  # fmt: skip


def program(seed: str, ranks: int, length: int, *, both: bool = False) -> list[Step]:
    """Write a program of `length` statements."""
    writer = Writer(seed, ranks, both=both)
    return [writer.step() for _ in range(length)]


def replayed(steps: Sequence[Step], ranks: int) -> list[list[str]]:
    """Return the plain kernels' descriptions after each statement before the first illegal one."""
    plain = Plain(ranks)
    found = []
    with suppress(Illegal):
        for step in steps:
            plain.run(step)
            found.append(plain.tell(step))
    return found

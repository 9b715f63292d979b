"""How a value looked when it was last shipped, to find later whether it has changed.

`nbdist.world.names` keeps these; nothing here keeps a big value alive.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nbdist.values.payload import OPTIMIZER, Identity, is_atomic, kind_of
from nbdist.values.pickling import Pickled, digest_of
from nbdist.words import name_ranks

WHOLE_LIMIT = 4 << 30
"""Up to this many bytes a value is compared whole, at some 5 GB each second."""

PICKLE_LIMIT = 64 << 20
"""Up to this many bytes of Python objects are pickled for each cell that uses them."""

_SMALL = 4096
_SAMPLES = 64


def atomic_version(value: Any) -> tuple[str, str]:
    """Return what differs whenever the value of an atomic object does."""
    return type(value).__name__, repr(value)


def content_version(pickled: Pickled) -> bytes:
    """Return what differs when the value does: the digest of its pickle, and of its buffers.

    Where these are more than `WHOLE_LIMIT` in all they are looked at here and there only; the
    count of changes that every tensor keeps makes up for some of it.
    """
    first, *buffers = (memoryview(frame) for frame in pickled.frames)
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, first)
    in_full = is_compared_whole(pickled)
    for buffer in buffers:
        if in_full:
            _add(digest, buffer)
        else:
            _add_samples(digest, buffer)
    if pickled.is_sketch or not in_full:
        digest.update(repr(pickled.versions).encode())
    return digest.digest()


def is_compared_whole(pickled: Pickled) -> bool:
    """Say whether its `content_version` differs whenever a byte of it does."""
    return pickled.size <= WHOLE_LIMIT


def _add(digest: hashlib.blake2b, view: memoryview) -> None:
    # Four times as fast as any hash in hashlib; no value is forged here.
    digest.update(view if view.nbytes <= 16 * _SMALL else digest_of(view).encode())


def _add_samples(digest: hashlib.blake2b, view: memoryview) -> None:
    digest.update(str(view.nbytes).encode())
    for start in range(0, view.nbytes, max(_SMALL, view.nbytes // _SAMPLES)):
        digest.update(view[start : start + _SMALL])


# --- what is said of variables that ranks have changed in place since they were sent ----------


def done_there(name: str, value: Any, ranks: Collection[int], all_ranks: Collection[int]) -> str:
    """Write `model was trained on the ranks since it was sent`."""
    verb = "trained" if kind_of(value) <= OPTIMIZER else "changed"
    where = "the ranks" if {*ranks} >= {*all_ranks} else name_ranks(ranks)
    return f"{name} was {verb} on {where} since it was sent"


def not_sent_text(done: str, names: Sequence[str]) -> str:
    """Say that the notebook's change was not sent; `names` are to be pushed together."""
    push, it = " ".join(names), "it" if len(names) == 1 else "them"
    return (
        f"{done}; the notebook's change was not sent: `%dist_push {push}` sends {it}, "
        f"`%dist_gather {names[0]}` brings theirs"
    )


def lacking_text(done: str, name: str, ranks: Collection[int], without: Collection[int]) -> str:
    """Say that other ranks lack it, and which two ways there are for them to get it."""
    verb = "does" if len(without) == 1 else "do"
    return (
        f"{done}; {name_ranks(without)} {verb} not have it: "
        f"`%dist_sync {name} --from {min(ranks)}` copies it, `%dist_push {name}` sends the "
        "notebook's"
    )


def sharing_text(done: str, name: str, names: Sequence[str]) -> str:
    """Say that another variable was not sent, as it shares objects with this one."""
    return (
        f"{done}; `{name}` shares objects with it and was not sent: "
        f"`%dist_push {' '.join(names)}` sends them"
    )


# --- which variables of the notebook are the ranks' values, as gather has bound them ----------


_NOTHING = object()


class Gathered:
    """Says `name in gathered` as long as the notebook has not bound the name itself."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._values: dict[str, Identity] = {}
        self._of_this_cell: set[str] = set()

    def __repr__(self) -> str:
        return f"<Gathered {[name for name in self._values if name in self]}>"

    def __contains__(self, name: object) -> bool:
        value = self._values.get(name) if isinstance(name, str) else None
        return value is not None and value.is_still(self._namespace.get(str(name), _NOTHING))

    @property
    def has_any(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._values)

    def add(self, names: Iterable[str]) -> None:
        """Note that these have been bound to what ranks have."""
        for name in names:
            self._values[name] = Identity(self._namespace[name])
            self._of_this_cell.add(name)

    def bound_in_notebook(self, names: Iterable[str]) -> None:
        """Note that a cell has ended that may have bound these names to something else.

        That it bound one to an equal number or text counts too, unless it has gathered it.
        """
        for name in self._values.keys() & set(names):
            may_be_equal = is_atomic(self._namespace.get(name)) and name not in self._of_this_cell
            if may_be_equal or name not in self:
                del self._values[name]
        self._of_this_cell.clear()


def assigned_in(source: str) -> frozenset[str]:
    """Find the names of `x = %dist_gather y` in a cell, as IPython has made Python of it."""
    if "run_line_magic('dist_gather'" not in source:
        return frozenset()
    return frozenset(
        target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _is_gather(node.value)
        for targets in node.targets
        for target in ast.walk(targets)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    )


def _is_gather(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(attr="run_line_magic"), args=[ast.Constant(name), *_]):
            return bool(name == "dist_gather")
    return False


def gathered_text(name: str) -> str:
    """Say why the ranks do not have it, and what sends it."""
    return (
        f"`{name}` was gathered from the ranks, so it is not sent by itself; "
        f"`%dist_push {name}` sends it"
    )

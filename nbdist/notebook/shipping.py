"""Decides which variables of the notebook, and which changes of objects, are sent with a cell.

`NameTable` records which process owns a variable, and `SentObjects` which objects ranks have.
Cells call `plan`, and `%dist_push` calls `push`, on IPython's main thread.
`nbdist.notebook.cells.make_shipment` sends the question of a plan to the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from nbdist.errors import NbdistError, VariableNotSent
from nbdist.notebook.free_names import (
    bound_before,
    dotted_names,
    names_certainly_bound,
    names_used,
    names_used_later,
)
from nbdist.notebook.shipment import (
    HAVE_NAMED_PARTS,
    Packet,
    Shipment,
    path_of,
    replaced_text,
)
from nbdist.values.definitions import SYSTEM_NAMES, Import
from nbdist.values.payload import (
    OPTIMIZER,
    TENSOR,
    Identity,
    is_atomic,
    kind_of,
    least_size,
)
from nbdist.values.pickling import pickle
from nbdist.values.scan import WHOLE_LIMIT, memory_key
from nbdist.values.states import ChangedParts, ObjectState
from nbdist.values.unpicklable import blame, fails_in
from nbdist.values.unpicklable import parts as parts_of
from nbdist.wire.ops import Inspected, type_text
from nbdist.words import count, format_ranks, name_ranks, size_text
from nbdist.world.name_table import (
    WORKERS_MODULES,
    WORKERS_OWN,
    NameTable,
    Sent,
    check_are_free,
)
from nbdist.world.outgoing import Outgoing, SendQuestion
from nbdist.world.sent_objects import Parcel, SentObjects

SMALL_VARIABLE = 64 << 10
"""The most bytes of a variable that is compared even before a cell that does not name the variable.

The cell may call functions on the ranks that use the variable."""

BIG = 64 << 20
"""If a shipment has at least this many bytes, a line says which variables are sent."""

MAX_PARTS_NAMED = 3
"""The most parts of an object for which notices are shown, such as keys of a dict.

The notices are about parts that both the notebook and ranks have changed.
"""

OLD_IN_FUNCTIONS = "functions on the ranks use the older one that they have"

_NO_VALUE = object()


def plan(
    source: str,
    table: NameTable,
    ranks: Iterable[int],
    hidden: Mapping[str, Any] | None = None,
    gathered: Container[str] = (),
    *,
    is_setup: bool = False,
) -> Plan:
    """Return a plan with the variables and changes that `ranks` lack for a cell.

    `source` is the cell after IPython's transformations.  `hidden` is IPython's table of names
    that are not the user's (`shell.user_ns_hidden`), and `gathered` has the names whose values
    were gathered from ranks.  If `is_setup`, the shipment also has all variables that the cell
    needs, for new workers.  Raises `VariableNotSent` or SyntaxError before anything is sent.
    """
    chains = dotted_names(source)
    new_plan = Plan(table, frozenset(ranks), hidden or {}, chains, gathered, is_setup)
    new_plan.binds = names_certainly_bound(source)
    new_plan.bound_before = bound_before(source)
    new_plan.follow(names_used(source), new_plan.bound_before)
    table.in_functions |= names_used_later(source)
    new_plan.follow_calls()
    new_plan.follow_other_names()
    new_plan.compare()
    return new_plan


def push(names: Iterable[str], table: NameTable, ranks: Iterable[int]) -> Plan:
    """Return a plan by which the notebook's variables `names` replace those of the ranks.

    Raises `VariableNotSent`, UsageError for a name such as `rank`, which each worker has of its
    own, and KeyError for a name that the notebook lacks.
    """
    names = [*names]
    check_are_free(names, "`%dist_push`")
    new_plan = Plan(table, frozenset(ranks))
    new_plan.force(names)
    new_plan.compare()
    return new_plan


def version_now(name: str, table: NameTable) -> Hashable:
    """Return the present version of a notebook variable, to compare with a `Sent.version`.

    Raises `VariableNotSent` if the variable cannot be sent any more.
    """
    new_plan = Plan(table, frozenset())
    return new_plan.examine(name).record.version


@dataclass(slots=True)
class _Look:
    """A variable's present value, and the record to keep of that value once it is sent."""

    value: Any
    record: Sent


@dataclass
class Plan:
    """Finds the variables that a cell needs, and the variables and changes that ranks lack.

    `plan` and `push` make a plan.  If the plan has a `question`, the caller asks the ranks and
    passes their replies to `answer`.  Then `shipment` packs what has to be sent.
    """

    _table: NameTable
    _ranks: frozenset[int]
    _hidden: Mapping[str, Any] = field(default_factory=dict)
    _chains: frozenset[tuple[str, ...]] = frozenset()
    _gathered: Container[str] = ()
    _is_setup: bool = False
    _examined: dict[str, _Look] = field(default_factory=dict)
    _forced: frozenset[str] = frozenset()
    _notices: list[str] = field(default_factory=list)
    _big: list[str] = field(default_factory=list)
    _held_back: dict[str, frozenset[int]] = field(default_factory=dict)
    question: SendQuestion | None = None
    binds: frozenset[str] = frozenset()  # variables that the cell assigns unless it fails
    # Maps each name that the cell needs to the names that are bound at every read of it.
    bound_before: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def _names(self) -> dict[str, Any]:
        return self._table.namespace

    @property
    def _objects(self) -> SentObjects:
        return self._table.objects

    @functools.cached_property
    def outgoing(self) -> Outgoing:
        """The objects that the examined variables lead to."""
        forces = bool(self._forced)
        return Outgoing(self._objects, self._names, self._ranks, forces=forces)

    # --- which names ----------------------------------------------------------------------

    # Following a name means to examine the variable, and the variables that its functions and
    # classes use, and so on, as far as they may be sent (`_is_for_workers`).

    def follow(
        self, names: Iterable[str], before: Mapping[str, frozenset[str]] | None = None
    ) -> None:
        """Examine the variables of these names, and the variables that their functions use.

        Variables that must not be sent are left out (`_is_for_workers`).  `before` maps a name that
        the cell reads to the names that the cell has bound before.  In the cell `lock = Lock();
        work()`, the function `work` uses the cell's `lock`.  So the notebook's `lock` is not
        examined, even if `work` needs a variable of that name.
        """
        waiting = [(name, (before or {}).get(name, frozenset())) for name in sorted(names)]
        waiting.reverse()
        while waiting:
            name, bound = waiting.pop()
            if name in self._names and name not in self._examined and self._is_for_workers(name):
                needs = self.examine(name).record.needs - bound
                waiting += [(need, bound) for need in sorted(needs, reverse=True)]

    def follow_calls(self) -> None:
        """Examine variables that functions on the ranks use, even if the cell does not name them.

        The cell may call such functions.  This method examines variables that the notebook has
        bound again since ranks got or bound them, and small variables that may have changed in
        place.  Variables that the cell itself binds first, or that cannot be sent, are left out.
        Also left out is a big value of a variable that was never sent, and that ranks have bound
        themselves: the ranks keep their value, and a notice says so.
        """
        waiting, visited = [*self._table.in_functions], set[str]()
        calls = [bound for name, bound in self.bound_before.items() if self._may_call(name)]
        # Names that the cell certainly binds before it can call any function of the ranks.
        bound_first = self.binds.intersection(*calls)
        while waiting:
            name = waiting.pop()
            if name in visited or name not in self._names:
                continue
            visited.add(name)
            record = self._table.record(name)
            waiting += record.needs if record else ()
            if name in bound_first or name in self._table.too_big or self._is_others(name):
                continue
            value = self._names[name]
            if name in self._table.failed and fails_in(self._names)(value):
                continue
            is_fixed = is_atomic(value) or isinstance(value, types.FunctionType)
            is_big = (record.size if record else least_size(value)) > SMALL_VARIABLE
            # The cell binds the name itself, in most cells before a function reads it, so a big
            # value would be sent in vain.
            if is_big and name in self.binds:
                continue
            # If a rank has bound this name, the notebook has bound it again later: names that ranks
            # have bound last were skipped above, by `_is_others`.
            is_rank_older = bool(calls and self._ranks & self._table.ranks_that_bound(name))
            if is_rank_older and record is None:
                self._follow_small(name, is_big=is_big)
                continue
            may_differ = record is not None and not (is_big or is_fixed)
            if may_differ or is_rank_older or self._table.is_older(name, self._ranks):
                self._follow_or_say(name)

    def _follow_or_say(self, name: str) -> bool:
        """Examine a variable that functions on the ranks use, and the variables that it needs.

        Adds a notice and returns False if the variable cannot be sent.
        """
        if self._follow_unused(name):
            return True
        self._table.failed.add(name)
        self._notify(name, f"`{name}` cannot be sent: {OLD_IN_FUNCTIONS}")
        return False

    def _follow_small(self, name: str, *, is_big: bool) -> None:
        """Examine a variable that ranks have bound and that was never sent, if its value is small.

        A big value is not sent, and a notice says so.  `is_big` is True if the value is known to be
        big.  If the examination finds that the value is big, the examination is undone.
        """
        before = dict(self._examined)
        if not is_big:
            if not self._follow_or_say(name):
                return
            is_big = name in self._examined and self._examined[name].record.size > SMALL_VARIABLE
        if is_big:
            self._examined = before
            self._table.too_big.add(name)
            self._notify(name, f"`{name}`: {OLD_IN_FUNCTIONS}; `%dist_push {name}` sends it")

    def _is_others(self, name: str) -> bool:
        """Return True if the notebook's value of this name must not replace the ranks' values.

        That is so for names such as `rank`, which each worker binds itself, for gathered values,
        and for names that a task has bound on a rank after the notebook did.
        """
        is_own = name in WORKERS_OWN or name in WORKERS_MODULES or name in self._gathered
        return is_own or bool(self._table.ranks_that_own(name))

    def _may_call(self, name: str) -> bool:
        """Return True if a cell that reads this name may call a function of the ranks."""
        if name in WORKERS_OWN or name in WORKERS_MODULES or self._table.import_path(name):
            return False
        has_name = name in self._names or bool(self._table.ranks_with(name))
        return has_name and not isinstance(self._names.get(name), types.ModuleType)

    def follow_other_names(self) -> None:
        """Examine new names that the notebook has given to objects which the ranks already have.

        For example, after `best = model` in the notebook, the ranks bind `best` to their model too.
        Otherwise they would lose the model if the cell bound `model` to something else.  Views of
        memory that the ranks have, such as slices of a tensor, count too.  A name that a rank has
        deleted is left out.
        """
        table, objects = self._table, self._objects
        for name in sorted(table.assigned):
            value = self._names.get(name, _NO_VALUE)
            key = objects.links.key_of(value)
            if key is None:
                key = memory_key(value, objects.links)
            if key is None or self._is_others(name) or table.is_deleted_there(name):
                continue
            if self._ranks <= objects.ranks_with(key) and not (
                self._ranks <= table.ranks_that_have(name)
            ):
                self._follow_unused(name)

    def _follow_unused(self, name: str) -> bool:
        """Examine a variable that the cell itself does not use; return False if it cannot be sent.

        The failure drops all that `Outgoing` has found so far.  So the variables that were examined
        before are examined again.
        """
        examined = [*self._examined]
        try:
            self.follow([name])
        except VariableNotSent:
            self._examined.clear()
            for each in examined:
                self.examine(each)
            return False
        return True

    def force(self, names: Collection[str]) -> None:
        """Plan to send variables to all ranks of the plan, even to ranks that have them.

        The variables that functions in their values need are examined too, as by `follow`.
        """
        self._forced = frozenset(names)
        for name in names:
            self.examine(name)
        for variable in [*self._examined.values()]:
            self.follow(variable.record.needs)

    def _is_for_workers(self, name: str) -> bool:
        """Return True if the notebook's value of a name may be sent to ranks.

        If a user may wonder why the value is not sent, a notice tells the reason.
        """
        value = self._names[name]
        if SYSTEM_NAMES.fullmatch(name) or self._hidden.get(name, _NO_VALUE) is value:
            return False
        if name in self._gathered:
            last = self._table.record(name)
            has_pushed = last and last.identity and last.identity.is_still(value)
            if last and not has_pushed:  # the ranks have another value under this name
                self._notify(name, f"`{name}` was gathered: the cell uses the ranks' own")
            return False
        if name in WORKERS_OWN or name in WORKERS_MODULES:
            is_module = isinstance(value, types.ModuleType)
            if not (is_module and value.__name__ == WORKERS_MODULES.get(name)):
                owned = WORKERS_MODULES.get(name, "its own")
                self._notify(name, f"Your notebook's `{name}` was ignored: each worker has {owned}")
                return False
            if not self._submodules(name, value):
                return False
        owners = self._table.ranks_that_own(name)
        without = self._ranks - owners - self._table.ranks_that_have(name)
        if owners and without:
            self._notify(name, self._missing_text(name, owners, without))
        return not owners

    def _missing_text(self, name: str, owners: frozenset[int], without: frozenset[int]) -> str:
        exists, copy = "exists" if len(owners) == 1 else "exist", f"%dist_sync {name} --from"
        older = without.intersection(self._table.ranks_with(name))
        if older:
            have = f"{name_ranks(older)} {'has' if len(older) == 1 else 'have'}"
            to = f"{min(owners)} -r {format_ranks(older)}"
            return f"`{name}` is {name_ranks(owners)}'s own, {have} an older one: `{copy} {to}`"
        where = f"{exists} on {name_ranks(owners)} but not on {name_ranks(without)}"
        return f"`{name}` {where}: `{copy} {min(owners)}`"

    def _notify(self, name: str, notice: str) -> None:
        """Add a notice, unless `name` had a notice since the notebook last assigned the name."""
        if self._table.is_first_notice(name):
            self._notices.append(notice)

    # --- the present values and their records ---------------------------------------------

    def examine(self, name: str) -> _Look:
        """Return a variable's present value and its record, after a scan of the value's objects.

        The plan then counts the variable as examined.  Raises VariableNotSent if the value cannot
        be pickled.
        """
        value = self._names[name]
        if is_atomic(value):
            version: Hashable = atomic_version(value)
            record = Sent(version, Identity(value))
        elif isinstance(value, types.ModuleType):
            record = self._record_of_module(name, value, self._table.record(name))
        else:
            record = self._record_of_object(name, value)
        self._examined[name] = variable = _Look(value, record)
        return variable

    def _record_of_object(self, name: str, value: Any) -> Sent:
        try:
            token = self.outgoing.scan_value(value)
        except Exception as problem:  # noqa: BLE001 (a user's `__reduce__` can raise anything)
            self._refuse([name], problem)
        scan, reached = self.outgoing.scan, self.outgoing.reach(token)
        needs = frozenset().union(*(scan.needs.get(key, ()) for key in reached))
        digest = hashlib.blake2b(repr(token).encode(), digest_size=16)
        for key in sorted(reached):
            digest.update(scan.states[key].digest)
        size = sum(scan.sizes.get(key, 64) for key in reached)
        return Sent(digest.digest(), Identity(value), needs, size=size, token=token)

    def _refuse(self, names: Collection[str], problem: Exception) -> NoReturn:
        """Raise VariableNotSent for the first of these variables that cannot be pickled.

        `problem` is the error that pickling them together has raised.  If each variable can be
        pickled by itself, raises `problem` if it is an error of nbdist, such as NotEnoughMemory,
        and otherwise VariableNotSent for the first variable.
        """
        fails = fails_in(self._names)
        for name in names:
            if fails(self._names[name]):
                raise VariableNotSent(name, *blame(name, self._names[name], fails, problem))
        if isinstance(problem, NbdistError):  # such as NotEnoughMemory
            raise problem
        name = next(iter(names), "")
        value = self._names.get(name)
        # Each variable can be pickled by itself, so blame the first for the failure of them all.
        raise VariableNotSent(name, *blame(name, value, lambda _: False, problem)) from problem

    def _record_of_module(self, name: str, module: types.ModuleType, last: Sent | None) -> Sent:
        submodules = self._submodules(name, module)
        match last.version if last else None:
            case ("module", last_name, frozenset(before)) if last_name == module.__name__:
                submodules |= before
        version = "module", module.__name__, submodules
        return Sent(version, Identity(module))

    def _submodules(self, name: str, module: types.ModuleType) -> frozenset[str]:
        """Return the submodules of a module that the cell reads, such as `xml.dom` for `xml`.

        A submodule that the notebook has not imported is left out.
        """
        paths = set()
        for chain in self._chains:
            path = module.__name__
            for part in chain[1:] if chain[0] == name else ():
                path = f"{path}.{part}"
                if path not in sys.modules:
                    break
                paths.add(path)
        return frozenset(paths)

    # --- what ranks lack ------------------------------------------------------------------

    def compare(self) -> None:
        """Find the objects that have changed since ranks got them.

        Sets `question` if ranks must be asked whether they have changed objects that would be
        replaced.
        """
        self.outgoing.compare()
        if self._forced:
            return
        objects = self.outgoing.objects_to_inspect()
        names, ranks = set[str](), {r for r, changed in self.outgoing.changed.items() if changed}
        for name in self._examined:
            lack, have = self._ranks_without(name), self._ranks_with(name)
            if ranks_to_ask := lack & self._ranks_to_ask(name):
                names.add(name)
                ranks |= ranks_to_ask
            if lack and have and not self._is_setup:
                reached = self._reached_keys(name) & set[int]().union(*map(self._objects.of, have))
                objects |= dict.fromkeys(reached)
                ranks |= have
            if not lack and self._is_sampled(name):
                self._notify(
                    name,
                    f"`{name}` was taken for unchanged: it is too big to be compared as a whole; "
                    f"`%dist_push {name}` sends it",
                )
        if objects or names:
            self.question = SendQuestion(tuple(sorted(ranks)), objects, tuple(sorted(names)))

    def _is_sampled(self, name: str) -> bool:
        """Return True if a variable leads to memory of which only samples are compared."""
        blocks = map(self._objects.links.blocks.get, self._reached_keys(name))
        return any(block is not None and block.size > WHOLE_LIMIT for block in blocks)

    def answer(self, answers: Mapping[int, Inspected], unasked: Collection[int] = ()) -> None:
        """Use the ranks' answers to `question`, which say which objects the ranks have changed.

        The ranks `unasked` run another task, so it is not known whether they have changed objects.
        """
        self.outgoing.apply_replies(answers)
        self._keep_changed(answers)
        for name in self._examined:
            self._hold_back(name, answers, unasked)
            self._notice_replaced(name, answers)

    def _keep_changed(self, answers: Mapping[int, Inspected]) -> None:
        """Do not send variables that ranks have got from an earlier notebook and have changed.

        From now on the ranks own these variables, and the cell uses the ranks' values.
        """
        for name in [*self._examined]:
            changed = any(name in i.names and i.names[name].is_changed for i in answers.values())
            if changed and self._table.is_of_earlier_notebook(name):
                self._table.record_sent_before(name)
                del self._examined[name]
                self._notify(
                    name,
                    f"`{name}` was changed on the ranks since it was sent: the cell uses "
                    f"theirs; `%dist_push {name}` sends the notebook's",
                )

    def _hold_back(
        self, name: str, answers: Mapping[int, Inspected], unasked: Collection[int]
    ) -> None:
        """Do not send a variable to ranks that lack it after a restart if others have changed it.

        A notice says how to copy a changed value to the restarted ranks.  Copies on the ranks
        `unasked` count as changed, since they may have changed.  Ranks that lack the variable for
        another reason are sent the notebook's value.  If other ranks are known to have changed
        their copies, a notice says how to replace the notebook's value by such a copy.
        """
        lack = self._ranks_without(name)
        if not lack or self._is_setup:
            return
        reached, have = self._reached_keys(name), self._ranks_with(name)
        changed = [r for r in have & answers.keys() if not reached.isdisjoint(answers[r].changed)]
        theirs = {key for r in changed for key in answers[r].changed} & reached
        new = frozenset(rank for rank in lack if self._table.is_missing(name, rank))
        if changed:
            # Leave out ranks that have the changed objects under another name.  They only get one
            # more name for these objects, so no change is lost.
            lack = frozenset(r for r in lack if not theirs <= self._objects.of(r).keys())
            new &= lack
            done = f"`{name}` was {self._verb(name)} on {name_ranks(sorted(changed))}"
            done += " since it was sent"
        else:
            changed, lack = sorted(have & {*unasked}), new
            run = "runs" if len(changed) == 1 else "run"
            done = f"`{name}` is on {name_ranks(changed)}, which {run} another cell"
        if not changed or not lack:
            return
        sync = f"`%dist_sync {name} --from {min(changed)}"
        if new:
            self._held_back[name] = new
            verb = "does" if len(new) == 1 else "do"
            text = (
                f"{done}; {name_ranks(sorted(new))} {verb} not have it: {sync}` copies it, "
                f"`%dist_push {name}` sends the notebook's"
            )
            self._notify(name, text)
        if others := lack - new:
            verb = "gets" if len(others) == 1 else "get"
            text = (
                f"{done}; {name_ranks(sorted(others))} {verb} the notebook's: "
                f"{sync} -r {format_ranks(sorted(others))}` copies theirs"
            )
            self._notify(f"{name} is older", text)

    def _reached_keys(self, name: str) -> set[int]:
        """Return the keys of all objects that a variable leads to."""
        variable = self._examined[name]
        if is_atomic(variable.value) or isinstance(variable.value, types.ModuleType):
            return set()
        return self.outgoing.reach(variable.record.bound_to)

    def _ranks_with(self, name: str) -> frozenset[int]:
        """Return the ranks that have the notebook's object under a name."""
        return self._table.ranks_that_have(name, self._examined[name].record.bound_to)

    def _ranks_without(self, name: str) -> frozenset[int]:
        """Return the ranks to which the variable is sent.

        If the variable is forced, all ranks get it.  Otherwise the ranks that lack its object get
        it, except those for which `_hold_back` has held it back.
        """
        if name in self._forced:
            return self._ranks
        return self._ranks - self._ranks_with(name) - self._held_back.get(name, frozenset())

    def _ranks_to_ask(self, name: str) -> frozenset[int]:
        """Return the ranks that may have got an object under a name, or have bound the name."""
        return self._table.holders(name) | self._table.ranks_that_bound(name)

    # --- packing the shipment -------------------------------------------------------------

    def shipment(self) -> Shipment:
        """Return the shipment, with a packet for each set of ranks to which the same is sent.

        Also adds notices on conflicts and on parts that are replaced on ranks.
        """
        while self.outgoing.renew_replaced():
            for name in [*self._examined]:
                self.examine(name)
            self.outgoing.compare()
        for key, parts in ({} if self._forced else self.outgoing.kept()).items():
            self._notice_conflict(key, parts)
        for key, replaced in self.outgoing.replaced_parts.items():
            self._notice_new_parts(key, frozenset(replaced))
        lacks = {r: [n for n in self._examined if r in self._ranks_without(n)] for r in self._ranks}
        must_send = any(lacks.values()) or any(self.outgoing.changed.values())
        groups = self.outgoing.groups(lacks) if must_send else []
        made = [self._packet(ranks, lacks[ranks[0]]) for ranks in groups]
        packets = tuple(packet for packet in made if packet is not None)
        setup = self._setup_packet() if self._is_setup and self._examined else None
        size = sum(packet.message.size for packet in packets)
        if size >= BIG:
            self._big.append(self._big_text(size, [n for p in packets for n in p.names]))
        if self._forced:
            self._objects.overwrite(self.outgoing.states)
        sent = ((packet.ranks, packet.parcel) for packet in packets)
        parcels = self.outgoing.parcels(sent, self.binds)
        return Shipment(tuple(self._notices), packets, parcels, setup, tuple(self._big))

    def _packet(self, ranks: tuple[int, ...], names: Sequence[str]) -> Packet | None:
        if not names and not self.outgoing.changed[ranks[0]]:
            return None
        try:
            message, states = self.outgoing.message(self._values(names), ranks[0])
        except Exception as problem:  # noqa: BLE001 (a user's `__reduce__` can raise anything)
            self._refuse(names, problem)
        if not self._forced:
            self._notice_dropped(ranks, states)
        self._notice_left_out(states)
        records = {name: self._examined[name].record for name in names}
        return Packet(ranks, tuple(names), message, Parcel(records, states))

    def _setup_packet(self) -> Packet:
        try:
            message, states = self.outgoing.whole(self._values(self._examined))
        except Exception as problem:  # noqa: BLE001 (a user's `__reduce__` can raise anything)
            self._refuse(self._examined, problem)
        records = {name: variable.record for name, variable in self._examined.items()}
        return Packet((), (*self._examined,), message, Parcel(records, states))

    def _values(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._value(name) for name in names}

    def _value(self, name: str) -> Any:
        variable = self._examined[name]
        if isinstance(variable.value, types.ModuleType):
            return Import(variable.value, variable.record.version[2])  # type: ignore[index]
        return variable.value

    # --- notices for the user -------------------------------------------------------------

    def _verb(self, name: str) -> str:
        kind = kind_of(self._names.get(name))
        return "trained" if kind in (*range(OPTIMIZER + 1), TENSOR) else "changed"

    def _notice_conflict(self, key: int, parts: ChangedParts) -> None:
        """Add notices on parts of an object that both the notebook and ranks have changed.

        `key` is the key of the object; `parts` is None for the whole object.  The ranks keep
        their values.  The notices say how to send the notebook's values, and how to gather those of
        the ranks.
        """
        name = self._name_of(key)
        if name is None:
            return
        entry = self._objects.links.by_key.get(key)
        value = None if entry is None else entry()
        is_by_part = entry is not None and entry.tool in HAVE_NAMED_PARTS and parts
        for part in sorted(parts or (), key=repr)[:MAX_PARTS_NAMED] if is_by_part else [None]:
            only = None if part is None else frozenset([part])
            where = path_of(name, self._names.get(name), value, only)
            # `%dist_gather` of a class would bring the notebook's own class, so name the part.
            what = where if isinstance(value, type) else name
            whole = "the notebook's" if where == name else f"all of the notebook's `{name}`"
            text = (
                f"`{where}` was {self._verb(name)} on the ranks since it was sent, and in the "
                f"notebook: the ranks keep theirs. `%dist_push {name}` sends {whole}, "
                f"`%dist_gather {what} --as {name}_ranks` brings theirs"
            )
            if text not in self._notices:
                self._notices.append(text)

    def _notice_new_parts(self, key: int, parts: ChangedParts) -> None:
        """Add notices on parts of an object in which the notebook has put a new object.

        The new object replaces one that ranks have changed, so their changes are lost.
        """
        if (name := self._name_of(key)) is None:
            return
        entry = self._objects.links.by_key.get(key)
        value = None if entry is None else entry()
        for part in sorted(parts or (), key=repr)[:MAX_PARTS_NAMED]:
            only = None if part is None else frozenset([part])
            where = path_of(name, self._names.get(name), value, only)
            self._notices.append(
                f"the notebook has another object in `{where}`: it replaces what the ranks had "
                "changed there"
            )

    def _notice_dropped(self, ranks: Sequence[int], states: Mapping[int, ObjectState]) -> None:
        """Add notices on objects that are sent again, because ranks have dropped them.

        The ranks had changed the objects before.  Their changes are lost.
        """
        lost = {rank: self._objects.lost_on(rank) & states.keys() for rank in ranks}
        ranks_by_name: dict[str, list[int]] = {}
        for rank, keys in lost.items():
            for name in dict.fromkeys(filter(None, map(self._name_of, sorted(keys)))):
                ranks_by_name.setdefault(name, []).append(rank)
        for name, on in ranks_by_name.items():
            verb, gets = ("has", "it gets") if len(on) == 1 else ("have", "they get")
            self._notices.append(
                f"{name_ranks(on)} {verb} {self._verb(name)} `{name}` and dropped it since: "
                f"{gets} the notebook's `{name}`"
            )

    def _notice_left_out(self, states: Mapping[int, ObjectState]) -> None:
        """Add notices on variables that are sent without autograd graphs or without hooks."""
        scan = self.outgoing.scan
        for name in dict.fromkeys(map(self._name_of, sorted(scan.with_graph & states.keys()))):
            if name is not None and kind_of(self._names.get(name)) > OPTIMIZER:
                self._notify(
                    f"graph of {name}",
                    f"`{name}` is sent without its autograd graph: `backward()` on the ranks stops "
                    f"at `{name}`; compute `{name}` in a distributed cell to train",
                )
        for name in dict.fromkeys(map(self._name_of, sorted(scan.with_hooks & states.keys()))):
            if name is not None:
                self._notify(
                    f"hooks of {name}",
                    f"`{name}` is sent without the hooks of its tensors: register them in a "
                    "distributed cell",
                )

    def _name_of(self, key: int) -> str | None:
        """Return the name of a variable that leads to the object with this key.

        Variables of this plan are preferred.  Returns None if no such variable is found.
        """
        for name in self._examined:
            if key in self._reached_keys(name):
                return name
        for name in self._table.owners():
            record = self._table.record(name)
            if record is not None and name in self._names:
                ranks = self._table.ranks_that_have(name)
                if any(key in self._objects.reach(rank, record.bound_to) for rank in ranks):
                    return name
        for name, value in self._names.items():
            top = self._objects.links.key_of(value)
            if top is not None and not name.startswith("_") and self.outgoing.leads_to(top, key):
                return name
        return None

    def _notice_replaced(self, name: str, answers: Mapping[int, Inspected]) -> None:
        """Add a notice if sending a variable replaces an object of ranks that users may miss.

        Users may miss an object that ranks have changed, or that has other names on the ranks.
        """
        lack = self._ranks_without(name)
        replaced = {r: each.names[name] for r, each in answers.items() if name in each.names}
        replaced = {rank: each for rank, each in replaced.items() if rank in lack}
        # Do not name variables that this shipment replaces too: they lose the old object as well.
        also = {other for other in self._examined if self._ranks_without(other)}
        replaced = {
            rank: replace(each, others=tuple(n for n in each.others if n not in also))
            for rank, each in replaced.items()
        }
        value = self._names[name]
        if isinstance(value, types.ModuleType):  # a rank that has the same module loses nothing
            replaced = {r: each for r, each in replaced.items() if each.kind != type_text(value)}
        if any(each.is_changed or each.others for each in replaced.values()):
            self._notices.append(replaced_text(name, self._names[name], replaced, self._verb(name)))

    def _big_text(self, size: int, names: Collection[str]) -> str:
        """Return what is sent as a text such as `corpus (191 MiB) to 4 ranks`.

        `names` are the variables that are sent; small ones are named only if none is large.  `size`
        is the number of bytes.
        """
        names = [*dict.fromkeys(names)]
        heavy = [name for name in names if self._examined[name].record.size >= BIG // 2] or names
        listed = heavy or ["changes"]
        blame = [f", most of it in {path}" for path in map(self._heaviest_part, heavy) if path]
        to = count(len(self._ranks), "rank")
        return f"{', '.join(listed)} ({size_text(size)}{''.join(blame)}) to {to}"

    def _heaviest_part(self, name: str) -> str:
        """Return the path of the largest part of a variable whose value is a callable.

        Returns "" for other variables, and for a part of less than `BIG` / 2 bytes.
        """
        value = self._examined[name].value
        if not callable(value):
            return ""
        size, heaviest = 0, ""
        for step, part in parts_of(value):
            with suppress(Exception):  # the size of a part that cannot be pickled is not known
                part_size = pickle(part, self._names, sketch=True).size
                if part_size > size:
                    size, heaviest = part_size, name + step
        return heaviest if size >= BIG // 2 else ""


def atomic_version(value: Any) -> tuple[str, str]:
    """Return the type and the `repr` of a number, short text or similar value (`is_atomic`).

    Together they tell whether a variable has changed, since different values differ in one of them.
    """
    return type(value).__name__, repr(value)

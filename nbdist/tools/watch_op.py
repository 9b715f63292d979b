"""The ops of `--watch`: count a rank's steps while a cell runs, and compare ranks after some steps.

Runs in workers; the notebook calls `begin` before the cell and `end` after it.  Parameters and
optimizer states are compared when a step ends.  Buffers are compared in the next forward, since DDP
makes them equal only there, by a copy of rank 0's buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.tools import digests
from nbdist.tools.digests import DigestsByPath, Exchange, RanksDiffer, WatchedValue, sample_digest
from nbdist.wire.ops import Facts, Input, Watched
from nbdist.words import one_line
from nbdist.worker import tracking
from nbdist.worker.compat import models

if TYPE_CHECKING:
    from nbdist.worker.namespace import Context

KEPT_FACTS, KEPT_PARTS = 64, 20_000
"""The most comparisons of which a rank keeps the facts, and the most parts that it keeps.

The parts of the newest two comparisons are always kept.  Parts of older comparisons are kept, too,
since only the last rank that comes to a comparison finds the difference: other ranks may be some
steps ahead by then.
"""

MAX_INPUTS = 2_000
"""The most forwards of which a rank keeps digests of the inputs.

Usually this is enough for the last two intervals between comparisons.
"""

_watches: list[RankWatch] = []
"""The `RankWatch` that runs in this process, if any; `end` or the next `begin` removes it."""


def begin(
    context: Context, expressions: Sequence[str], every: int, exchange: Sequence[Any]
) -> dict[str, str]:
    """Start to watch the values of these expressions until the next cell has ended.

    `every` is the number of steps between comparisons.  `exchange` has the arguments of an
    `Exchange`: its key, the ranks, and whether ranks wait for each other.

    Return by expression the types of values that cannot be watched.  If there are any, no watch
    starts.  An expression that has no value yet is no error, since the cell may give it a value.
    """
    while _watches:
        _watches.pop().close()
    refused = {}
    for expression in expressions:
        try:
            why = digests.unsupported_type(eval(expression, context.names))
        except Exception:  # noqa: BLE001 (the cell may make the value later)
            continue
        if why:
            refused[expression] = why
    if not refused:
        key, ranks, waits = exchange
        meets = Exchange(key, ranks, context.rank, context.namespace.warn, waits=waits)
        watch = RankWatch(context, expressions, every, meets)
        _watches.append(watch)
        watch.open()
    return refused


def end(context: Context) -> Watched | None:
    """End the watch, and return this rank's record of it; None if there is no watch."""
    if not _watches:
        return None
    watch = _watches.pop()
    watch.close()
    return watch.result()


class RankWatch:
    """Counts the steps of a rank, and compares its watched values with those of other ranks."""

    def __init__(
        self, context: Context, expressions: Sequence[str], every: int, exchange: Exchange
    ) -> None:
        self._shell, self._names = context.shell, context.names
        self._expressions, self._every, self._exchange = expressions, every, exchange
        self._targets: dict[str, WatchedValue] = {}
        self._refused: dict[str, str] = {}
        self._hooks: list[Any] = []
        self._seen = Seen(every)
        self._clock: Any = None
        self._within: list[Any] = []
        self._parts: dict[str, DigestsByPath] = {}
        self._facts: deque[Facts] = deque(maxlen=KEPT_FACTS)
        self.step = self._times = self._sharded = 0
        self._differing = self._problem = ""
        self._buffers_are_due = False

    def __repr__(self) -> str:
        return f"<Watch of {', '.join(self._expressions)}, step {self.step}>"

    def open(self) -> None:
        """Add hooks to all optimizers, and to watched modules that exist already."""
        self._hooks.append(register_optimizer_step_pre_hook(self._begin_step))
        self._hooks.append(register_optimizer_step_post_hook(self._end_step))
        tracking.step_callbacks.append(self._count_manual_step)
        self._shell.events.register("post_run_cell", self._end_cell)
        self._guarded(self._resolve)
        self._guarded(self._prepare)

    def close(self) -> None:
        """Remove all hooks; `result` stays available."""
        self._seen.close()
        while self._hooks:
            self._hooks.pop().remove()
        if self._count_manual_step in tracking.step_callbacks:
            tracking.step_callbacks.remove(self._count_manual_step)
            self._shell.events.unregister("post_run_cell", self._end_cell)

    def _end_cell(self, _: object) -> None:
        self.close()
        self._exchange.end()

    def result(self) -> Watched:
        """Return this rank's record of the watch.

        If neither a difference nor a problem was found, the record has the parts as they are now,
        so that the notebook can compare the ranks at the end of the cell.
        """
        if not self._problem:
            self._guarded(self._compare_at_end)
        found_step = int(self._differing.split()[0]) if self._differing else 0
        last = found_step or self.step
        return Watched(
            steps=self.step,
            times=self._times,
            found=found_step,
            parts=self._parts.get(self._differing, {}),
            sharded=self._sharded,
            facts=tuple(each for each in self._facts if each.step <= last),
            inputs=self._seen.inputs_until(last),
            refused=self._refused,
            names=digests.names_of(self._targets.values()),
            problem=self._problem,
        )

    def _compare_at_end(self) -> None:
        self._differing = self._differing or self._exchange.first_difference()
        if not self._differing:
            self._resolve()
            self._parts[""] = self._describe()

    # --- steps --------------------------------------------------------------------------------

    def _begin_step(self, optimizer: Any, *_: object) -> None:
        # `_within` has the optimizers whose steps run now.  If this optimizer is already in it, its
        # last step has raised an error: drop that step, and the steps inside of it.
        self._within[:] = [*takewhile(lambda each: each is not optimizer, self._within), optimizer]

    def _end_step(self, optimizer: Any, *_: object) -> None:
        """Count a step that `optimizer` has ended, if this optimizer is the one that is counted.

        The counted optimizer is the first with a watched parameter that makes a step.  A step
        inside of another optimizer's step does not count, as in ZeroRedundancyOptimizer.
        """
        self._within[:] = takewhile(lambda each: each is not optimizer, self._within)
        if self._within:
            return
        if self._clock is None and not self._is_over:
            self._guarded(self._resolve)
            if digests.share_parameters(self._targets.values(), optimizer):
                self._clock = optimizer
        if self._clock is optimizer:
            self._count_step()

    def _count_manual_step(self) -> None:
        """Count a call of `nbdist.watch()` as a step, unless steps of an optimizer are counted."""
        if self._clock is None:
            self._clock = tracking.watch
        if self._clock is tracking.watch:
            self._count_step()

    def _count_step(self) -> None:
        self.step += 1
        if self._is_over:
            return
        self._seen.step = self.step
        if self.step == 1 or self.step % self._every == 0:
            self._guarded(self._compare_step)
        self._prepare()

    @property
    def _is_over(self) -> bool:
        return bool(self._differing or self._problem)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Call `action`; if it raises an error, record the problem, which ends the comparisons.

        The error is not raised, since it must not end the training.  There are two exceptions,
        which end the cell: RanksDiffer, and ConnectionResetError, which is raised when a rank that
        waits for others is released.
        """
        try:
            action()
        except RanksDiffer:
            self._differing = self._exchange.first_difference()
            raise
        except ConnectionResetError:  # the rank was released while it waited for others
            self._problem = "a rank that it waited for has failed"
            raise
        except Exception as error:  # noqa: BLE001 (users' classes, and the store)
            self._problem = f"{type(error).__name__}: {one_line(str(error))}"

    def _compare_step(self) -> None:
        self._resolve()
        targets = self._targets.values()
        ran = frozenset(self._seen.ran)
        self._facts.append(
            Facts(self.step, digests.generator_digests(), ran, digests.count_collectives())
        )
        parts = self._describe()
        self._buffers_are_due = any(map(digests.has_buffers, targets))
        self._compare(f"{self.step}", parts)
        self._times += 1

    def _describe(self) -> DigestsByPath:
        """Return descriptions of the values of all targets, by expression and path.

        If a target cannot be described, record the reason, and watch it no longer.
        """
        parts: DigestsByPath = {}
        self._sharded = 0
        for expression, target in [*self._targets.items()]:
            try:
                parts[expression], sharded = digests.parts_of(target)
                self._sharded += sharded
            except Exception as error:  # noqa: BLE001 (users' classes)
                del self._targets[expression]
                self._expressions = [each for each in self._expressions if each != expression]
                self._refused[expression] = f"{type(error).__name__}: {one_line(str(error))}"
        return parts

    def compare_due_buffers(self) -> None:
        """Compare the buffers if a step was compared since the last call.

        A hook calls this when the forward of a watched module begins.  If the module is inside of a
        DDP module, DDP has by then copied the buffers of rank 0 to all ranks.
        """
        if self._buffers_are_due and not self._is_over:
            self._buffers_are_due = False
            self._guarded(self._compare_buffers)

    def _compare_buffers(self) -> None:
        targets = filter(digests.has_buffers, self._targets.values())
        parts = {each.expression: digests.buffers_of(each) for each in targets}
        self._compare(f"{self.step} (buffers)", parts)

    def _compare(self, when: str, parts: DigestsByPath) -> None:
        self._parts[when] = parts
        kept = [sum(map(len, each.values())) for each in self._parts.values()]
        while sum(kept) > KEPT_PARTS and len(kept) > 2:
            del self._parts[next(iter(self._parts))], kept[0]
        self._differing = self._exchange.compare(when, digests.digest_of_all(parts))

    # --- the watched values -------------------------------------------------------------------

    def _resolve(self) -> None:
        """Evaluate the watched expressions again, and add hooks if a value is a new module."""
        for expression in self._expressions:
            try:
                value = eval(expression, self._names)
            except Exception as error:  # noqa: BLE001 (the expression is the user's)
                if expression not in self._targets:
                    self._refused[expression] = f"{type(error).__name__}: {error}"
                continue
            if why := digests.unsupported_type(value):
                self._refused[expression] = why
                continue
            self._refused.pop(expression, None)
            target = self._targets.get(expression)
            if target is None or target.value is not value:
                self._targets[expression] = WatchedValue(expression, value)
                self._seen.hook(self._targets[expression], self._names, self.compare_due_buffers)

    def _prepare(self) -> None:
        """Record which modules run in the next step, but only if that step will be compared."""
        is_next = self.step == 0 or (self.step + 1) % self._every == 0
        self._seen.note_modules(on=is_next and not self._is_over)


# --- forwards and their inputs --------------------------------------------------------------------


class Seen:
    """Records digests of the inputs of watched modules' forwards, and which modules run.

    Inputs are recorded only in training, and only the newest inputs are kept.  `step` is the number
    of steps that have ended; `RankWatch` sets it.
    """

    def __init__(self, every: int) -> None:
        self.step = 0
        self._hooks: list[Any] = []
        self._module_hooks: list[Any] = []
        self._inputs: deque[tuple[int, Any, str]] = deque(maxlen=min(MAX_INPUTS, 2 * every + 64))
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.ran: set[str] = set()
        """The names of the modules that have run since `note_modules(on=True)` was last called."""
        self._wrapped: set[int] = set()
        self._within = 0  # the number of running forwards of DDP modules around watched ones

    def close(self) -> None:
        """Remove all hooks; the records stay available."""
        self.note_modules(on=False)
        while self._hooks:
            self._hooks.pop().remove()

    def hook(
        self, target: WatchedValue, names: Mapping[str, Any], begins: Callable[[], None]
    ) -> None:
        """Add hooks to the module of a target; one of them calls `begins` when a forward begins.

        If a variable in `names` is a DDP module around the target's module, `begins` is called only
        in forwards of the DDP module.  This method adds no hooks to a module of TorchScript, which
        refuses them, or to a module whose `compile()` was called, which would compile them.  For an
        optimizer the method does nothing.
        """
        if not target.is_module:
            return
        inner = target.inner
        for name, module in target.value.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # such a module refuses hooks
                self._names[module] = f"{target.expression}.{name}" if name else target.expression
        if models.compiles_hooks(inner) or isinstance(inner, torch.jit.ScriptModule):
            return

        def forward(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            if module.training and torch.is_grad_enabled():
                self._inputs.append((self.step + 1, *sample_digest((args, kwargs))))
            # The user may call the inner module directly.  Then DDP has not copied the buffers of
            # rank 0, so they may differ between ranks, and must not be compared.
            if self._within or id(inner) not in self._wrapped:
                begins()

        self._hooks.append(inner.register_forward_pre_hook(forward, with_kwargs=True))
        for model in [*names.values()]:
            if isinstance(model, DistributedDataParallel) and model.module is inner:
                self._wrapped.add(id(inner))
                self._hooks.append(model.register_forward_pre_hook(self._enter_ddp))
                self._hooks.append(model.register_forward_hook(self._leave_ddp, always_call=True))

    def _enter_ddp(self, *_: object) -> None:
        self._within += 1

    def _leave_ddp(self, *_: object) -> None:
        self._within -= 1

    def inputs_until(self, last: int) -> tuple[Input, ...]:
        """Return the recorded inputs of all forwards up to step `last`, the oldest first."""
        return tuple(
            Input(s, int(digest), shapes) for s, digest, shapes in self._inputs if s <= last
        )

    def note_modules(self, *, on: bool) -> None:
        """Start or stop recording which modules run; modules in compiled code are left out."""
        while self._module_hooks:
            self._module_hooks.pop().remove()
        if on:
            self.ran.clear()
            for module in [*self._names]:
                self._module_hooks.append(module.register_forward_pre_hook(self._record_module))

    def _record_module(self, module: torch.nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            self.ran.add(self._names[module])

"""What runs forward on a rank while a cell with `--watch` runs, and what it gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from nbdist.tools.watched.parts import Target, sampled
from nbdist.wire.ops import Input
from nbdist.worker.compat import models

MOST_INPUTS = 2_000
"""Calls of forward of which it is kept what they got: twice as many as there are between looks."""


class Seen:
    """Hooks into the forward of watched modules; `step` is how many steps have ended."""

    def __init__(self, every: int) -> None:
        self.step = 0
        self._hooks: list[Any] = []
        self._of_step: list[Any] = []
        self._inputs: deque[tuple[int, Any, str]] = deque(maxlen=min(MOST_INPUTS, 2 * every + 64))
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._ran: set[str] = set()
        self._wrapped: set[int] = set()
        self._within = 0  # calls of DDP modules

    def __repr__(self) -> str:
        return f"<Seen after step {self.step}, {len(self._inputs)} inputs>"

    def close(self) -> None:
        """Remove all hooks; what was noted stays."""
        self.note_modules(on=False)
        while self._hooks:
            self._hooks.pop().remove()

    def hook(self, target: Target, names: Mapping[str, Any], begins: Callable[[], None]) -> None:
        """Hook into a module; `begins` is called when its forward does, within DDP's if it has one.

        DDP modules around it are those that the user's names lead to.
        """
        if not target.is_module:
            return
        inner = target.inner
        for name, module in target.value.named_modules():
            self._names[module] = f"{target.expression}.{name}" if name else target.expression
        if models.compiles_hooks(inner):
            return

        def forward(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            if module.training and torch.is_grad_enabled():
                self._inputs.append((self.step + 1, *sampled((args, kwargs))))
            # What DDP is around may be called beside it, with buffers that it has not sent.
            if self._within or id(inner) not in self._wrapped:
                begins()

        self._hooks.append(inner.register_forward_pre_hook(forward, with_kwargs=True))
        for model in [*names.values()]:
            if isinstance(model, DistributedDataParallel) and model.module is inner:
                self._wrapped.add(id(inner))
                self._hooks.append(model.register_forward_pre_hook(self._enter))
                self._hooks.append(model.register_forward_hook(self._leave, always_call=True))

    def _enter(self, *_: object) -> None:
        self._within += 1

    def _leave(self, *_: object) -> None:
        self._within -= 1

    def noted(self) -> Iterator[Input]:
        """Yield what forward got, the oldest first."""
        for step, digest, shapes in self._inputs:
            yield Input(step, int(digest), shapes)

    def note_modules(self, *, on: bool) -> None:
        """Note from now on which modules run, or do so no more; not in code that is compiled."""
        while self._of_step:
            self._of_step.pop().remove()
        if on:
            self._ran.clear()
            for module in [*self._names]:
                self._of_step.append(module.register_forward_pre_hook(self._runs))

    def _runs(self, module: torch.nn.Module, _: object) -> None:
        if not torch.compiler.is_compiling():
            self._ran.add(self._names[module])

    def ran(self) -> frozenset[str]:
        """Name those that have run since the last call of `note_modules`."""
        return frozenset(self._ran)

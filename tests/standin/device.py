"""Streams without a GPU: what is put on one runs later, in order, in a thread of its own.

The main thread finds out where it is to wait as on a GPU: when it touches a tensor that
something on its stream still works on, or synchronises.  No signal ends that wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = "CUDA error: device-side assert triggered"
"""What CUDA says of everything once a kernel has failed, for the life of the process."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Event:
    """Something on a stream, which ends once."""

    def __init__(self) -> None:
        # torch's, because no signal wakes who waits for it.
        self._over: Future[None] = Future()

    def end(self) -> None:
        self._over.set_result(None)

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def wait(self) -> None:
        self._over.wait()


class Stream:
    """A thread that runs one thing after the other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], object], Event]] = SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, work: Callable[[], object] = lambda: None) -> Event:
        """Have it run after all that was put here before; what it raises is its own affair."""
        event = Event()
        self._queue.put((work, event))
        return event

    def _run(self) -> None:
        while True:
            work, event = self._queue.get()
            try:
                with torch.no_grad():
                    work()
            finally:
                event.end()


class Device:
    """The process's one device: its current stream, and the tensors that are in use there."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._busy: dict[int, WeakSet[Event]] = {}
        self._watches = False
        self.is_poisoned = False

    @property
    def stream(self) -> Stream:
        """The current one, as soon as it is needed: a fork has no threads."""
        if self._stream is None:
            self._stream = Stream()
        return self._stream

    def watch(self) -> None:
        """Have this thread wait where it touches what is in use."""
        if not self._watches:
            self._watches = True
            _Watch(self).__enter__()
            for name in ("numpy", "cpu", "tolist"):  # none of which is dispatched
                setattr(torch.Tensor, name, self._waiting(getattr(torch.Tensor, name)))

    def use(self, tensors: Iterable[torch.Tensor], event: Event) -> None:
        """Note that they are in use until the event is over."""
        for each in tensors:
            self._busy.setdefault(_place_of(each), WeakSet()).add(event)

    def synchronize(self) -> None:
        """Wait for all that is on the current stream, as `torch.cuda.synchronize` does."""
        self.stream.put().wait()
        self.check()
        self._busy.clear()

    def check(self) -> None:
        """Raise what CUDA raises in a process whose context is of no use any more."""
        if self.is_poisoned:
            raise torch.AcceleratorError(POISON)

    def touch(self, found: object) -> None:
        """Wait if any of these tensors is in use."""
        if not self._busy:
            return
        for each in tree_leaves(found):
            if type(each) in PLAIN and each.device.type == "cpu":
                events = self._busy.pop(_place_of(each), ())
                if any(not event.is_over for event in events):
                    self.synchronize()

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.touch(tensor)
            return original(tensor, *args, **options)

        return method


DEVICE = Device()


class _Watch(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        if not is_fake and any(kind not in PLAIN for kind in types):
            return NotImplemented  # its own operations on plain tensors come here
        if func.namespace not in ("c10d", "_c10d_functional"):
            self._device.touch((args, kwargs))
        return func(*args, **kwargs or {})


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

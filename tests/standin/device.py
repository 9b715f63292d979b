"""Streams without a GPU: work on a stream runs later, in order, in a thread of the stream.

The main thread waits as on a GPU: when it touches a tensor that work on its stream still uses, or
when it synchronizes.  No signal ends that wait.
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
"""CUDA's message for every call once a kernel has failed, for the life of the process."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Event:
    """The end of some work on a stream, which comes once."""

    def __init__(self) -> None:
        # A future of torch, because no signal ends a wait for it.
        self._over: Future[None] = Future()

    def end(self) -> None:
        self._over.set_result(None)

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def wait(self) -> None:
        self._over.wait()


class Stream:
    """A thread that runs pieces of work in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], object], Event]] = SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, work: Callable[[], object] = lambda: None) -> Event:
        """Run `work`, which must raise nothing, after all earlier work of the stream."""
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
    """The only device of the process: its current stream, and the tensors in use on that stream."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._busy: dict[int, WeakSet[Event]] = {}
        self._watches = False
        self.is_poisoned = False

    @property
    def stream(self) -> Stream:
        """The current stream, which is created at its first use: a fork has no threads."""
        if self._stream is None:
            self._stream = Stream()
        return self._stream

    def watch(self) -> None:
        """Make this thread wait when it touches a tensor that is in use."""
        if not self._watches:
            self._watches = True
            _Watch(self).__enter__()
            for name in ("numpy", "cpu", "tolist"):  # methods that are not dispatched
                setattr(torch.Tensor, name, self._waiting(getattr(torch.Tensor, name)))

    def use(self, tensors: Iterable[torch.Tensor], event: Event) -> None:
        """Record that tensors are in use until the event is over."""
        for each in tensors:
            self._busy.setdefault(_place_of(each), WeakSet()).add(event)

    def synchronize(self) -> None:
        """Wait for all that is on the current stream, as `torch.cuda.synchronize` does."""
        self.stream.put().wait()
        self.check()
        self._busy.clear()

    def check(self) -> None:
        """Raise CUDA's error if the context of the process has become unusable."""
        if self.is_poisoned:
            raise torch.AcceleratorError(POISON)

    def touch(self, found: object) -> None:
        """Wait if any tensor in `found` is in use."""
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
            return NotImplemented  # operations of the subclass on plain tensors come here
        if func.namespace not in ("c10d", "_c10d_functional"):
            self._device.touch((args, kwargs))
        return func(*args, **kwargs or {})


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

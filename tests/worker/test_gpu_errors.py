"""Tests of `nbdist.worker.gpu_errors`: which errors last; what the GPU answers is in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nbdist.worker.compat import accelerator
from nbdist.worker.gpu_errors import lasting_error, unfit_after
from nbdist.worker.remedies import remedies
from tests.worker.test_memory_use import shell_with

ASSERT = "device-side assert triggered"
SAID = f"CUDA error: {ASSERT}\nCUDA kernel errors might be asynchronously reported ..."


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"raise Error({SAID!r})", ASSERT),
        (f"raise RuntimeError('HIP error: {ASSERT}')", ASSERT),
        ("raise RuntimeError('Triton Error [CUDA]: misaligned address')", "misaligned address"),
        (f"try: raise Error({SAID!r})\nexcept RuntimeError: raise ValueError('bad')", ASSERT),
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", ""),
        ("raise Error('CUDA error: out of memory')", ""),
        ("raise Error('CUDA error: invalid argument')", ""),
        # Of another process: what a DataLoader raises, and what is only quoted.
        (f"raise RuntimeError('Caught RuntimeError in DataLoader worker 0.\\n{SAID!r}')", ""),
        (f"raise ValueError({SAID!r})", ""),
        ("raise RuntimeError({'not': 'text'})", ""),
    ],
)
def test_which_errors_last(source: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after which the process has to end, also where another one was raised from them."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (this is what is asked)
        exec(source, {"torch": torch, "Error": getattr(torch, "AcceleratorError", RuntimeError)})
    assert lasting_error(caught.value) == found
    assert bool(unfit_after(1, caught.value)) == bool(found)
    if found:
        (said,) = remedies(shell_with(), 1, caught.value)
        assert "`%dist_restart --debug`" in said
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        assert remedies(shell_with(), 1, caught.value) == []


def test_the_gpu_has_failed_at_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked after any failed cell; what it answers of the moment alone means nothing."""

    def fails(said: str) -> Callable[[], bool]:
        def ask() -> bool:
            raise RuntimeError(f"CUDA error: {said}")

        return ask

    unfit = f"A GPU error ({ASSERT}) made the process of rank 2 unusable"
    for found in (lambda: fails(ASSERT), fails(ASSERT)):  # also as soon as its stream is asked for
        monkeypatch.setattr(accelerator, "asks_context", found)
        assert unfit_after(2, ValueError("bad")) == unfit
    of_now = fails("operation not permitted when stream is capturing")
    monkeypatch.setattr(accelerator, "asks_context", lambda: of_now)
    assert unfit_after(2, ValueError("bad")) == ""

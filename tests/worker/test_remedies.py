"""Tests of `nbdist.worker.tracebacks`: what an error says of what there is to do about it."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch

from nbdist.values.payload import open_payload, size_of
from nbdist.values.pickling import unpickle
from nbdist.worker.compat import accelerator
from nbdist.worker.tracebacks import (
    MOST_BYTES,
    contents_of,
    lasting_error,
    remedies,
    unfit_after,
    why_not_started,
)
from tests.worker.test_memory import shell_with


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("lss + 1", ["Did you mean `loss`?"]),
        ("pritn(loss)", ["Did you mean `print`?"]),
        ("xyz", []),
        ("raise NameError('lss')", []),
        ("loss.cpy()", []),
        (
            "loss.cuda()",
            ["There is no GPU here: `.to(device)` instead of `.cuda()`; `device` is cpu."],
        ),
    ],
)
def test_hints(source: str, said: list[str]) -> None:
    """A name that is like one of the rank's, and the device that there is."""
    if torch.cuda.is_available() and "cuda" in source:
        pytest.skip("there is a GPU")
    names = {"loss": torch.ones(1), "device": torch.device("cpu"), "torch": torch}
    with pytest.raises(Exception) as caught:  # noqa: PT011 (this is what is asked)
        exec(source, names)
    assert remedies(shell_with(**names), 0, caught.value) == said


COUNTING = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error "
)
NCCL_SAYS = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run "
    "with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\n"
)
OF_STARTS = {
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx": "its driver does not fit this torch",
    f"{COUNTING}804: forward compatibility was attempted on non supported HW": "its driver does",
    f"{COUNTING}803: system has unsupported display driver / cuda driver combination": "its driver",
    f"{COUNTING}802: system not yet initialized": "the machine's NVSwitch is not up",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be "
    "asynchronously reported": "another process has it to itself (",
    "CUDA error: out of memory\nCUDA kernel errors might be": "its memory is full",
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity": "its memory is",
    f"{NCCL_SAYS}Cuda failure 2 'out of memory'": "its memory is full before anything has run",
    "CUDA error: unknown error\nCUDA kernel errors might be": "it does not respond, or has gone",
    "CUDA unknown error - this may be due to an incorrectly set up environment": "it does not",
    "CUDA error: uncorrectable ECC error encountered": "it does not respond, or has gone",
    "No CUDA GPUs are available": "it does not respond, or has gone",
    "CUDA error: invalid device ordinal\nGPU device may be out of range": "CUDA has none of this",
    "CUDA error: no kernel image is available for execution on the device": "this torch (",
    "Found no NVIDIA driver on your system. Please check": "torch finds no driver of NVIDIA's",
    "Cannot access accelerator device when none is available.": "this torch (",
    f'{NCCL_SAYS}NCCL_NVLS_ENABLE has been set to "1" and communicator has': "another rank has it",
    f"{NCCL_SAYS}Multiple Ranks are using the same GPU/Partition. Set": "another rank has it too",
}


@pytest.mark.parametrize(("text", "begins"), OF_STARTS.items())
def test_a_gpu_that_keeps_a_worker_from_starting(text: str, begins: str) -> None:
    """One line says which GPU of which machine, what is wrong with it, and what to do."""
    said = why_not_started("MIG-8f6e", RuntimeError(text))
    assert said.startswith(f"GPU MIG-8f6e of {socket.gethostname()}: {begins}")
    assert "\n" not in said
    assert "`" in said or "install" in said
    assert "{" not in said


def test_starts_that_no_gpu_keeps() -> None:
    """An error of something else has no such line."""
    assert why_not_started("0", RuntimeError("Connection closed by peer")) == ""
    assert why_not_started("0", MemoryError("out of memory")) == ""


def test_a_gpu_that_fails_in_a_cell() -> None:
    """The first use of a GPU can be in a cell; full memory is accounted for there instead."""
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    (line,) = remedies(shell_with(), 0, busy)
    assert line.startswith("The GPU cannot be used: another process has it to itself")
    assert remedies(shell_with(), 0, RuntimeError("CUDA error: invalid argument")) == []


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


class Model:
    """Something large that lacks an attribute."""

    def __init__(self) -> None:
        self.weights = "x" * (1 << 20)

    def __reduce__(self) -> str:
        raise AssertionError("it must not be pickled")


def test_the_object_that_lacks_an_attribute_stays_where_it_is() -> None:
    """It may be a model of gigabytes; the attribute's name is sent."""
    try:
        Model().foward  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        packed = contents_of(error, {})
    args, attributes, whole = unpickle(open_payload(packed), {})
    assert unpickle(args[0]) == "'Model' object has no attribute 'foward'"
    assert unpickle(attributes["name"]) == "foward"
    assert (sorted(attributes), whole) == (["name"], None)


def test_it_stays_small() -> None:
    """Of an argument that is too large a text is sent; an attribute is left out."""
    error = ValueError(b"x" * 100 * MOST_BYTES)
    error.data = b"x" * 2 * MOST_BYTES  # type: ignore[attr-defined]
    packed = contents_of(error, {})
    assert packed.segment is None
    assert size_of(packed.frames) < MOST_BYTES
    args, attributes, _ = unpickle(open_payload(packed), {})
    assert unpickle(args[0]).startswith("b'xxx")
    assert attributes == {}

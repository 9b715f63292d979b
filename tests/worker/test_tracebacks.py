"""Tests of `nbdist.worker.tracebacks`: what is said of an exception, and what to do about it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from nbdist.errors import WorkerError
from nbdist.output.events import Failure
from nbdist.values.payload import open_payload, size_of
from nbdist.values.pickling import unpickle
from nbdist.worker.compat import accelerator
from nbdist.worker.tracebacks import (
    MOST_BYTES,
    MOST_CHARACTERS,
    contents_of,
    failure_of,
    in_few_words,
    lasting_error,
    message_of,
    own_part,
    remedies,
    unfit_after,
    why_not_started,
)
from nbdist.world.running import RunningTask
from nbdist.world.world import World
from tests.worker.test_memory import shell_with
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

RAISES = "if rank == 1: raise LookupError('no such shard')"

DRAWN = {
    "a showtraceback of one's own": "shell.showtraceback = lambda *args, **options: None",
    "a _showtraceback that fails": "shell._showtraceback = lambda *args: 1 / 0",
    "set_custom_exc that fails": "shell.set_custom_exc((Exception,), lambda *args: 1 / 0)",
    "an InteractiveTB that fails": "del shell.InteractiveTB.__class__.structured_traceback",
    "no stdout": "import sys; sys.stdout = sys.stderr = None",
    "no __main__": "import sys; del sys.modules['__main__']",
    "no more descriptors": (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))"
    ),
    "no linecache": "import linecache; linecache.getlines = linecache.checkcache = None",
    "a session that sends no errors": (
        "send = shell.kernel.session.send\n"
        "shell.kernel.session.send = lambda stream, kind, *args, **options: (\n"
        "    None if kind == 'error' else send(stream, kind, *args, **options))"
    ),
}
"""What a cell does before another one, or itself, raises."""


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, show=False) as world:
        yield world


def ran(world: World, source: str) -> RunningTask:
    running = world.submit(world.task(source, execution_count=7))
    world.session.wait(running)
    return running


@pytest.mark.parametrize("drawn", DRAWN)
def test_failed_cell_is_failed(world: World, drawn: str) -> None:
    """In the cell that changes how errors are shown, and in the next one."""
    change = "\n".join(f"    {line}" for line in DRAWN[drawn].splitlines())
    setup = f"if rank == 1:\n    shell = get_ipython()\n{change}\n"
    for source in (setup + RAISES, RAISES):
        running = ran(world, source)
        assert list(running.transcript.errors) == [1]
        failure = running.transcript.errors[1]
        assert isinstance(failure, Failure)
        assert (failure.name, failure.message) == ("LookupError", "no such shard")
        assert "builtins:LookupError" in failure.kinds
        error = running.error()
        assert isinstance(error, WorkerError)
        assert isinstance(error, LookupError)
        assert error.rank == 1
    world.replace([1])


def test_error_that_is_only_shown(world: World) -> None:
    """A traceback that a cell shows of an error that it has met does not make it a failed one."""
    running = ran(
        world,
        "if rank == 1:\n    try:\n        1 / 0\n    except ZeroDivisionError:\n"
        "        get_ipython().showtraceback()\n    print('went on')",
    )
    assert running.error() is None
    assert running.transcript[1].state == "ok"
    (screen,) = running.transcript[1].pieces
    lines = [line.text for line in screen.tail(100)]
    assert any("ZeroDivisionError" in line for line in lines)
    assert "went on" in lines


class ShardError(LookupError):
    """A user's own."""


def caught(code: str) -> BaseException:
    """What the code raises, as code of a file that is no cell."""
    try:
        exec(compile(code, "/home/me/train.py", "exec"), {"ShardError": ShardError})
    except BaseException as error:  # noqa: BLE001 (it is what is looked at)
        return error
    raise AssertionError("nothing was raised")


def test_a_failure() -> None:
    """Its words, the calls by file and line, and the classes by which others may catch it."""
    failure = failure_of(caught("def load():\n    raise ShardError('no shard 3')\nload()"))
    assert (failure.name, failure.message) == ("ShardError", "no shard 3")
    assert failure.traceback[-3:] == (
        "File /home/me/train.py:3, in <module>",
        "File /home/me/train.py:2, in load",
        "ShardError: no shard 3",
    )
    own, *others = failure.kinds
    assert own.endswith(":ShardError")
    assert others == [
        "builtins:LookupError",
        "builtins:Exception",
        "builtins:BaseException",
        "builtins:object",
    ]
    assert failure.connections == ""


def test_a_failure_of_connections() -> None:
    """It says that those to other ranks have ended."""
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert failure_of(caught(f"raise RuntimeError({gloo!r})")).connections == "ended"


def test_messages() -> None:
    """As much as is read, in characters that can be sent; some cannot be made at all."""
    long = message_of(ValueError("x" * (MOST_CHARACTERS + 1_000)))
    assert long == "x" * MOST_CHARACTERS + " … 1,000 more characters"
    assert message_of(ValueError("half \ud800")) == "half \\ud800"
    odd = caught("class Odd(Exception):\n    def __str__(self): raise LookupError\nraise Odd")
    assert message_of(odd) == "<its text cannot be made: LookupError>"


def test_errors_that_are_too_long_to_colour() -> None:
    """IPython gets another of the same name and cause; one that is short it gets itself."""
    short, cause = ValueError("bad"), KeyError(1)
    assert in_few_words(ValueError, short) == (ValueError, short)
    long = ShardError("x" * (2 * MOST_CHARACTERS))
    long.__cause__ = cause
    kind, shown = in_few_words(ShardError, long)
    assert (kind.__name__, shown.__cause__) == ("ShardError", cause)
    assert len(str(shown)) < MOST_CHARACTERS + 100


def test_own_part_of_a_traceback() -> None:
    """It begins where IPython's calls end."""
    source = "def run(): exec(compile('1 / 0', '<cell>', 'exec'))\nrun()"
    try:
        exec(compile(source, "/lib/IPython/core/interactiveshell.py", "exec"), {})
    except ZeroDivisionError as error:
        own = own_part(error.__traceback__.tb_next if error.__traceback__ else None)
    assert own is not None
    assert own.tb_frame.f_code.co_filename == "<cell>"
    assert own_part(None) is None


def test_a_last_value_that_cannot_be_shown(world: World) -> None:
    """What its class raises is what ends the cell, with the line in its traceback."""
    odd = "class Odd:\n    def _repr_html_(self): raise LookupError('odd')\n"
    running = ran(world, f"{odd}if rank == 0: Odd = int\nOdd()")
    error = running.error()
    assert isinstance(error, LookupError)
    assert (error.rank, error.args) == (1, ("odd",))
    (failure,) = running.transcript.errors.values()
    assert isinstance(failure, Failure)
    assert (failure.name, failure.message) == ("LookupError", "odd")
    assert "raise" in "".join(failure.traceback)


def test_a_falsy_exception(world: World) -> None:
    """It is an error as any other, of its own class."""
    falsy = "def __len__(self): return 0"
    source = f"class Empty(LookupError):\n    {falsy}\nif rank == 1: raise Empty('a', 2)"
    error = ran(world, source).error()
    assert isinstance(error, LookupError)
    assert error.args == ("a", 2)
    assert "LookupError" not in str(error)
    assert "Empty: ('a', 2)" in str(error)


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
    with pytest.raises(Exception) as raised:  # noqa: PT011 (this is what is asked)
        exec(source, names)
    assert remedies(shell_with(**names), 0, raised.value) == said


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
    with pytest.raises(Exception) as raised:  # noqa: PT011 (this is what is asked)
        exec(source, {"torch": torch, "Error": getattr(torch, "AcceleratorError", RuntimeError)})
    assert lasting_error(raised.value) == found
    assert bool(unfit_after(1, raised.value)) == bool(found)
    if found:
        (said,) = remedies(shell_with(), 1, raised.value)
        assert "`%dist_restart --debug`" in said
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        assert remedies(shell_with(), 1, raised.value) == []


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

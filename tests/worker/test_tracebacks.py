"""Tests of `nbdist.worker.tracebacks`: reports of exceptions, and remedies."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
import torch

from nbdist.errors import WorkerError
from nbdist.output.ansi import strip
from nbdist.output.events import Failure
from nbdist.values.payload import open_payload, size_of
from nbdist.values.pickling import unpickle
from nbdist.worker.compat import accelerator
from nbdist.worker.tracebacks import (
    MAX_ARGUMENT_BYTES,
    MAX_FAILURE_LENGTH,
    contents_of,
    failure_of,
    find_recursions,
    gpu_start_error,
    lasting_error,
    message_of,
    remedies,
    unfit_reason,
    with_short_message,
)
from nbdist.world import dispatch
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.worker.ops.test_memory import shell_with

pytestmark = pytest.mark.shared_world(2)

RAISES = "if rank == 1: raise LookupError('no such shard')"

DRAWN = {
    "a showtraceback of one's own": "shell.showtraceback = lambda *args, **options: None",
    "a _showtraceback that fails": "shell._showtraceback = lambda *args: 1 / 0",
    "set_custom_exc that fails": "shell.set_custom_exc((Exception,), lambda *args: 1 / 0)",
    "an InteractiveTB that fails": "del shell.InteractiveTB.__class__.structured_traceback",
    "no stdout, linecache and __main__": (
        "import linecache, sys; linecache.getlines = linecache.checkcache = None\n"
        "sys.stdout = sys.stderr = None; del sys.modules['__main__']"
    ),
    "no more descriptors": (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))"
    ),
    "a session that sends no errors": (
        "send = shell.kernel.session.send\n"
        "shell.kernel.session.send = lambda stream, kind, *args, **options: (\n"
        "    None if kind == 'error' else send(stream, kind, *args, **options))"
    ),
}
"""Changes that a cell makes before an exception in this cell and in the next cell, by name."""


def ran(world: World, source: str) -> TaskRun:
    running = world.submit(world.task(source, execution_count=7))
    dispatch.wait(world.engine, running)
    return running


@pytest.mark.parametrize("drawn", DRAWN)
def test_a_failed_cell_is_reported_as_failed(world: World, drawn: str) -> None:
    """A cell is reported as failed even if it, or an earlier cell, changes how errors are shown."""
    change = "\n".join(f"    {line}" for line in DRAWN[drawn].splitlines())
    setup = f"if rank == 1:\n    shell = get_ipython()\n{change}\n"
    for source in (setup + RAISES, RAISES):
        running = ran(world, source)
        assert list(running.transcript.errors) == [1]
        failure = running.transcript.errors[1]
        assert isinstance(failure, Failure)
        assert (failure.name, failure.message) == ("LookupError", "no such shard")
        assert "builtins:LookupError" in failure.kinds
        error = error_of(running)
        assert isinstance(error, WorkerError)
        assert isinstance(error, LookupError)
        assert error.rank == 1
    world.replace([1])


def test_an_error_that_is_only_shown_fails_no_cell(world: World) -> None:
    """A cell that shows the traceback of an error that it has caught does not fail."""
    shows = "try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()\nprint('went on')"
    running = ran(world, shows)
    assert error_of(running) is None
    assert running.transcript[1].state == "ok"
    (screen,) = running.transcript[1].pieces
    lines = [line.text for line in screen.tail(100)]
    assert any("ZeroDivisionError" in line for line in lines)
    assert "went on" in lines


class ShardError(LookupError):
    """An exception class of the user."""


def caught(code: str) -> BaseException:
    """Return the exception that code raises, as code of a file that is no cell."""
    try:
        exec(compile(code, "/home/me/train.py", "exec"), {"ShardError": ShardError})
    except BaseException as error:  # noqa: BLE001 (it is what is looked at)
        return error
    raise AssertionError("nothing was raised")


def test_a_failure_has_message_calls_and_classes() -> None:
    """A failure has message, calls and base classes, and says whether gloo's connections ended."""
    failure = failure_of(caught("def load():\n    raise ShardError('no shard 3')\nload()"))
    assert (failure.name, failure.message) == ("ShardError", "no shard 3")
    assert failure.traceback[-3:] == (
        "File /home/me/train.py:3, in <module>",
        "File /home/me/train.py:2, in load",
        "ShardError: no shard 3",
    )
    own, *others = failure.kinds
    assert own.endswith(":ShardError")
    bases = (LookupError, Exception, BaseException, object)
    assert others == [f"builtins:{base.__name__}" for base in bases]
    assert failure.connections == ""
    assert failure_of(caught("raise KeyboardInterrupt")).traceback[-1] == "KeyboardInterrupt"
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    assert failure_of(caught(f"raise RuntimeError({gloo!r})")).connections == "ended"


def test_messages_are_made_short_and_sendable() -> None:
    """Messages are cut and can be sent; IPython gets an exception whose message is cut."""
    long = message_of(ValueError("x" * (MAX_FAILURE_LENGTH + 1_000)))
    assert long == "x" * MAX_FAILURE_LENGTH + " … 1,000 more characters"
    assert message_of(ValueError("half \ud800")) == "half \\ud800"
    odd = caught("class Odd(Exception):\n    def __str__(self): raise LookupError\nraise Odd")
    assert message_of(odd) == "<its text cannot be made: LookupError>"
    short, cause = ValueError("bad"), KeyError(1)
    assert with_short_message(ValueError, short) == (ValueError, short)
    error = ShardError("x" * (2 * MAX_FAILURE_LENGTH))
    error.__cause__ = cause
    kind, shown = with_short_message(ShardError, error)
    assert (kind.__name__, shown.__cause__) == ("ShardError", cause)
    assert len(str(shown)) < MAX_FAILURE_LENGTH + 100


def test_odd_exceptions_fail_the_cell(world: World) -> None:
    """An error while the last value is displayed fails the cell, as a falsy exception does."""
    odd = "class Odd:\n    def _repr_html_(self): raise LookupError('odd')\n"
    running = ran(world, f"{odd}if rank == 0: Odd = int\nOdd()")
    error = error_of(running)
    assert isinstance(error, LookupError)
    assert (error.rank, error.args) == (1, ("odd",))
    (failure,) = running.transcript.errors.values()
    assert isinstance(failure, Failure)
    assert (failure.name, failure.message) == ("LookupError", "odd")
    assert "raise" in "".join(failure.traceback)
    falsy = "def __len__(self): return 0"
    source = f"class Empty(LookupError):\n    {falsy}\nif rank == 1: raise Empty('a', 2)"
    error = error_of(ran(world, source))
    assert isinstance(error, LookupError)
    assert error.args == ("a", 2)
    assert "LookupError" not in str(error)
    assert "Empty: ('a', 2)" in str(error)


def test_exception_groups_name_the_lines_of_the_cell(world: World) -> None:
    """A group's traceback names cells and no files of a process, so equal groups are merged."""
    source = (
        "def check():\n    raise KeyError('shard')\n"
        "try:\n    check()\nexcept KeyError as error:\n"
        "    raise ExceptionGroup('all', [error, OSError()])"
    )
    running = ran(world, source)
    (group,) = running.transcript.groups()
    assert (group.ranks, group.likeness) == ((0, 1), "same")
    (failure, _) = running.transcript.errors.values()
    assert isinstance(failure, Failure)
    text = "\n".join(failure.traceback)
    for line in ("line 6\n", "line 4\n", "line 2, in check()\n"):
        assert f"Cell In[7], {line}" in text
    assert 'File "' not in text


RECURSION = {
    "def call(x): return call(x)\ncall(1)": (r"… 9\d\d calls of the same line", 2),
    "class Net(torch.nn.Module):\n    def forward(self, x): return self(x)\nNet()(1)": (
        r"… [\d,]+ calls of the same 3 lines",
        5,  # the recursion may end at any of the 3 lines
    ),
    # The cause is folded as well as the exception that is raised from it.
    "def call(x):\n  try: call(x)\n  except RecursionError as error: e = error; raise\n"
    "try: call(1)\nexcept RecursionError as error: raise ValueError from error": (
        r"… 9\d\d calls of the same line",
        3,
    ),
}
"""By a cell's code, the line that replaces repeated calls, and the number of other calls."""


@pytest.mark.parametrize("mode", ["Context", "Plain"])
@pytest.mark.parametrize("source", RECURSION)
def test_endless_recursion_is_folded(world: World, source: str, mode: str) -> None:
    """Calls that repeat earlier calls are a single line, with `%xmode Context` and `Plain`."""
    said, most = RECURSION[source]
    world.execute(f"%xmode {mode}")
    failure = ran(world, source).transcript.errors[1]
    assert isinstance(failure, Failure)
    text = strip("\n".join(failure.traceback))
    assert len(re.findall(said, text)) == 1
    assert len(re.findall(r"^ *(?:Cell In\[7\]|File )", text, re.MULTILINE)) <= most + 1
    assert error_of(ran(world, "call = Net = 1\n%xmode Context")) is None


def test_calls_are_folded_from_the_fourth_repetition_on() -> None:
    """A call, or several in a cycle, is folded from the fourth repetition on; other calls stay."""
    assert [*find_recursions("abcabdd")] == []
    assert [*find_recursions("xaaaay")] == []
    assert [*find_recursions("xaaaaay")] == [(2, 6, "… 4 calls of the same line")]
    assert [*find_recursions("x" + 6 * "abc" + "aby")] == [
        (4, 19, "… 15 calls of the same 3 lines")
    ]
    assert [*find_recursions(9 * "a" + 5 * "bc")] == [
        (1, 9, "… 8 calls of the same line"),
        (11, 19, "… 8 calls of the same 2 lines"),
    ]


def test_remedies_suggest_names_and_devices() -> None:
    """Remedies suggest a similar name, the device that exists, or a call without a launcher."""
    names = {"loss": torch.ones(1), "device": torch.device("cpu"), "torch": torch}
    on_cpu = "There is no GPU here: `.to(device)` instead of `.cuda()`; `device` is cpu."
    launcher = "Every rank runs this cell already: call the function without a launcher."
    for source, said in {
        "lss + 1": ["Did you mean `loss`?"],
        "pritn(loss)": ["Did you mean `print`?"],
        "xyz": [],
        "raise NameError('lss')": [],
        "loss.cpy()": [],
        "loss.cuda()": [on_cpu],
        "torch.cuda.set_device(0)": [on_cpu],
        "loss.to(0)": [on_cpu],
        "def notebook_launcher(): 1 / 0\nnotebook_launcher()": [launcher],
    }.items():
        if not (torch.cuda.is_available() and ("cuda" in source or "to(0)" in source)):
            with pytest.raises(Exception) as raised:  # noqa: PT011 (this is what is asked)
                exec(source, {**names})
            assert remedies(shell_with(**names), 0, raised.value) == said, source


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
    "driver by downloading and installing a new version from the URL": "its driver does not fit",
    f"{COUNTING}804: forward compatibility was attempted on non supported HW": "its driver does",
    f"{COUNTING}803: system has unsupported display driver / cuda driver combination": "its driver",
    f"{COUNTING}802: system not yet initialized": "the machine's NVSwitch is not up",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable": "another process has it to",
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


def test_a_gpu_start_error_has_a_remedy() -> None:
    """A single line names the GPU and its machine, the fault, and the remedy."""
    for text, begins in OF_STARTS.items():
        said = gpu_start_error("MIG-8f6e", RuntimeError(text))
        assert said.startswith(f"GPU MIG-8f6e of {socket.gethostname()}: {begins}"), text
        assert "`" in said or "install" in said
        assert not {"\n", "{"} & {*said}
    assert gpu_start_error("0", RuntimeError("Connection closed by peer")) == ""
    assert gpu_start_error("0", MemoryError("out of memory")) == ""
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    (line,) = remedies(shell_with(), 0, busy)
    assert line.startswith("The GPU cannot be used: another process has it to itself")
    assert remedies(shell_with(), 0, RuntimeError("CUDA error: invalid argument")) == []


ASSERT = "device-side assert triggered"
SAID = f"CUDA error: {ASSERT}\nCUDA kernel errors might be asynchronously reported ..."


LASTING = {
    f"raise Error({SAID!r})": ASSERT,
    f"raise RuntimeError('HIP error: {ASSERT}')": ASSERT,
    "raise RuntimeError('Triton Error [CUDA]: misaligned address')": "misaligned address",
    f"try: raise Error({SAID!r})\nexcept RuntimeError: raise ValueError('bad')": ASSERT,
    "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')": "",
    "raise Error('CUDA error: out of memory')": "",
    "raise Error('CUDA error: invalid argument')": "",
    # Errors of another process, which a DataLoader raises or a message only quotes.
    f"raise RuntimeError('Caught RuntimeError in DataLoader worker 0.\\n{SAID!r}')": "",
    f"raise ValueError({SAID!r})": "",
    "raise RuntimeError({'not': 'text'})": "",
}


def test_which_errors_make_the_process_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some GPU errors make the process unusable, also as the cause of another error."""
    names = {"torch": torch, "Error": getattr(torch, "AcceleratorError", RuntimeError)}
    for source, found in LASTING.items():
        monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
        with pytest.raises(Exception) as raised:  # noqa: PT011 (this is what is asked)
            exec(source, names)
        assert lasting_error(raised.value) == found
        assert bool(unfit_reason(1, raised.value)) == bool(found)
        if found:
            (said,) = remedies(shell_with(), 1, raised.value)
            assert "`%dist_restart --debug`" in said
            monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
            assert remedies(shell_with(), 1, raised.value) == []


def test_the_gpu_is_asked_after_any_failed_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any failed cell the GPU is asked; only a lasting error makes the process unusable."""

    def fails(said: str) -> Callable[[], bool]:
        def ask() -> bool:
            raise RuntimeError(f"CUDA error: {said}")

        return ask

    unfit = f"A GPU error ({ASSERT}) made the process of rank 2 unusable"
    for found in (lambda: fails(ASSERT), fails(ASSERT)):  # the check may fail, or making the check
        monkeypatch.setattr(accelerator, "error_probe", found)
        assert unfit_reason(2, ValueError("bad")) == unfit
    of_now = fails("operation not permitted when stream is capturing")
    monkeypatch.setattr(accelerator, "error_probe", lambda: of_now)
    assert unfit_reason(2, ValueError("bad")) == ""


def test_the_contents_of_an_error_stay_small() -> None:
    """A large argument becomes text; large attributes and AttributeError's object are left out."""

    class Model:
        def __reduce__(self) -> str:
            raise AssertionError("it must not be pickled")

    with pytest.raises(AttributeError) as lacking:
        Model().foward  # type: ignore[attr-defined]  # noqa: B018
    args, attributes, whole = unpickle(open_payload(contents_of(lacking.value, {})), {})
    assert unpickle(args[0]) == "'Model' object has no attribute 'foward'"
    assert unpickle(attributes["name"]) == "foward"
    assert (sorted(attributes), whole) == (["name"], None)
    error = ValueError(b"x" * 100 * MAX_ARGUMENT_BYTES)
    error.data = b"x" * 2 * MAX_ARGUMENT_BYTES  # type: ignore[attr-defined]
    packed = contents_of(error, {})
    assert packed.segment is None
    assert size_of(packed.frames) < MAX_ARGUMENT_BYTES
    args, attributes, _ = unpickle(open_payload(packed), {})
    assert unpickle(args[0]).startswith("b'xxx")
    assert attributes == {}

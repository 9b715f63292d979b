"""Turns exceptions of user code into reports: the failure of a task, tracebacks, and remedies.

The kernel and the shell use this file in each worker. A failure is made from the exception itself
and not from its drawn traceback, because users can replace the code that draws tracebacks
(`rich.traceback.install()`, `set_custom_exc`), and this code can fail. Stop and lost connections
get short tracebacks: IPython would colour the source of every frame, which takes 50 to 100 ms on
each rank, and the notebook shows all ranks' exceptions in one line.
"""

from __future__ import annotations

import bdb
import builtins
import linecache
import os
import pdb
import re
import socket
import time
import traceback
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from types import FrameType, GetSetDescriptorType, MemberDescriptorType, TracebackType
from typing import Any

import torch

from nbdist.errors import bare
from nbdist.output.events import LEFT_DEBUGGER, Failure
from nbdist.values.definitions import cell_numbers
from nbdist.values.payload import Payload, pack_frames, size_of
from nbdist.values.pickling import pickle
from nbdist.wire.work import failure_in_words
from nbdist.words import did_you_mean, error_line
from nbdist.worker.compat import accelerator, ipython
from nbdist.worker.compat.debugpy import is_frame_of_debugger
from nbdist.worker.group.gloo import connections_after
from nbdist.worker.group.stores import run_with_timeout
from nbdist.worker.namespace import Problem
from nbdist.worker.ops.memory import account

MAX_FAILURE_LENGTH = 1 << 16
"""The most characters of an exception's message that are sent; the rest is left out."""

PACKAGE = os.path.dirname(os.path.dirname(__file__))
HIDDEN_FOLDERS = tuple(os.path.join(PACKAGE, room) + os.sep for room in ("worker", "tools"))
IN_IPYTHON = f"{os.sep}IPython{os.sep}"
DEBUGGERS = (bdb.__file__, pdb.__file__)
"""Files of calls that a debugger adds between the user's calls."""


def failure_of(error: BaseException, advice: Sequence[str] = ()) -> Failure:
    """Return the failure for an exception, with a traceback of plain lines.

    `advice` has the lines of `remedies`. It is empty if a Jupyter message has already shown these
    lines together with the traceback.
    """
    if isinstance(error, Problem):
        return failure_in_words(error.kind, str(error))
    if isinstance(error, bdb.BdbQuit):
        return failure_in_words(LEFT_DEBUGGER, ipython.DEBUGGER_LEFT)
    name, message = type(error).__name__, message_of(error)
    calls = map(sendable, short_traceback(cell_part(error.__traceback__)))
    return Failure(
        name,
        message,
        (*calls, error_line(name, message)),
        time.time_ns(),
        classes_of(type(error)),
        connections_after(message),
        tuple(map(sendable, advice)),
    )


def message_of(error: BaseException) -> str:
    """Return the exception's message, cut off after `MAX_FAILURE_LENGTH` characters."""
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 (the class is the user's)
        return f"<its text cannot be made: {type(problem).__name__}>"
    more = len(text) - MAX_FAILURE_LENGTH
    return sendable(
        text if more <= 0 else f"{text[:MAX_FAILURE_LENGTH]} … {more:,} more characters"
    )


def sendable(text: str) -> str:
    """Return the text with lone surrogates escaped, as messages in UTF-8 cannot contain them."""
    return text.encode("utf-8", "backslashreplace").decode()


def classes_of(kind: type[BaseException]) -> tuple[str, ...]:
    """Return the names of an exception's class and all its bases, as `module:qualified.name`."""
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__)


def short_traceback(tb: TracebackType | None) -> list[str]:
    """Return a traceback as lines of plain text, one line for each call.

    The line for a call in a cell has the code that ran. Calls of nbdist (`HIDDEN_FOLDERS`) and of
    debuggers are left out, and many recursive calls become one line.
    """
    cells = cell_numbers()
    lines = []
    before: FrameType | None = None
    for frame, line in traceback.walk_tb(tb):
        if is_frame_of_debugger(frame):
            break  # the call before waited at a breakpoint until Stop; the rest is the debugger's
        if frame is before:
            continue  # Python repeats a frame whose trace function raises
        before = frame
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file in cells:
            # Read the entry that IPython has made in the cache. Do not call linecache's functions,
            # which user code may replace.
            match linecache.cache.get(file):
                case (_, _, list(source), _) if 0 < line <= len(source):
                    code = str(source[line - 1]).strip()
                case _:
                    code = ""
            lines.append(f"Cell In[{cells[file]}], line {line}" + (f": {code}" if code else ""))
        elif not file.startswith(HIDDEN_FOLDERS) and file not in DEBUGGERS:
            lines.append(f"File {file}:{line}, in {function}")
    shortened, position = list[str](), 0
    for start, end, text in find_recursions(lines):
        shortened += [*lines[position:start], text]
        position = end
    return shortened + lines[position:]


# --- recursion: calls that repeat earlier calls -----------------------------------------------

LONGEST_CYCLE, MIN_REPEATS = 8, 4
"""A series of up to `LONGEST_CYCLE` calls is folded if it repeats `MIN_REPEATS` times or more."""

FOLDED = re.compile(r"<(… [\d,]+ calls of the same (?:line|\d lines))>")
"""Matches the file name of the call that `without_recursion` puts in place of repeated calls."""


def find_recursions(calls: Sequence[Hashable]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, text) for each range of `calls` that only repeats the calls before it.

    The text, such as "… 900 calls of the same line", can be shown in place of the range.
    """
    position = 0
    while position < len(calls):
        for period in range(1, LONGEST_CYCLE + 1):
            start = end = position + period
            while calls[position:start] == calls[end : end + period]:
                end += period
            if end - start >= MIN_REPEATS * period:
                same = "line" if period == 1 else f"{period} lines"
                yield start, end, f"… {end - start:,} calls of the same {same}"
                position = end
                break
        else:
            position += 1


def without_recursion(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback with a stand-in call in place of each run of repeated calls.

    `format_folded` later shows the stand-in as a line of text. Without stand-ins IPython would take
    seconds to draw a thousand calls, and show them all.
    """
    calls, shortened, position = _calls_of(tb), list[TracebackType](), 0
    places = [(each.tb_frame.f_code, each.tb_lineno) for each in calls]
    for start, end, text in find_recursions(places):
        shortened += [*calls[position:start], _stand_in_call(f"<{text}>")]
        position = end
    return _chain_calls([*shortened, *calls[position:]]) if shortened else tb


def format_folded(part: str) -> str:
    """Return a part of a drawn traceback, or a line of text if it stands for repeated calls.

    `without_recursion` has put a stand-in in place of the repeated calls. The line is a text such
    as "… 900 calls of the same line".
    """
    match = FOLDED.search(part)
    return f"{match[1]}\n" if match else part


def _stand_in_call(file: str) -> TracebackType:
    """Return a traceback with a single call, whose file does not exist and has the name `file`."""
    names: dict[str, Any] = {}
    exec(compile("import sys; frame = sys._getframe()", file, "exec"), names)
    return TracebackType(None, names.pop("frame"), 0, 1)


def _calls_of(tb: TracebackType | None) -> list[TracebackType]:
    calls = []
    while tb is not None:
        calls.append(tb)
        tb = tb.tb_next
    return calls


def _chain_calls(calls: Sequence[TracebackType]) -> TracebackType | None:
    tb = None
    for each in reversed(calls):
        tb = TracebackType(tb, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return tb


IN_FILE = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
"""Matches a call as Python prints it in a traceback."""


def group_traceback(kind: Any, error: Any, tb: TracebackType | None) -> list[str]:
    """Return an exception group's traceback as Python prints it, with cells named `Cell In[5]`."""
    cells = cell_numbers()

    def describe_place(match: re.Match[str]) -> str:
        file, number, function = match.groups()
        if file not in cells:
            return match[0]
        within = "" if function == "<module>" else f", in {function}()"
        return f"Cell In[{cells[file]}], line {number}{within}"

    parts = traceback.format_exception(kind, error, cell_part(tb))
    return [IN_FILE.sub(describe_place, part).rstrip("\n") for part in parts]


def without_nbdist(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without calls of nbdist, such as its own `init_process_group`.

    Returns None if no other call remains.
    """
    calls = _calls_of(tb)
    return _chain_calls(
        [c for c in calls if not c.tb_frame.f_code.co_filename.startswith(HIDDEN_FOLDERS)]
    )


def cell_part(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first calls, in which IPython runs the cell.

    Returns None if the traceback has no further calls.
    """
    while tb is not None and IN_IPYTHON in tb.tb_frame.f_code.co_filename:
        tb = tb.tb_next
    return tb


def interrupted_part(error: BaseException, tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback of a KeyboardInterrupt, from the cell's line on.

    `error` is the KeyboardInterrupt, and `tb` its traceback. Python may handle SIGINT only after
    another exception, such as the error that ends a wait in C++, has ended the cell's code. In this
    case `tb` lacks the cell's line, and the traceback of the other exception is returned.
    """
    cells = cell_numbers()
    for each in exception_chain(error):
        calls = traceback.walk_tb(each.__traceback__)
        if any(frame.f_code.co_filename in cells for frame, _ in calls):
            return cell_part(each.__traceback__)
    return cell_part(tb)


def with_short_message(kind: Any, error: Any) -> tuple[Any, Any]:
    """Return (class, exception) to show for an exception, whose message may be too long.

    If the message has more than `MAX_FAILURE_LENGTH` characters, the result is a stand-in with a
    shortened message, of a new class with the same name.
    """
    message = message_of(error)
    if len(message) <= MAX_FAILURE_LENGTH:
        return kind, error
    stand_in = type(kind.__name__, (Exception,), {"__str__": lambda _: message})()
    stand_in.__cause__, stand_in.__context__ = error.__cause__, error.__context__
    stand_in.__suppress_context__ = error.__suppress_context__
    return type(stand_in), stand_in


# --- remedies --------------------------------------------------------------------------------

NO_GPU = re.compile(
    r"not compiled with (CUDA|cuda) enabled|No CUDA GPUs are available|Found no NVIDIA driver"
    r"|Cannot access accelerator device when none|module 'torch._C' has no attribute '_cuda_"
)

DDP_ON_CPU = re.compile(r"device_ids and output_device arguments only work with .*'cpu'", re.DOTALL)
"""torch's message about `DDP(net, device_ids=[local_rank])` if the model is on the CPU."""

LAUNCHER_FUNCTIONS = {"notebook_launcher", "debug_launcher"}
"""Functions of accelerate that start processes of their own, which ranks do not need."""

OTHERS = "`--gpus` chooses others"
ON_CPU = "`--env CUDA_VISIBLE_DEVICES=` uses the CPU"

OF_GPUS = {
    r"driver on your system is too old|driver version is insufficient"
    r"|forward compatibility was attempted|unsupported display driver": (
        "its driver does not fit this torch ({torch}, CUDA {cuda}): update NVIDIA's driver (and "
        f"restart the machine or container then), or install a torch for an older CUDA; {ON_CPU}"
    ),
    r"system not yet initialized": (
        "the machine's NVSwitch is not up: `systemctl start nvidia-fabricmanager`"
    ),
    r"busy or unavailable": (
        "another process has it to itself (`nvidia-smi` lists it; `nvidia-smi -c DEFAULT` ends "
        f"compute mode Exclusive_Process), or it has gone (`dmesg | grep Xid`); {OTHERS}"
    ),
    r"Found no NVIDIA driver": (
        f"torch finds no driver of NVIDIA's: install it, or let the container use it; {ON_CPU}"
    ),
    r"not compiled with (CUDA|cuda)|Accelerator expected|Cannot access accelerator": (
        f"this torch ({{torch}}) is built for the CPU alone: install one for this GPU; {ON_CPU}"
    ),
    r"no kernel image is available": (
        "this torch ({torch}, CUDA {cuda}) was built for other GPUs: install another build; "
        f"{OTHERS}"
    ),
    r"CUDA(?: error:)? unknown error|No CUDA GPUs|no CUDA-capable device|uncorrectable ECC"
    r"|driver initialization failed|GPU is lost|fallen off": (
        "it does not respond, or has gone: see `nvidia-smi` and `dmesg | grep Xid`; "
        f"{OTHERS}, or restart the machine"
    ),
    r"invalid device ordinal": (
        "CUDA has none of this number: one has gone, or is not shown to this process; "
        "`nvidia-smi` lists what is there"
    ),
    r"NCCL_NVLS_ENABLE has been set": (
        "another rank has it too, and NVLS cannot: `--env NCCL_NVLS_ENABLE=0` turns that off"
    ),
    r"Duplicate GPU detected|Multiple Ranks are using the same GPU": (
        f"another rank has it too: {OTHERS}, `--share-gpus` allows it"
    ),
}
"""Texts that say why a GPU cannot be used, and what to do.

The key is a pattern that matches a message of torch, CUDA or NCCL."""

NO_ROOM = re.compile(r"(CUDA|Cuda|HIP)\b.*out of memory", re.DOTALL)
FULL = (
    "its memory is full before anything has run: `nvidia-smi` lists the processes that use it; "
    f"end them, or {OTHERS}"
)
"""What users read if a worker cannot start because its GPU has no free memory."""


HAS_NO_GPU = (AssertionError, RuntimeError, AttributeError)


def remedies(shell: Any, rank: int, error: BaseException) -> list[str]:
    """Return lines to show below an error: how to repair it, or what uses the memory that is full.

    Return [] for most errors, for which there is no advice. `shell` is the rank's IPython shell.
    """
    lines, names = account(shell, rank, error), shell.user_ns
    if type(error) is NameError and error.name:
        near = did_you_mean(error.name, [*names, *vars(builtins)]).strip()
        lines += [near] if near else []
    elif isinstance(error, ValueError) and DDP_ON_CPU.search(str(error)):
        lines.append("The model is on the CPU: leave out `device_ids`, `DDP(net)` needs none.")
    elif LAUNCHER_FUNCTIONS & {
        frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)
    }:
        lines.append("Every rank runs this cell already: call the function without a launcher.")
    elif isinstance(error, HAS_NO_GPU) and NO_GPU.search(str(error)):
        device = names.get("device", "cpu")
        lines += [
            f"There is no GPU here: `.to(device)` instead of `.cuda()`; `device` is {device}."
        ]
    elif why := _gpu_remedy(error):
        lines.append(f"The GPU cannot be used: {why}.")
    elif lasting_error(error) and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        lines.append("To see which call failed: `%dist_restart --debug`, then this cell again.")
    return lines


def gpu_start_error(gpu: str, error: Exception) -> str:
    """Return why a worker cannot start with this GPU; "" if the GPU is not the reason."""
    why = FULL if NO_ROOM.search(str(error)) else _gpu_remedy(error)
    return f"GPU {gpu} of {socket.gethostname()}: {why}" if why else ""


def _gpu_remedy(error: BaseException) -> str:
    """Return the text in `OF_GPUS` for an error's message, "" if no pattern matches."""
    message = str(error) if isinstance(error, AssertionError | RuntimeError) else ""
    remedy = next((why for sign, why in OF_GPUS.items() if re.search(sign, message)), "")
    return remedy.format(torch=torch.__version__, cuda=torch.version.cuda)


# --- GPU errors that last ---------------------------------------------------------------------

DRIVER_TIMEOUT = 3.0  # seconds for the GPU's driver to answer, which usually takes microseconds

# Matches messages with texts of cudaGetErrorString (CUDA 13); some texts of HIP are the same.
LASTING_DEVICE_ERROR = re.compile(
    r"(?:Triton Error \[)?(?:CUDA|HIP)\b[^:\n]*: ("
    r"an illegal memory access was encountered"  # CUDA error 700
    r"|the launch timed out and was terminated"  # CUDA error 702
    r"|device-side assert triggered"  # CUDA error 710
    r"|hardware stack error"  # CUDA error 714
    r"|an illegal instruction was encountered"  # CUDA error 715
    r"|misaligned address"  # CUDA error 716
    r"|operation not supported on global/shared address space"  # CUDA error 717
    r"|invalid program counter"  # CUDA error 718
    r"|unspecified launch failure"  # CUDA error 719
    r"|tensor memory not completely freed"  # CUDA error 721
    r"|uncorrectable ECC error encountered"  # CUDA error 214
    r"|uncorrectable NVLink error detected during the execution"  # CUDA error 220
    r"|Invalid access of peer GPU memory over nvlink or a hardware error"  # CUDA error 226
    r"|an async error has occured in external entity outside of CUDA)",  # CUDA error 911
    re.I,
)

# Exception classes that torch raises for lasting errors; `AcceleratorError` is new in torch 2.8.
DEVICE_ERROR_TYPES = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}


def lasting_error(error: BaseException) -> str:
    """Return CUDA's message if an exception is a GPU error that lasts, and "" if it is not.

    After a lasting error the process cannot use the GPU any more. The causes and contexts of the
    exception are searched, too.
    """
    args = (
        arg
        for each in exception_chain(error)
        if type(each) in DEVICE_ERROR_TYPES
        for arg in each.args
    )
    matches = (LASTING_DEVICE_ERROR.match(arg) for arg in args if isinstance(arg, str))
    return next((match[1] for match in matches if match), "")


def unfit_reason(rank: int, error: BaseException) -> str:
    """Return why this process cannot be used any more after an error; "" if it still can be used.

    The reason is a GPU error that lasts. If `error` is another error, the GPU's driver is asked,
    too: as GPU kernels run later than the code that starts them, the GPU may have failed although
    the cell's error says something else.
    """
    message = lasting_error(error)
    if not message:
        try:
            if (check := accelerator.error_probe()) is not None:
                run_with_timeout(check, "asking the GPU", DRIVER_TIMEOUT)
        except RuntimeError as gpu_error:
            message = lasting_error(gpu_error)
    return f"A GPU error ({message}) made the process of rank {rank} unusable" if message else ""


# --- the exception itself, for the notebook ---------------------------------------------------

MAX_ARGUMENT_BYTES = 1 << 14
"""The most bytes of an exception's argument or attribute that is sent to the notebook.

Larger values are not sent: they are data and not messages.
"""

NOT_SENT = {"__dict__", "__weakref__", "__notes__", "obj"}
"""Attributes of exceptions that are not sent; the `obj` of an AttributeError may be large."""


def contents_of(error: BaseException, namespace: dict[str, Any]) -> Payload:
    """Pack the arguments and attributes of an exception, for the notebook.

    An argument that is too large or cannot be pickled is replaced by the beginning of its `repr`.
    An attribute that is too large or cannot be pickled is left out. From the arguments and
    attributes the notebook makes the exception again, without running code of its class
    (`nbdist.errors.bare`). If the class does not allow this, the exception is also pickled as a
    whole, unless it is too large or cannot be pickled.
    """
    args = [
        _pack_value(arg, namespace) or _pack_value(_repr_of(arg), namespace) for arg in error.args
    ]
    state = {name: _pack_value(value, namespace) for name, value in _attributes(error)}
    whole = None
    try:
        bare(type(error))
    except Exception:  # noqa: BLE001 (a class in C or Rust raises what it likes)
        whole = _pack_value(error, namespace)
    frames = pickle((args, {k: v for k, v in state.items() if v}, whole), namespace).frames
    return pack_frames(frames)[0]


def exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes or contexts, the newest exception first."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        yield error
        visited.add(id(error))
        error = error.__cause__ or error.__context__


def _pack_value(value: object, namespace: dict[str, Any]) -> list[bytes] | None:
    try:
        pickled = pickle(value, namespace, sketch=True)
    except Exception:  # noqa: BLE001 (a class's own `__reduce__` can raise anything)
        return None
    if pickled.is_sketch or size_of(pickled.frames) > MAX_ARGUMENT_BYTES:
        return None
    return [bytes(memoryview(frame)) for frame in pickled.frames]


def _repr_of(value: object) -> str:
    try:
        return repr(value)[:1000]
    except Exception as error:  # noqa: BLE001 (the class is the user's)
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def _attributes(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an exception, except `NOT_SENT`, without calling code of the user.

    The attributes are in its `__dict__`, in slots, or in fields of builtin classes.
    """
    attributes = {**object.__getattribute__(error, "__dict__")}
    for base in type(error).__mro__:
        for name, member in vars(base).items() if base not in (BaseException, object) else ():
            if isinstance(member, MemberDescriptorType | GetSetDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    attributes.setdefault(name, member.__get__(error))
    yield from ((name, value) for name, value in attributes.items() if name not in NOT_SENT)

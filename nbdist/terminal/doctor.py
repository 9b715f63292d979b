"""The command `nbdist doctor`, which checks whether workers can run on this machine.

The command must run even if packages are missing, so the modules that this file imports at its top
need only Python itself. Another process, `python -m nbdist.worker about`, imports torch and reports
what this torch can do.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

from nbdist import __version__
from nbdist.errors import BadTopology, NoRuntimeFolder
from nbdist.plugins import is_within, requirements
from nbdist.system.folders import current_folder, places, problem_of
from nbdist.system.limits import memory_limits, process_limits, word_lack_of_files
from nbdist.system.processes import MODULE_OPTIONS, safe_environ
from nbdist.topology import (
    check_start,
    default_backend,
    driver_version,
    installed_gpus,
    is_slice,
    parse_workers,
    resolve,
    usable_cores,
    visible_gpus,
)
from nbdist.words import count, one_line, size_text

DOCTOR_IMPORT_TIMEOUT = 120.0
"""Seconds for importing torch: a slow shared file system or busy processors can delay that."""

PORT_CONNECT_TIMEOUT = 2.0

SHARED, LEAST_SHARED = "/dev/shm", 256 << 20
"""The folder of shared memory, and the least free bytes there for which no warning is printed.

A DataLoader with worker processes, and nccl, need shared memory."""

AGENT_THREADS, THREADS_OF_RANK = 20, 15
AGENT_MEMORY, MEMORY_OF_RANK = 300 << 20, 80 << 20
"""How many threads, and how many bytes of memory, an agent and each rank need at least.

The numbers of an agent include its guard and fork server.  When measured, an agent had 5 threads
and 120 MB.  A rank had 12 threads and 75 MB, and 200 MB more after its first training step.
"""

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

LEVELS, CONCLUSION = ("problem", "warning", "ok"), "result"


class Finding(NamedTuple):
    """A line that the command prints: a problem, a warning or, with the level "ok", a fact.

    The last line has the level `CONCLUSION`, and says whether workers can run here.
    """

    level: str
    text: str


problem, warning, ok = (partial(Finding, level) for level in LEVELS)
FindingStream = Iterator[Finding]


def doctor(workers: str) -> int:
    """Check this machine for as many workers as `-n` would give, and print the findings.

    `workers` is the value of `-n`. Return the exit code: 1 if a finding is a problem, and 0
    otherwise.
    """
    findings = sorted(_examine(workers), key=lambda each: LEVELS.index(each.level))
    findings.append(_conclusion(findings))
    sys.stdout.write("".join(f"{level}: {text}\n" for level, text in findings))
    return int(findings[0].level == "problem")


def _conclusion(findings: Sequence[Finding]) -> Finding:
    """Return a line that says whether workers can run here, with the number of problems."""
    problems, warnings = (sum(each.level == level for each in findings) for level in LEVELS[:2])
    numbers = f"{count(problems, 'problem')}, {count(warnings, 'warning')}"
    if problems:
        return Finding(CONCLUSION, f"something will not work here: {numbers}; see the first lines")
    more = "; see the first lines" if warnings else ""
    return Finding(CONCLUSION, f"workers can run here: {numbers}{more}")


def _examine(workers: str) -> FindingStream:
    gpus, cores = visible_gpus(os.environ), usable_cores()
    size = resolve(parse_workers(workers), len(gpus), cores)
    yield ok(f"this is about {count(size, 'worker')} (`-n {workers}`)")
    try:
        chosen, backend = os.environ.get("CUDA_VISIBLE_DEVICES"), default_backend(len(gpus))
        if slow := check_start(size, len(gpus), cores, backend, chosen):
            yield warning(slow)
    except BadTopology as error:
        yield problem(str(error))
    yield from _packages()
    python = os.path.expanduser(os.environ.get("PYTHON_EXEC") or sys.executable)
    try:
        about = ask(python)
    except LookupError as error:
        yield problem(error.args[0])
    else:
        yield from _torch(python, about)
        yield from _gpus(gpus, about)
    yield from _kernel(size)
    yield from _memory(size)
    yield from _network()
    yield from _folders()


def _packages() -> FindingStream:
    """Yield findings on the packages that nbdist requires, except torch, which `_torch` checks."""
    packages = {each for each in requirements() if each.name != "torch"}
    wrong = {each for each in packages if not each.installed}
    if "packaging" not in (each.name for each in wrong):
        wrong = {each for each in packages if not each.is_within}
    if wrong:
        versions = ", ".join(
            sorted(f"{each.name} {each.installed or '(missing)'}" for each in wrong)
        )
        pip_arguments = " ".join(sorted(f"'{each.name}{each.version_range}'" for each in wrong))
        remedy = f"`{sys.executable} -m pip install {pip_arguments}`"
        yield problem(f"nbdist does not run with {versions}: {remedy}")
    listed = sorted(f"{each.name} {each.installed}" for each in packages - wrong)
    python = f"Python {python_version()} ({sys.executable})"
    yield ok(" · ".join([f"nbdist {__version__}", python, *listed]))


def ask(python: str, timeout: float = DOCTOR_IMPORT_TIMEOUT) -> Mapping[str, Any]:
    """Run `nbdist.worker about` with the interpreter `python`; return the facts that it prints.

    Raises LookupError if the interpreter cannot be run, or cannot import torch and nbdist in time.
    """
    try:
        process = subprocess.run(
            [python, *MODULE_OPTIONS, "nbdist.worker", "about"], stdin=subprocess.DEVNULL,
            env=safe_environ(os.environ, current_folder()), capture_output=True, text=True,
            errors="replace", timeout=timeout,
        )  # fmt: skip
    except OSError as error:
        why = f"{python} cannot be run ({error.strerror}): PYTHON_EXEC says which is the workers'"
        raise LookupError(f"{why} Python") from None
    except subprocess.TimeoutExpired:
        raise LookupError(
            f"torch was not imported within {timeout:g} s: `{python} -X importtime -c "
            "'import torch'` shows what takes so long; often a slow shared file system"
        ) from None
    if process.returncode == 0:
        about: Mapping[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return about
    last_line = one_line((process.stderr.splitlines() or [f"exit code {process.returncode}"])[-1])
    if last_line.endswith("No module named 'torch'"):
        raise LookupError(f"torch is not installed: `{python} -m pip install torch`")
    raise LookupError(f"{python} cannot import torch and nbdist: {last_line}")


def _torch(python: str, about: Mapping[str, Any]) -> FindingStream:
    version, version_range = about["torch"], ""
    with suppress(ImportError, StopIteration):  # `packaging` is missing, or nbdist not installed
        version_range = next(each.version_range for each in requirements() if each.name == "torch")
        if not is_within(version, version_range):
            remedy = f"`{python} -m pip install 'torch{version_range}'`"
            yield problem(f"nbdist does not run with torch {version}: {remedy}")
    if not about["gloo"]:
        yield problem(f"torch {version} has no gloo, by which ranks meet: install another build")
    yield from (warning(f"torch: {' '.join(text.split())}") for text in about["said"])
    nccl = f" · nccl {about['nccl']}" if about["nccl"] else ""
    yield ok(f"torch {version} for {about['device']}{nccl} ({python})")


def _gpus(gpus: Sequence[str], about: Mapping[str, Any]) -> FindingStream:
    installed, chosen = installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and installed + len(chosen) and len(gpus) <= chosen.count(","):
        share = f"selects {len(gpus)} of {count(installed, 'GPU')}"
        yield warning(f"CUDA_VISIBLE_DEVICES={chosen} {share}: unset it, or name others, for more")
    if not gpus:
        yield ok("no GPU is visible: ranks use gloo on the CPU")
        return
    driver, used = driver_version() or "not known", about["gpus"]
    # CUDA shows a process only the first of several MIG slices, so torch reports a single GPU.
    if len(used) < (1 if is_slice(gpus[0]) else len(gpus)):
        remedy = "update the driver, or install a torch for an older CUDA"
        if about["device"] == "CPU":
            remedy = "install a torch for this driver (pytorch.org/get-started)"
        yield problem(
            f"torch for {about['device']} can use {len(used)} of {count(len(gpus), 'GPU')}, with "
            f"driver {driver}: {remedy}, or use `--backend gloo`"
        )
    elif not about["nccl"]:
        yield problem("this torch has no nccl: install another build, or use `--backend gloo`")
    names = ", ".join(dict.fromkeys(used)) or "not known to torch"
    yield ok(f"{count(len(gpus), 'GPU')} ({names}) · driver {driver}")


def _kernel(size: int) -> FindingStream:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield problem(
            "pidfd_open, by which ends of processes are noticed, is not possible here "
            f"({error.strerror}): use Linux 5.3 or later (this is {os.uname().release}), or a "
            "container whose seccomp profile allows it"
        )
    if why := _memory_problem():
        scope = ""
        with suppress(OSError):
            scope = f", ptrace_scope is {PTRACE_SCOPE.read_text().strip()}"
        yield warning(
            "`%dist_stack` will show no stack of a rank in C code: no process's memory can be read "
            f"({why}{scope}). `sysctl kernel.yama.ptrace_scope=1`, or start the container with "
            "`--cap-add SYS_PTRACE`"
        )
    if lack := word_lack_of_files(size):
        yield problem(lack)
    else:
        yield ok("open files: `ulimit -Hn` is high enough")
    needed = AGENT_THREADS + THREADS_OF_RANK * size
    for name, limit, used in process_limits()[:1]:
        text = f"{name} is {limit}, and {used} processes and threads are there"
        if limit - used >= needed:
            yield ok(text)
        else:
            remedy = "Raise it before the notebook is started, or use fewer workers"
            yield problem(f"{text}; workers need some {needed} more. {remedy}")


def _memory_problem() -> str:
    """Return why a process cannot read the memory of its child; "" if it can.

    An agent reads a worker's memory for the stack of a rank in C code. Also "" if no child can be
    started.
    """
    try:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    except OSError:  # no process can be started, which other checks report
        return ""
    with process:  # `cat` ends when its stdin is closed
        try:
            os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDONLY))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _memory(size: int) -> FindingStream:
    needed = AGENT_MEMORY + MEMORY_OF_RANK * size
    for limit in sorted(memory_limits(), key=lambda each: each.free)[:1]:
        free, total = size_text(max(0, limit.free)), size_text(limit.limit)
        text = f"{free} of the {total} of memory are free that {limit.where} may use"
        if limit.free >= needed:
            yield ok(text)
        else:
            remedy = "Raise the limit, end other processes, or use fewer workers"
            yield problem(f"{text}; workers need some {size_text(needed)}. {remedy}")
    try:
        shared = shutil.disk_usage(SHARED)
    except OSError as error:
        yield problem(f"{SHARED} cannot be used ({error.strerror}): mount a tmpfs there")
        return
    text = f"{SHARED} has {size_text(shared.total)}, {size_text(shared.free)} of them free"
    if shared.free >= LEAST_SHARED:
        yield ok(text)
    else:
        yield warning(
            f"{text}: too few for a DataLoader with num_workers, which ends with `Bus error` then, "
            f"and for nccl. Start the container with `--shm-size 8g`, or `mount -o remount,size=8g "
            f"{SHARED}`"
        )


def _network() -> FindingStream:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), PORT_CONNECT_TIMEOUT).close()
    except OSError as error:
        why = error.strerror or str(error)
        yield problem(f"gloo cannot connect ranks over 127.0.0.1 ({why}): `ip link set lo up`")
    given = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    interfaces = [name for _, name in socket.if_nameindex()]
    if given and given not in interfaces:
        listed = f"This machine has {', '.join(interfaces)}; without the variable workers use lo"
        yield problem(f"GLOO_SOCKET_IFNAME={given}: there is no such network interface. {listed}")
    with suppress(ImportError):  # a package is missing
        from nbdist.cluster.server import addresses

        address = addresses(None)[0]
        if address == "127.0.0.1":
            yield warning("this machine has no address for others: workers can run here alone")
        else:
            yield ok(f"other machines reach this one at {address} (`--address` names another)")


def _folders() -> FindingStream:
    problems = {str(place): problem_of(place) for place in places()}
    usable = next((place for place in problems if not problems[place]), "")
    if not usable:
        yield problem(str(NoRuntimeFolder(problems)))
        return
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        place = os.environ.get(name) and str(Path(os.environ[name]))
        if place and problems[place]:
            text = f"{name}={one_line(place, 50)} cannot hold sockets ({problems[place]})"
            yield warning(f"{text}: {usable} is used instead, another folder would do")
    yield ok(f"sockets of workers are in {usable}")

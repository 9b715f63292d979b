"""What is said below the traceback of an error that has a remedy: lines on what to do now."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import Any

from nbdist.words import did_you_mean
from nbdist.worker.out_of_memory import account

NO_GPU = re.compile(
    r"not compiled with (CUDA|cuda) enabled|No CUDA GPUs are available|Found no NVIDIA driver"
)
"""What torch says of `.cuda()` and `"cuda"` then."""


def remedies(shell: Any, rank: int, error: BaseException) -> list[str]:
    """Say in some lines what there is to do about an error; none for most."""
    return [*account(shell, rank, error), *_hints(shell.user_ns, error)]


def _hints(names: dict[str, Any], error: BaseException) -> Iterator[str]:
    if type(error) is NameError and error.name:
        if near := did_you_mean(error.name, [*names, *vars(builtins)]).strip():
            yield near
    elif isinstance(error, AssertionError | RuntimeError) and NO_GPU.search(str(error)):
        device = names.get("device", "cpu")
        yield f"There is no GPU here: `.to(device)` instead of `.cuda()`; `device` is {device}."

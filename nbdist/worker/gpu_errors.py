"""Recognises GPU errors that last: each later call fails as well, until the process has ended.

CUDA says of these that the process has to be started again.  Out of memory is none of them.
"""

from __future__ import annotations

import re

import torch

from nbdist.worker.compat import accelerator
from nbdist.worker.exceptions import led_to
from nbdist.worker.group.store import until_over

ASK_TIMEOUT = 3.0
"""Seconds for the GPU's driver to answer, which takes microseconds."""

# By the words of cudaGetErrorString (CUDA 13), which are HIP's too.
LASTING = re.compile(
    r"(?:Triton Error \[)?(?:CUDA|HIP)\b[^:\n]*: ("
    r"an illegal memory access was encountered"  # 700
    r"|the launch timed out and was terminated"  # 702
    r"|device-side assert triggered"  # 710
    r"|hardware stack error"  # 714
    r"|an illegal instruction was encountered"  # 715
    r"|misaligned address"  # 716
    r"|operation not supported on global/shared address space"  # 717
    r"|invalid program counter"  # 718
    r"|unspecified launch failure"  # 719
    r"|tensor memory not completely freed"  # 721
    r"|uncorrectable ECC error encountered"  # 214
    r"|uncorrectable NVLink error detected during the execution"  # 220
    r"|Invalid access of peer GPU memory over nvlink or a hardware error"  # 226
    r"|an async error has occured in external entity outside of CUDA)",  # 911
    re.I,
)


KINDS = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}
"""What torch raises for them, the second from 2.8 on."""


def lasting_error(error: BaseException) -> str:
    """Return its words where it, or what led to it, is an error that lasts; else ""."""
    args = (arg for each in led_to(error) if type(each) in KINDS for arg in each.args)
    matches = (LASTING.match(arg) for arg in args if isinstance(arg, str))
    return next((found[1] for found in matches if found), "")


def unfit_after(rank: int, error: BaseException) -> str:
    """Say why this process is of no more use, by its error or by its GPU; "" where it is of use.

    The GPU is asked too, since it may have failed at what it does later than the code that asks
    for it, when the cell has failed for another reason.
    """
    found = lasting_error(error) or lasting_error(_error_of_gpu())
    return f"A GPU error ({found}) made the process of rank {rank} unusable" if found else ""


def _error_of_gpu() -> BaseException:
    """Return what the GPU raises when it is asked; an error that means nothing for none."""
    try:
        if (ask := accelerator.asks_context()) is not None:
            until_over(ask, "asking the GPU", ASK_TIMEOUT)
    except RuntimeError as error:
        return error
    return RuntimeError()

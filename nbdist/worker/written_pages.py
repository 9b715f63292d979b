"""Whether this process has written to memory that it maps from others: the kernel knows.

A page of a private mapping is the file's until it is written to; then it is a copy, the
process's own.
"""

from __future__ import annotations

import mmap

import numpy as np

_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of `/proc/PID/pagemap`, which every process may read for itself; proc_pid_pagemap(5)."""


def are_own(address: int, size: int) -> bool:
    """Say whether any page that lies wholly in this memory is this process's own.

    So it is once written to, and from the start where the memory is no file's.  Raises OSError
    where the kernel does not say.
    """
    first, last = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(8 * first)
        found = np.frombuffer(pages.read(8 * max(0, last - first)), np.uint64)
    if len(found) < last - first:
        raise OSError("the kernel says nothing of these pages")
    is_there = (found & (_PRESENT | _SWAPPED)) != 0
    return bool((is_there & ((found & _OF_A_FILE) == 0)).any())


def edges(view: memoryview, address: int) -> tuple[memoryview, memoryview]:
    """Return what lies before the first whole page, and after the last one."""
    before = -address % mmap.PAGESIZE
    after = (address + view.nbytes) % mmap.PAGESIZE
    return view[:before], view[max(before, view.nbytes - after) :]

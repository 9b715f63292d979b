"""`nbdist.track` and `nbdist.watch`: numbers of a rank by step, sent at most twice a second.

In a worker the kernel connects it to iopub; in all other processes both functions do nothing.
Numbers that come faster than they are sent are aggregated, so every message is small.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, groupby
from time import monotonic
from typing import Any

from nbdist.output.events import MAX_STEP, MIN_STEP_WIDTH

EVERY = 0.5  # seconds from one message to the next
MOST_WAITING = 4_096  # calls that are kept before they are aggregated
MOST_SENT, FEWEST_SENT = 256, 4  # most points of a message, and fewest of one name in it
MOST_NAMES, LONGEST_NAME = 64, 100

Call = tuple[float | None, dict[str, Any]]

Point = tuple[float, float, float, float, float, float]
"""A step; the count, lowest, highest and mean of its finite numbers; the count of its others."""

_waiting: list[Call] = []
_counts: dict[str, int] = {}
"""How often the task has tracked each name without a step."""

_points: dict[str, list[Point]] = {}
"""By name, the points that are sent next."""

_counted: set[str] = set()
_lasts: dict[str, float] = {}
"""By name, the last step that was sent."""

_refused: list[str] = []  # the first name beyond MOST_NAMES

_lock = threading.RLock()
_send: Callable[[dict[str, Any]], None] | None = None
_due = 0.0


def track(*, step: float | None = None, **numbers: Any) -> None:
    """Track numbers of this rank: `track(loss=loss, lr=0.1)`.

    The cell's panel and `%dist_plot` show them as curves over all ranks, `world.tracked("loss")`
    has them as a table.  Without `step` calls are counted, for each name.  Numbers can be of
    Python, numpy or tensors of one element, which are read at once; those on a GPU are copied
    there and read when they are sent.  In a process that is no worker it does nothing.

    Raises TypeError for a value that is no number, ValueError for a step that is NaN, infinite or
    beyond 2e18, and for a name that cannot be sent as UTF-8.
    """
    if _send is None:
        return
    for name, value in numbers.items():
        if not name.isascii():
            _check_name(name)
        if type(value) is not float and type(value) is not int:
            numbers[name] = _number(name, value)
    if step is not None and (type(step) is not int or abs(step) > MAX_STEP):
        step = _step(step)
    _waiting.append((step, numbers))
    if monotonic() >= _due:
        flush()
    elif len(_waiting) >= MOST_WAITING:
        with _lock:
            _aggregate()


watching: list[Callable[[], None]] = []
"""Functions that are called at each step while a cell with `--watch` runs in this process."""


def watch() -> None:
    """Count a step of a loop without an optimizer, for `%%distributed --watch model`.

    Does nothing if no cell with `--watch` runs, as in a script under torchrun.
    """
    for each in watching:
        each()


def connect(send: Callable[[dict[str, Any]], None] | None) -> None:
    """Send messages by this function from now on; with None nothing is tracked."""
    global _send
    _send = send
    _waiting.clear()
    _points.clear()


def begin_task() -> None:
    """Send what is left of the last task, then count steps from 0 again."""
    flush()
    for each in (_counts, _counted, _lasts):
        each.clear()
    _refused.clear()


def flush() -> None:
    """Send all numbers that were not sent; also called at the end of a task, on its thread."""
    global _due
    if not (_waiting or _points) or _send is None:
        return
    with _lock:
        _due = monotonic() + EVERY
        _aggregate()
        curves = {name: [*chain.from_iterable(points)] for name, points in _points.items()}
        counted = {name: _counts[name] for name in _counted if name in curves}
        _lasts.update((name, points[-1][0]) for name, points in _points.items())
        _points.clear()
        if not curves:
            return
        try:
            _send({"curves": curves, "counted": counted})
        except (OSError, TypeError, ValueError) as error:  # the task must still be reported
            names = ", ".join(f"`{name}`" for name in curves)
            _warn(f"the numbers of {names} were not sent: {error!r:.200}")


# A child of a worker is no rank: a data loader would send numbers under its parent's name.
os.register_at_fork(after_in_child=lambda: connect(None))


def _number(name: str, value: Any) -> Any:
    """Return a number as a float, or as a copy on its GPU; TypeError if it is no number."""
    if hasattr(value, "full_tensor"):  # each rank would wait for the others, at its own time
        raise TypeError(f"track({name}=...): a DTensor; track its `.full_tensor()`")
    device = value.device if hasattr(value, "detach") and hasattr(value, "device") else None
    is_elsewhere = getattr(device, "type", "cpu") not in ("cpu", "meta")
    try:
        if is_elsewhere and value.numel() == 1 and not value.is_complex():
            return value.detach().clone()
        if not isinstance(value, str | bytes):
            return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:  # an integer
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    kind = type(value).__name__
    found = getattr(value, "shape", None)
    shape = f" of shape {tuple(found)}" if isinstance(found, tuple) else ""
    raise TypeError(
        f"track({name}=...): a {kind}{shape} is no number; "
        "track numbers or tensors of one element, such as `loss.mean()`"
    )


def _step(value: Any) -> float:
    """Return a step as a float; TypeError if it is no number, ValueError beyond `MAX_STEP`."""
    number = _number("step", value)
    if abs(found := float(number)) <= MAX_STEP:  # NaN is not
        return found
    raise ValueError(
        f"track(step={found:.6g}): a step is a finite number from {-MAX_STEP:.0e} to {MAX_STEP:.0e}"
    )


def _check_name(name: str) -> None:
    """Raise ValueError for a name with half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"track: the name {name[:LONGEST_NAME]!a} cannot be sent as UTF-8: {error.reason}"
        ) from None


def _aggregate() -> None:
    """Make points of the calls that wait, and merge them to what a message may have."""
    calls = _waiting[:]
    del _waiting[: len(calls)]
    for step, numbers in calls:
        for name, value in numbers.items():
            name = name[:LONGEST_NAME]
            if name not in _counts and len(_counts) >= MOST_NAMES:
                _refuse(name)
                continue
            number = _counts.setdefault(name, 0)
            if step is None:
                _counts[name] = number + 1
                _counted.add(name)
            _points.setdefault(name, []).append(_point(number if step is None else step, value))
    share = max(FEWEST_SENT, MOST_SENT // max(1, len(_points)))
    for name, points in _points.items():
        if len(points) > share:
            _points[name] = [*_merged(points, share, _lasts.get(name))]


def _point(step: float, value: Any) -> Point:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except RuntimeError:  # its GPU has failed, which the cell will report
        number = math.nan
    if math.isfinite(number):
        return step, 1, number, number, number, 0
    return step, 0, 0.0, 0.0, 0.0, 1


def _refuse(name: str) -> None:
    """Warn, once a task, that there are more names than `MOST_NAMES`."""
    if not _refused:
        _refused.append(name)
        _warn(
            f"{MOST_NAMES} names are kept, and `{name}` is one more; "
            "a number of its own step is `track(step=i, name=...)`"
        )


def _warn(text: str) -> None:
    # Cells can close stderr, and put anything in its place.
    with suppress(AttributeError, OSError, TypeError, ValueError):
        sys.stderr.write(f"track: {text}\n")


def _merged(points: list[Point], most: int, last: float | None) -> Iterator[Point]:
    """Merge points, in order, to at most `most`, or twice as many if steps go back and forth.

    All have the same width and begin at multiples of it, so at the same steps on all ranks. A point
    that would begin below the `last` step that was sent begins there. In addition a point begins at
    the first number that is NaN or infinite: the notebook names its step. If steps go back and
    forth more often, all points have as many numbers, and begin at the lowest of their steps.
    """
    first, span = points[0][0], abs(points[-1][0] - points[0][0])
    least = max(MIN_STEP_WIDTH, span / (most - 1))
    wide = 2.0 ** math.ceil(math.log2(least)) if span else 1.0
    groups = [[*each] for _, each in groupby(points, lambda point: point[0] // wide)]
    if len(groups) > 2 * most:  # steps that go back and forth
        size = math.ceil(len(points) / most)
        groups = [points[at : at + size] for at in range(0, len(points), size)]
        wide = 0
    has_odd = False
    for group in groups:
        step = group[0][0] // wide * wide if wide else min(point[0] for point in group)
        step = last if wide and last is not None and step < last <= first else step
        odd = next((at for at, point in enumerate(group) if point[5]), 0)
        if odd and wide and not has_odd:
            yield _joined(step, group[:odd])
            step, group = max(step, group[odd][0]), group[odd:]
        has_odd |= any(point[5] for point in group)
        yield _joined(step, group)


def _joined(step: float, points: list[Point]) -> Point:
    finite = [point for point in points if point[1]]
    odd = sum([point[5] for point in points])
    if not finite:
        return step, 0, 0.0, 0.0, 0.0, odd
    count = sum([point[1] for point in finite])
    # Divided first: the sum of large numbers can be too large.
    mean = sum([point[4] * (point[1] / count) for point in finite])
    low, high = min([point[2] for point in finite]), max([point[3] for point in finite])
    return step, count, low, high, mean, odd

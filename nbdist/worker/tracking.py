"""The functions `nbdist.track` and `nbdist.watch`, which user code calls in training loops.

`track` sends numbers of a rank, by step, to the notebook about twice a second. Numbers that come
faster are aggregated, so every message is small. In a worker the kernel connects `track` to its
iopub socket. `watch` counts a step of a cell with `--watch`. In the notebook, and in a script under
torchrun, both functions do nothing.
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

TRACK_SEND_INTERVAL = 0.5  # seconds between two messages
MAX_WAITING_CALLS = 4_096  # calls that are kept before they are aggregated
# If there are too many points for a message, they are merged to about MAX_POINTS_SENT. Each name in
# the message has an equal share of these, but at least MIN_POINTS_SENT.
MAX_POINTS_SENT, MIN_POINTS_SENT = 256, 4
MAX_TRACKED_NAMES, MAX_TRACKED_NAME_LENGTH = 64, 100

TrackCall = tuple[float | None, dict[str, Any]]

TrackedPoint = tuple[float, float, float, float, float, float]
"""A step, and the count, lowest, highest and mean of its finite numbers.

The last field is the count of its numbers that are NaN or infinite.
"""

_pending_calls: list[TrackCall] = []
_call_counts: dict[str, int] = {}
"""For each name, how many times the task has called `track` with the name and without `step`."""

_points: dict[str, list[TrackedPoint]] = {}
"""The points of the next message, by the name of the tracked number."""
_counted_names: set[str] = set()  # names that were tracked without a step
_last_steps: dict[str, float] = {}
"""The last step that was sent, by the name of the tracked number."""

_refused_names: list[str] = []  # the first name beyond MAX_TRACKED_NAMES, if there was one

_lock = threading.RLock()
_send: Callable[[dict[str, Any]], None] | None = None
_due = 0.0


def track(*, step: float | None = None, **numbers: Any) -> None:
    """Track numbers of this rank: `track(loss=loss, lr=0.1)`.

    The cell's panel and `%dist_plot` show the numbers of all ranks as curves, and
    `world.tracked("loss")` returns them as a table.  Without `step`, the step of a number is how
    often its name was tracked without `step` before in the cell.  A value can be a number of Python
    or numpy, or a tensor of one element.  A tensor on a GPU is copied there, and read only later.
    In a process that is no worker the function does nothing.

    Raises TypeError for a value or step that is no number.  Raises ValueError for a step that is
    NaN, infinite or beyond 2e18, and for a name that cannot be sent as UTF-8.
    """
    if _send is None:
        return
    for name, value in numbers.items():
        if not name.isascii():
            _check_name(name)
        if type(value) is not float and type(value) is not int:
            numbers[name] = _to_number(name, value)
    if step is not None and (type(step) is not int or abs(step) > MAX_STEP):
        step = _to_step(step)
    _pending_calls.append((step, numbers))
    if monotonic() >= _due:
        flush()
    elif len(_pending_calls) >= MAX_WAITING_CALLS:
        with _lock:
            _aggregate()


step_callbacks: list[Callable[[], None]] = []
"""Functions for `watch` to call; a cell with `--watch` adds one while it runs."""


def watch() -> None:
    """Count a step of a loop without an optimizer, for `%%distributed --watch model`.

    The function does nothing if no cell with `--watch` runs, as in a script under torchrun.
    """
    for each in step_callbacks:
        each()


def connect(send: Callable[[dict[str, Any]], None] | None) -> None:
    """Make `track` send its messages by this function; with None `track` does nothing."""
    global _send
    _send = send
    _pending_calls.clear()
    _points.clear()


def begin_task() -> None:
    """Send the remaining numbers of the last task, and forget its names and steps.

    So numbers that the new task tracks without a `step` get the steps 0, 1, and so on.
    """
    flush()
    for each in (_call_counts, _counted_names, _last_steps):
        each.clear()
    _refused_names.clear()


def flush() -> None:
    """Send all tracked numbers that were not sent yet.

    `track` calls this about twice a second, and the kernel at the end of each task.
    """
    global _due
    if not (_pending_calls or _points) or _send is None:
        return
    with _lock:
        _due = monotonic() + TRACK_SEND_INTERVAL
        _aggregate()
        curves = {name: [*chain.from_iterable(points)] for name, points in _points.items()}
        counted = {name: _call_counts[name] for name in _counted_names if name in curves}
        _last_steps.update((name, points[-1][0]) for name, points in _points.items())
        _points.clear()
        if not curves:
            return
        try:
            _send({"curves": curves, "counted": counted})
        except (OSError, TypeError, ValueError) as error:  # the user's task must go on
            names = ", ".join(f"`{name}`" for name in curves)
            _warn(f"the numbers of {names} were not sent: {error!r:.200}")


# A forked child of a worker must send nothing: a data loader's process would send numbers as if it
# were the rank.
os.register_at_fork(after_in_child=lambda: connect(None))


def _to_number(name: str, value: Any) -> Any:
    """Return a value as a float; for a tensor on a GPU return a copy there, which is read later.

    Raises TypeError if the value is no number.
    """
    # `full_tensor` is a collective, which the ranks would call at different times.
    if hasattr(value, "full_tensor"):
        raise TypeError(f"track({name}=...): a DTensor; track its `.full_tensor()`")
    device = value.device if hasattr(value, "detach") and hasattr(value, "device") else None
    is_elsewhere = getattr(device, "type", "cpu") not in ("cpu", "meta")
    try:
        if is_elsewhere and value.numel() == 1 and not value.is_complex():
            return value.detach().clone()
        if not isinstance(value, str | bytes):
            return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:  # an integer too big for a float
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    kind = type(value).__name__
    size = getattr(value, "shape", None)
    shape = f" of shape {tuple(size)}" if isinstance(size, tuple) else ""
    raise TypeError(
        f"track({name}=...): a {kind}{shape} is no number; "
        "track numbers or tensors of one element, such as `loss.mean()`"
    )


def _to_step(value: Any) -> float:
    """Return a step as a float.

    Raises TypeError if the step is no number, and ValueError if it is NaN or beyond `MAX_STEP`.
    """
    number = _to_number("step", value)
    if abs(step := float(number)) <= MAX_STEP:  # False for NaN
        return step
    raise ValueError(
        f"track(step={step:.6g}): a step is a finite number from {-MAX_STEP:.0e} to {MAX_STEP:.0e}"
    )


def _check_name(name: str) -> None:
    """Raise ValueError for a name with a lone surrogate, which has no form in UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"track: the name {name[:MAX_TRACKED_NAME_LENGTH]!a} cannot be sent as UTF-8: "
            f"{error.reason}"
        ) from None


def _aggregate() -> None:
    """Turn pending calls of `track` into points, and merge points until they fit into a message."""
    calls = _pending_calls[:]
    del _pending_calls[: len(calls)]
    for step, numbers in calls:
        for name, value in numbers.items():
            name = name[:MAX_TRACKED_NAME_LENGTH]
            if name not in _call_counts and len(_call_counts) >= MAX_TRACKED_NAMES:
                _refuse_name(name)
                continue
            number = _call_counts.setdefault(name, 0)
            if step is None:
                _call_counts[name] = number + 1
                _counted_names.add(name)
            _points.setdefault(name, []).append(
                _make_point(number if step is None else step, value)
            )
    limit = max(MIN_POINTS_SENT, MAX_POINTS_SENT // max(1, len(_points)))
    for name, points in _points.items():
        if len(points) > limit:
            _points[name] = [*_merge_points(points, limit, _last_steps.get(name))]


def _make_point(step: float, value: Any) -> TrackedPoint:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except RuntimeError:  # the tensor's GPU has failed, which the cell itself will report
        number = math.nan
    if math.isfinite(number):
        return step, 1, number, number, number, 0
    return step, 0, 0.0, 0.0, 0.0, 1


def _refuse_name(name: str) -> None:
    """Warn, once in each task, that `name` is not tracked because there are too many names."""
    if not _refused_names:
        _refused_names.append(name)
        _warn(
            f"{MAX_TRACKED_NAMES} names are kept, and `{name}` is one more; "
            "a number of its own step is `track(step=i, name=...)`"
        )


def _warn(text: str) -> None:
    # Cells can close stderr, or bind `sys.stderr` to any object.
    with suppress(AttributeError, OSError, TypeError, ValueError):
        sys.stderr.write(f"track: {text}\n")


def _merge_points(
    points: list[TrackedPoint], limit: int, last_step: float | None
) -> Iterator[TrackedPoint]:
    """Merge neighbouring points, and yield about `limit` new points, at most about twice as many.

    Each new point covers a range of steps. All ranges have the same width, a power of two, and
    begin at multiples of the width, so that ranges of all ranks fit together. There are two
    exceptions. A range that would begin before `last_step`, the last step that was sent, begins at
    `last_step`. And a range begins at the first number that is NaN or infinite, because the
    notebook shows the step of this number.

    If the steps go back and forth, this would give too many ranges. Then new points cover equally
    many old points instead, the last one perhaps fewer, and begin at the lowest step among them.
    """
    first, span = points[0][0], abs(points[-1][0] - points[0][0])
    min_width = max(MIN_STEP_WIDTH, span / (limit - 1))
    width = 2.0 ** math.ceil(math.log2(min_width)) if span else 1.0
    groups = [[*each] for _, each in groupby(points, lambda point: point[0] // width)]
    if len(groups) > 2 * limit:  # the steps go back and forth
        size = math.ceil(len(points) / limit)
        groups = [points[index : index + size] for index in range(0, len(points), size)]
        width = 0
    has_odd = False
    for group in groups:
        step = group[0][0] // width * width if width else min(point[0] for point in group)
        step = last_step if width and last_step is not None and step < last_step <= first else step
        first_odd = next((index for index, point in enumerate(group) if point[5]), 0)
        if first_odd and width and not has_odd:
            yield _join_points(step, group[:first_odd])
            step, group = max(step, group[first_odd][0]), group[first_odd:]
        has_odd |= any(point[5] for point in group)
        yield _join_points(step, group)


def _join_points(step: float, points: list[TrackedPoint]) -> TrackedPoint:
    finite = [point for point in points if point[1]]
    odd_count = sum([point[5] for point in points])
    if not finite:
        return step, 0, 0.0, 0.0, 0.0, odd_count
    count = sum([point[1] for point in finite])
    # Divide before adding up, because the sum of large numbers could be infinite.
    mean = sum([point[4] * (point[1] / count) for point in finite])
    low, high = min([point[2] for point in finite]), max([point[3] for point in finite])
    return step, count, low, high, mean, odd_count

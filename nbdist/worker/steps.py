"""Counts the optimizer steps of the running task, and interrupts the task at a chosen step.

Stop must interrupt all ranks before the same step, so that their models stay equal. torch calls
`before_step` and `after_step` around each step of an optimizer; only steps on the main thread
count. On Stop, the control thread first holds the main thread at the beginning of its next step.
Then it sets the number of the step at which the task is interrupted, the same on all ranks.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.wire.control import StepCount
from nbdist.worker.compat.torch import STEP_CODE

MAX_HOLD_SECONDS = 3.0
"""After this many seconds a held rank goes on by itself.

Agents need less time to agree on the step at which they stop the ranks.
"""

HOLD_POLL_INTERVAL = 0.001  # seconds after which a held rank checks again whether to go on

MAX_DEFERRAL = 1.0  # seconds that SIGINT waits for the end of a step; a step may never end


class StepCounter:
    """Counts the optimizer steps of a task, and holds or interrupts the task where a step begins.

    A step that begins inside of another step is not counted.
    """

    def __init__(self) -> None:
        self._ident = 0  # the main thread's identifier, once the hooks are registered
        self._lock = threading.Lock()
        self._deferral: threading.Timer | None = None
        self._succeeded_task = ""  # the id of the last task, once it has ended without an error
        # Called first at each SIGINT.  The signal's handler has to stay `handle_sigint` itself,
        # because `has_taken_sigint` takes any other handler for a handler of user code.
        self.on_sigint: Callable[[], object] = lambda: None
        self.begin_task("")

    def __repr__(self) -> str:
        return f"<Steps {self.begun} begun{', inside of one' if self.is_inside else ''}>"

    def watch(self) -> None:
        """Register the hooks with torch; called once, on the main thread."""
        self._ident = threading.get_ident()
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self._watch_dropped()

    def begin_task(self, task_id: str) -> None:
        """Count the steps of a new task from now on, and forget the steps of the last task."""
        self._task_id = task_id
        self.begun = self._nested = 0
        self.is_inside = False
        """Whether a step has begun and not ended; still True if an exception has left the step."""
        self._began, self._interval = 0.0, 0.0
        self._is_held = self._is_waiting = self._has_stopped = False
        self._held_until, self._stop_at = 0.0, 0
        self._raises_at_once = self._has_interrupted = False
        self.dropped_interrupts = 0
        """The number of KeyboardInterrupts in finalizers and callbacks, which Python drops."""
        self._drop_deferral()
        if self._ident:
            self._watch_dropped()

    def end_task(self, *, has_succeeded: bool = False) -> None:
        """End holding the task and deferring SIGINT; the counts stay until the next task begins."""
        self._succeeded_task = self._task_id if has_succeeded else ""
        self._task_id, self._is_held = "", False
        self._drop_deferral()

    # --- the main thread --------------------------------------------------------------------

    def before_step(self, *_: Any) -> None:
        """Count a step that begins.

        While the rank is held, wait. Raise KeyboardInterrupt if this is the step to stop at.
        """
        # Do not count steps that `torch.compile` traces: counting would break the user's graph.
        if torch.compiler.is_compiling() or threading.get_ident() != self._ident:
            return
        if self.is_inside:
            if _count_steps(inspect.currentframe()) > 1:
                self._nested += 1
                return
            self._nested = 0  # the last step has not ended, but was left by an exception
        self.is_inside = True  # from here on `handle_sigint` defers SIGINT to the end of the step
        self.begun += 1
        if self._is_held:
            try:
                self._wait_for_stop_step()
            except BaseException:
                self.begun, self.is_inside = self.begun - 1, False
                self._drop_deferral()
                raise
        now = time.monotonic()
        self._began, self._interval = now, now - self._began if self._began else 0.0

    def after_step(self, *_: Any) -> None:
        """Record the end of a step; raise KeyboardInterrupt if SIGINT came during the step."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._ident:
            return
        if self._nested:
            self._nested -= 1
            return
        self.is_inside = False
        if self._deferral is not None:
            self._drop_deferral()
            self._has_interrupted = True
            raise KeyboardInterrupt

    def _wait_for_stop_step(self) -> None:
        """Wait until `stop_at` or `release` is called, at most `MAX_HOLD_SECONDS` after `hold`.

        Raise KeyboardInterrupt if the step of `stop_at`, or a later step, begins now.
        """
        self._is_waiting = True
        try:
            while self._is_held and not self._stop_at and time.monotonic() < self._held_until:
                time.sleep(HOLD_POLL_INTERVAL)
        finally:
            self._is_waiting = False
        with self._lock:
            self._is_held = self._is_held and bool(self._stop_at)
            if not self._is_held or self.begun < self._stop_at:
                return
            self._is_held, self._has_stopped = False, True
        self._has_interrupted = True
        raise KeyboardInterrupt

    def handle_sigint(self, _: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, at once or at the end of the optimizer step that runs now.

        If a step runs, `after_step` raises the KeyboardInterrupt once the step has ended. A second
        SIGINT, or any SIGINT after `raise_at_once`, interrupts the step itself. The step is also
        interrupted if it has not ended after `MAX_DEFERRAL` seconds.
        """
        self.on_sigint()
        self._is_held = False
        if self._must_defer(frame):
            self._deferral = threading.Timer(MAX_DEFERRAL, self._end_deferral)
            self._deferral.daemon = True
            self._deferral.start()
            return
        self._drop_deferral()
        self._has_interrupted = True
        raise KeyboardInterrupt

    def _watch_dropped(self) -> None:
        """Make Python call `_count_dropped` for exceptions that nobody can catch.

        Python drops such an exception, for example of a finalizer, after it has called a hook in
        `sys`. `_count_dropped` calls the hook that was set before, which may be the user's.
        """
        # User code may set the hook to None, or delete it.
        hook = getattr(sys, "unraisablehook", None) or sys.__unraisablehook__
        if getattr(hook, "func", None) != self._count_dropped:
            sys.unraisablehook = partial(self._count_dropped, hook)

    def _count_dropped(self, show: Callable[[Any], object], dropped: Any) -> None:
        """Call `show` with an exception that Python drops; count each KeyboardInterrupt."""
        self.dropped_interrupts += issubclass(dropped.exc_type, KeyboardInterrupt)
        try:
            show(dropped)
        except KeyboardInterrupt:  # raised by SIGINT during `show`; Python would drop it, too
            self.dropped_interrupts += 1

    def _must_defer(self, frame: FrameType | None) -> bool:
        if not self.is_inside or self._is_waiting or self._raises_at_once:
            return False
        return self._deferral is None and _count_steps(frame) > 0

    def _drop_deferral(self) -> None:
        timer, self._deferral = self._deferral, None
        if timer is not None:
            timer.cancel()

    # --- other threads ----------------------------------------------------------------------

    @property
    def has_taken_sigint(self) -> bool:
        """Whether the task's code has got a SIGINT as a KeyboardInterrupt.

        Also True if the code has set a signal handler of its own, which gets each SIGINT.
        """
        return self._has_interrupted or signal.getsignal(signal.SIGINT) != self.handle_sigint

    def _end_deferral(self) -> None:
        """Send SIGINT again if the step has not ended in time; called on the thread of a timer."""
        if self._deferral is threading.current_thread():
            signal.pthread_kill(self._ident, signal.SIGINT)

    def hold(self, task_id: str) -> StepCount:
        """Hold the task at the beginning of its next step; return how many steps it has begun.

        A task that has begun no step is not held. If the task has already ended, which the agent
        may not know yet, return its final count if it has succeeded, and 0 if it has failed.
        """
        if task_id != self._task_id:
            has_succeeded = task_id == self._succeeded_task
            return StepCount(self.begun if has_succeeded else 0, has_succeeded=has_succeeded)
        self._stop_at, self._held_until = 0, time.monotonic() + MAX_HOLD_SECONDS
        # Hold before reading `begun`, so that a step that begins after the reading must wait.
        self._is_held = True
        # Read `begun` only once: the task's first step may begin now, and is then neither held nor
        # counted.
        begun = self.begun
        if not begun:
            self._is_held = False
        return StepCount(begun, time.monotonic() - self._began, self._interval)

    def stop_at(self, task_id: str, step: int) -> None:
        """Let a held task go on until `step` begins, which raises KeyboardInterrupt."""
        if task_id == self._task_id:
            self._stop_at = step

    def release(self, task_id: str) -> StepCount:
        """Let a held task go on; return its step count, and whether `stop_at` interrupted it."""
        with self._lock:
            has_stopped, self._is_held = self._has_stopped, False
        return StepCount(self.begun, has_stopped=has_stopped and task_id == self._task_id)

    def raise_at_once(self) -> None:
        """From now on let each SIGINT of this task interrupt a running step at once.

        Called when a collective is aborted, because the step would use the meaningless result of
        the collective.
        """
        self._raises_at_once = True


def _count_steps(frame: FrameType | None) -> int:
    """Return how many optimizer steps are on the stack of a frame."""
    number = 0
    while frame is not None:
        number += frame.f_code is STEP_CODE
        frame = frame.f_back
    return number


STEPS = StepCounter()  # a single object, as only the main thread of a process runs steps

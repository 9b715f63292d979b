"""A function call on its way to the ranks: the notebook's side makes it, a worker runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.errors import one_line

CALL = "__nbdist_call__"
"""What a worker's `__main__` calls it while it lasts."""


@dataclass(eq=False)
class FunctionCall:
    """Calls the function once, and keeps what it returned until that is taken.

    `names` is what the functions in it find in the caller's `__main__`; `title` is what
    people call the function.
    """

    title: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None

    def __call__(self) -> None:
        # Not held here too: the function may drop its arguments when it has done with them.
        args, self.args = self.args, ()
        kwargs, self.kwargs = self.kwargs, {}
        self.value = self.function(*args, **kwargs)

    def take(self) -> Any:
        """What the function returned."""
        value, self.value = self.value, None
        return value

    @property
    def source(self) -> str:
        """What runs it in a worker, and says what it is."""
        return f"{CALL}()  # {one_line(self.title)}"


TAKE = f"{CALL}.take()"
"""The expression by which its value comes back."""

"""Methods of the shell and of its kernel, wrapped on the one object, and given back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Around = Callable[..., Any]
"""Called with the method as it was, and its arguments."""


class Wrapped:
    """A method of one object with something around it, until `undo`.

    Where somebody else has wrapped it since, ours stays inside, and only passes on.
    """

    def __init__(self, holder: object, name: str, around: Around) -> None:
        self._holder = holder
        self._name = name
        self._was_its_own = name in vars(holder)
        self._original = original = getattr(holder, name)
        self._is_on = True

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if self._is_on:
                return around(original, *args, **kwargs)
            return original(*args, **kwargs)

        self._method = method
        setattr(holder, name, method)

    def __repr__(self) -> str:
        return f"<Wrapped {type(self._holder).__name__}.{self._name}>"

    def undo(self) -> None:
        """Have the object as it was."""
        self._is_on = False
        if vars(self._holder).get(self._name) is not self._method:
            return
        if self._was_its_own:
            setattr(self._holder, self._name, self._original)
        else:
            delattr(self._holder, self._name)

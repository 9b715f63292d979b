"""Function calls in a worker: what they bring into `__main__`, and that it is gone afterwards."""

from __future__ import annotations

from typing import Any

from nbdist.wire.calls import CALL, FunctionCall

READY_MODULES = ("torch", "dist")
"""Names that are ready in every worker and give way to the caller's."""

_MISSING = object()


class CallNames:
    """The names that functions of a call find in `__main__`, for as long as it lasts.

    What the workers have bound themselves they keep, and the functions find that.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._lent: dict[str, Any] = {}
        self._covered: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        self._before: dict[str, int] = {}
        self.call: FunctionCall | None = None

    def __repr__(self) -> str:
        return f"<CallNames {self.call.title if self.call else 'of no call'}>"

    def begin(self, call: FunctionCall) -> None:
        """Bind what it brings."""
        self.call = call
        self._lent = {name: value for name, value in call.names.items() if self._gives_way(name)}
        # What an earlier call has left gives way for good.
        kept = (name for name in self._lent if name in READY_MODULES)
        self._covered = {name: self._namespace[name] for name in kept if name in self._namespace}
        call.names = {}
        self._namespace.update(self._lent)
        self._before = {name: id(value) for name, value in self._namespace.items()}

    def end(self) -> None:
        """Bind none of it any more.

        But where the call has bound names itself, by `global`, they stay: what it bound may
        use them later.  They give way to those of the next call.
        """
        self.call = None
        self._namespace.pop(CALL, None)
        lent, self._lent = self._lent, {}
        covered, self._covered = self._covered, {}
        has_bound = any(
            self._before.get(name) != id(value)
            for name, value in self._namespace.items()
            if not name.startswith("_")
        )
        for name, value in lent.items():
            if self._namespace.get(name, _MISSING) is not value:
                continue  # the call has bound or deleted it
            if name in covered:
                self._namespace[name] = covered[name]
            elif has_bound:
                self._left[name] = value
            else:
                del self._namespace[name]

    def _gives_way(self, name: str) -> bool:
        found = self._namespace.get(name, _MISSING)
        if found is _MISSING or name in READY_MODULES:
            return True
        return name in self._left and self._left[name] is found

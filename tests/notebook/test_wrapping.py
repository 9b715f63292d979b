"""Tests of `nbdist.notebook.extension`: an object is as it was afterwards, whoever else wraps."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.extension import Wrapped


class Kernel:
    """Something with a method."""

    def say(self, text: str) -> str:
        """Say it."""
        return text


def louder(original: Callable[[str], str], text: str) -> str:
    return original(text).upper()


def test_a_method_is_wrapped_and_given_back() -> None:
    """It keeps its name and help; the class is left alone."""
    kernel = Kernel()
    wrapped = Wrapped(kernel, "say", louder)
    assert kernel.say("x") == "X"
    assert (kernel.say.__name__, kernel.say.__doc__) == ("say", "Say it.")
    assert Kernel().say("x") == "x"
    wrapped.undo()
    assert kernel.say("x") == "x"
    assert vars(kernel) == {}


def test_what_was_the_objects_own_is_put_back() -> None:
    """As of a kernel that somebody has wrapped before."""
    kernel = Kernel()
    kernel.say = own = lambda text: f"<{text}>"  # type: ignore[method-assign]
    wrapped = Wrapped(kernel, "say", louder)
    assert kernel.say("x") == "<X>"
    wrapped.undo()
    assert kernel.say is own


def test_what_somebody_has_wrapped_since_stays() -> None:
    """Ours only passes on from then on."""
    kernel = Kernel()
    inner = Wrapped(kernel, "say", louder)
    outer = Wrapped(kernel, "say", lambda original, text: f"<{original(text)}>")
    inner.undo()
    assert kernel.say("x") == "<x>"
    outer.undo()
    assert kernel.say("x") == "x"

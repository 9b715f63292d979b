"""Tests of `nbdist.notebook.extension`: an object is as it was afterwards, whoever else wraps."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.extension import wrap


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
    undo = wrap(kernel, "say", louder)
    assert kernel.say("x") == "X"
    assert (kernel.say.__name__, kernel.say.__doc__) == ("say", "Say it.")
    assert Kernel().say("x") == "x"
    undo()
    assert kernel.say("x") == "x"
    assert vars(kernel) == {}


def test_what_was_the_objects_own_is_put_back() -> None:
    """As of a kernel that somebody has wrapped before."""
    kernel = Kernel()
    kernel.say = own = lambda text: f"<{text}>"  # type: ignore[method-assign]
    undo = wrap(kernel, "say", louder)
    assert kernel.say("x") == "<X>"
    undo()
    assert kernel.say is own


def test_what_somebody_has_wrapped_since_stays() -> None:
    """Ours only passes on from then on."""
    kernel = Kernel()
    undo_inner = wrap(kernel, "say", louder)
    undo_outer = wrap(kernel, "say", lambda original, text: f"<{original(text)}>")
    undo_inner()
    assert kernel.say("x") == "<x>"
    undo_outer()
    assert kernel.say("x") == "x"

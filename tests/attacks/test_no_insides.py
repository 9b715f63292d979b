"""No file of nbdist is in what a person sees, whatever goes wrong: the gate, in a terminal.

In notebooks it is `tests.notebook.front_end.Notebook.run`, which looks at what every test sees.
"""

from __future__ import annotations

from pathlib import Path

from tests.notebook.front_end import INSIDES
from tests.notebook.test_first_contact import AHEAD, MISTAKES
from tests.notebook.test_front_ends import Terminal

BEGIN, END = "\x1b[200~", "\x1b[201~"
"""What a terminal puts around text that is pasted."""


EVERY = 4
"""Of how many one is tried: there are more than forty."""


def test_mistakes_in_a_terminal(tmp_path: Path, empty_snapshot_folder: None) -> None:
    """What is said is the same as in a notebook, and no line is of nbdist's insides."""
    terminal = Terminal(tmp_path)
    try:
        for cell in AHEAD[1:]:
            terminal.enter(f"{BEGIN}{cell}{END}")
        for mistake in MISTAKES[::EVERY]:
            seen = ""
            for cell in mistake.cells:
                seen = "\n".join(terminal.enter(f"{BEGIN}{cell}{END}"))
            assert not INSIDES.findall(seen), seen
            assert not (missing := [each for each in mistake.said if each not in seen]), (
                missing,
                seen,
            )
    finally:
        terminal.child.close(force=True)

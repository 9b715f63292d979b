"""What all magics share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics

if TYPE_CHECKING:
    import argparse

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.desk import Desk
    from nbdist.notebook.desks import Desks


class PooledMagics(Magics):
    """Magics that work at the desk of the pool that `--pool` names."""

    def __init__(self, shell: InteractiveShell, desks: Desks) -> None:
        super().__init__(shell)
        self.desks = desks

    def desk(self, options: argparse.Namespace) -> Desk:
        """The one that the options name."""
        return self.desks.at(options.pool)

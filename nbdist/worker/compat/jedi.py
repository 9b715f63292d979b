"""jedi, with which IPython completes, as it has to be in a process that may be killed.

What it has read of libraries parso keeps in files of the user's (`~/.cache/jedi`), written in
place.  Who reads one meanwhile completes nothing; where its writer is killed at that moment it
stays so in all of the user's notebooks, until somebody removes the file.  Seen with parso 0.8.7.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any


def import_jedi() -> None:
    """Import it, if it is there, and have it write files whole.

    It raises the limit of recursion when it is imported; users' code keeps the one it has.
    """
    limit = sys.getrecursionlimit()
    with suppress(ImportError):
        import_module("jedi")
        write_whole(import_module("parso.cache"))
    if sys.getrecursionlimit() != limit:
        sys.setrecursionlimit(limit)


def write_whole(cache: Any) -> None:
    """Have files of parso's cache appear under their names when all is in them."""
    if not hasattr(cache, "_save_to_file_system") or not hasattr(cache, "_get_hashed_path"):
        return

    def save(hashed_grammar: str, path: object, item: object, cache_path: object = None) -> None:
        name = cache._get_hashed_path(hashed_grammar, path, cache_path=cache_path)
        # What a killed process leaves there, parso removes with what nobody has read for 30 days.
        with NamedTemporaryFile(dir=os.path.dirname(name), delete=False) as file:
            try:
                pickle.dump(item, file, pickle.HIGHEST_PROTOCOL)
                file.flush()
                os.replace(file.name, name)
            except BaseException:
                os.unlink(file.name)
                raise

    cache._save_to_file_system = save

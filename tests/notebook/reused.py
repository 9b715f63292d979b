"""Resets a notebook kernel before other tests use it; runs in the kernel and keeps its agent."""

from __future__ import annotations

import gc
import os
import signal
import sys
import sysconfig
from types import ModuleType
from typing import Any
from unittest.mock import patch

import jedi
from IPython.core.getipython import get_ipython

import nbdist
from tests.worlds import share_agent

LIBRARIES = (
    *("site-packages", "built-in", "frozen"),
    sysconfig.get_path("stdlib"),
    os.path.dirname(nbdist.__file__),
)
"""A module stays imported if its origin, such as its file, has one of these in its path."""


class Kernel:
    """The state of a kernel before its first cell, to which `clean` brings it back."""

    def __init__(self, cache: str) -> None:
        # In a shared folder, another process could be writing the files that jedi reads.
        jedi.settings.cache_directory = cache
        self.shell: Any = get_ipython()  # type: ignore[no-untyped-call]
        self.agent = share_agent()
        self.agent.start()
        self.folder, self.environ = os.getcwd(), {**os.environ}
        self.modules = {*sys.modules}
        self.extensions = {*self.shell.extension_manager.loaded}
        self.sigint_handler = signal.getsignal(signal.SIGINT)
        hooks = (*self.shell.events.callbacks.values(), self.shell.input_transformers_cleanup)
        self.lists = [(each, [*each]) for each in (sys.path, self.shell.ast_transformers, *hooks)]
        gc.collect()
        gc.freeze()  # so that `clean` only looks through newer objects

    def clean(self) -> None:
        """Unload extensions, end patches and restore all state that cells have changed."""
        patch.stopall()
        for extension in {*self.shell.extension_manager.loaded} - self.extensions:
            self.shell.extension_manager.unload_extension(extension)
        self.shell.extension_manager.loaded = {*self.extensions}
        os.chdir(self.folder)  # IPython cannot reset itself in a folder that was removed
        self.shell.reset(new_session=True)
        self.shell.call_pdb = False
        signal.signal(signal.SIGINT, self.sigint_handler)
        os.environ.clear()
        os.environ.update(self.environ)
        for each, before in self.lists:
            each[:] = before
        # Some modules, such as `torch.ops`, have no spec: their top-level package decides.
        packages = {name: sys.modules.get(name.partition(".")[0]) for name in sys.modules}
        for name in {*sys.modules} - self.modules:
            if not _is_of_a_library(packages[name] or sys.modules[name]):
                del sys.modules[name]
        gc.collect()
        self.agent.start()


def _is_of_a_library(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and any(each in (spec.origin or "built-in") for each in LIBRARIES)

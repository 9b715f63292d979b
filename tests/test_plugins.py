"""Tests of `nbdist.plugins`: additions of packages, and nbdist without tools and cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist import plugins
from nbdist.errors import UsageError
from nbdist.notebook import command
from nbdist.notebook.display import CommandOutput
from nbdist.worker import namespace
from tests.sources import PACKAGE
from tests.waiting import SOON

EXAMPLE = '''
from nbdist.notebook.command import MagicCall, command

@command()
def dist_hello(line: MagicCall) -> str:
    """Say hello."""
    return "hello"
'''

ENTRIES = """
[nbdist.commands]
dist_hello = its_package:dist_hello
dist_gone = no_package:dist_gone
dist_none = its_package:command

[nbdist.cell_options]
gone = no_package:GONE

[nbdist.ops]
its_op = its_package
gone_op = no_package
diff = its_package
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with entry points, some of which cannot be imported."""
    (tmp_path / "its_package.py").write_text(EXAMPLE)
    about = tmp_path / "its_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: its_package\nVersion: 1\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (command._plugins, namespace.import_ops):
        monkeypatch.setattr(sys.modules[cached.__module__], cached.__name__, cached.__wrapped__)
    return tmp_path


def test_entry_points_of_a_checkout_win(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout's entry points come first, before a package's of the same name.

    Without a pyproject.toml nbdist has the entry points of installed packages.
    """
    said = tomllib.loads(plugins.PROJECT.read_text())["project"]["entry-points"]
    monkeypatch.setattr(sys, "path", [str(package), str(package / "nowhere")])
    for group in (
        plugins.COMMANDS_GROUP,
        plugins.CELL_OPTIONS_GROUP,
        plugins.OPS_GROUP,
        plugins.LAUNCHERS_GROUP,
    ):
        found = {name: point.value for name, point in plugins.entry_points(group).items()}
        assert found.items() >= said[group].items()
    assert plugins.entry_points(plugins.OPS_GROUP)["its_op"].value == "its_package"
    monkeypatch.setattr(plugins, "PROJECT", package / "pyproject.toml")
    assert [*plugins.entry_points(plugins.OPS_GROUP)] == ["its_op", "gone_op", "diff"]


@pytest.mark.usefixtures("package")
def test_a_package_can_add_magics() -> None:
    """Magics of a package work as nbdist's own; an import that fails is reported at use."""
    found = {each.name: each for each in command.find_commands()}
    assert found["dist_hello"].summary == "Say hello."
    assert found["dist_hello"].run(None) == "hello"
    typed: Any = SimpleNamespace(options=SimpleNamespace(magic=None, everything=True))
    shown = found["dist_help"].run(typed)
    assert isinstance(shown, CommandOutput)
    assert re.search(r"%dist_hello +Say hello\n", shown.text.partition("other packages")[2])
    with pytest.raises(UsageError) as gone:
        found["dist_gone"].run(None)
    assert str(gone.value) == (
        "`%dist_gone` cannot be used: no_package:dist_gone was not imported "
        "(ModuleNotFoundError: No module named 'no_package')."
    )
    with pytest.raises(UsageError, match="it is no command"):
        found["dist_none"].run(None)
    assert len(command.cell_options()) == 3  # nbdist's own


@pytest.mark.usefixtures("package")
def test_a_package_can_add_ops() -> None:
    """Workers find ops of a package by name, but no op replaces an op of nbdist."""
    assert namespace.find_op("its_op.dist_hello").name == "dist_hello"
    assert namespace.find_op("diff.lend").__module__ == "nbdist.tools.diff_op"
    with pytest.raises(ImportError, match="nbdist has no `gone_op` on this rank: No module named"):
        namespace.find_op("gone_op")


ALONE = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in ("%load_ext nbdist", "%%distributed -n 2\\nprint('rank', rank + 0)",
             "%dist_diff rank", "%dist_shutdown", "%dist_init --launcher slurm"):
    shell.run_cell(cell)
import nbdist
print(nbdist.__file__, *(name for name in sys.modules if name.startswith("nbdist.tools.")))
"""


@pytest.mark.own_agent
def test_the_core_runs_without_tools_and_cluster(tmp_path: Path) -> None:
    """Without tools and cluster cells run; a magic and a launcher say that they are missing."""
    left_out = shutil.ignore_patterns("tools", "cluster", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nbdist", ignore=left_out)
    ended = subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NBDIST_IDLE_IMPORTS": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    said = ended.stdout
    assert said.splitlines()[-1] == str(tmp_path / "nbdist" / "__init__.py"), ended.stderr
    assert "rank 0" in said
    assert "rank 1" in said
    assert "nbdist.tools.diff:dist_diff was not imported" in said
    assert "`--launcher slurm`: nbdist.cluster is not installed here." in said

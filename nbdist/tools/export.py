"""From notebook to batch: the workers' cells as a script that torchrun runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, block
from nbdist.notebook.shipping.plan import version_now
from nbdist.words import count
from nbdist.world.spec import given_environ

if TYPE_CHECKING:
    from nbdist.tools.batch_script import BatchScript
    from nbdist.tools.script_text import Setting
    from nbdist.world.world import World


LARGE = 1_000_000
"""Bytes of files from which on their size is told in MB."""


@command(
    argument("file", nargs="?", help="the file to write, such as train.py"),
    argument("--force", action="store_true", help="overwrite existing files"),
)
def dist_export(line: Line) -> Shown:
    """Export the distributed cells as a torchrun script: `%dist_export train.py`.

    It runs under `torchrun --nproc-per-node 4 train.py`, without nbdist.  Functions, classes
    and small values of the notebook that the cells use stand in it, others lie in train_data.
    It says what it could not carry over.
    """
    # For this command alone; it takes a tenth of what %load_ext takes.
    from nbdist.tools.batch_script import Composer
    from nbdist.tools.origins import Origins

    path = _path(line.options.file)
    world, shell = line.world, line.pool.shell
    folder = path.with_name(f"{path.stem}_data")
    if not line.options.force:
        _check_free(path, folder)
    session = world.session
    history = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    # What auto mode sent to the ranks was typed here, and bound nothing here.
    ran_here = [line.auto.ran.get(number, source) for number, source in enumerate(history)]

    def version_of(name: str) -> object:
        try:
            return version_now(name, session.names)
        except NbdistError:
            return None

    origins = Origins(shell.user_ns, ran_here)
    composer = Composer(session.past, shell.user_ns, origins, shell.transform_cell, version_of)
    script = composer.compose(setting_of(world, path.stem))
    if not script.cells:
        raise UsageError(
            "`%dist_export`: no `%%distributed` cell has succeeded since the workers were started."
        )
    line.display.wait_for(f"writing {path} …")
    size = _write(script, path, folder, shell.user_ns)
    return block("\n".join(_summary(script, path, folder, size, world.size)))


def _path(text: str | None) -> Path:
    path = Path(text or "").expanduser()
    if not text or path.suffix != ".py":
        name = f"`%dist_export {text}`" if text else "`%dist_export`"
        raise UsageError(
            f"{name}: the script needs a name that ends in .py: `%dist_export train.py`."
        )
    if not path.parent.is_dir():
        raise UsageError(f"`%dist_export {text}`: there is no folder {path.parent}.")
    return path


def _check_free(path: Path, folder: Path) -> None:
    there = [each for each in (path, folder) if each.exists()]
    if there:
        raise UsageError(
            f"`%dist_export`: {' and '.join(map(str, there))} already exists. `%dist_export "
            f"--force {path}` overwrites it."
        )


def setting_of(world: World, stem: str) -> Setting:
    """Say for what a script is: as many ranks and the group that the world has, or would have."""
    from nbdist.tools.script_text import Setting

    session = world.session
    backend = "none" if session.spec.backend is None else session.config.backend or ""
    words = []
    if given := given_environ(session.config):
        words.append(f"Set in the workers' environment: {', '.join(sorted(given))}.")
    if session.config.gpus:
        words.append(f"The workers had GPUs {session.config.gpus}: CUDA_VISIBLE_DEVICES says so.")
    if session.config.share_gpus:
        words.append("The workers shared GPUs (`--share-gpus`); a script of torchrun's does not.")
    notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", "")) or "a notebook"
    return Setting(stem, world.size, backend, notebook, tuple(words))


def _write(script: BatchScript, path: Path, folder: Path, names: dict[str, object]) -> int:
    """Write all of it, the script last; how many bytes its files have.

    Nothing is left of what was broken off.
    """
    size = 0
    unfinished = folder.with_name(f".{folder.name}.part")
    try:
        if script.files:
            unfinished.mkdir(exist_ok=True)
            size = sum(file.write(unfinished, names) for file in script.files)
            folder.mkdir(exist_ok=True)
            for file in script.files:
                os.replace(unfinished / file.name, folder / file.name)
        path.write_text(script.text)
    except OSError as error:
        raise UsageError(f"`%dist_export {path}`: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return size


def _summary(script: BatchScript, path: Path, folder: Path, size: int, ranks: int) -> list[str]:
    parts = [str(path), count(script.cells, "cell")]
    if script.files:
        told = f"{size / 1e6:,.1f} MB" if size >= LARGE else f"{size / 1e3:,.0f} kB"
        parts.append(f"{count(len(script.files), 'file')} in {folder} ({told})")
    parts.append(f"`torchrun --nproc-per-node {ranks} {path}`")
    lost = ["not carried over:", *(f"  {each}" for each in script.lost)] if script.lost else []
    return [" · ".join(parts), *lost]

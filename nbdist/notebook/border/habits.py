"""What people type who come from elsewhere, or in haste: understood, or answered with ours.

Pure; options and errors ask it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

SAME = {
    "--nproc-per-node": "-n",  # torchrun
    "--nproc_per_node": "-n",
    "--num-processes": "-n",  # nbdistributed
    "--num_processes": "-n",  # accelerate
    "-np": "-n",  # mpirun
    "--gpu-ids": "--gpus",  # nbdistributed
    "--gpu_ids": "--gpus",  # accelerate
    "--targets": "-r",  # ipyparallel
}
"""Flags of others that mean what one of ours does: they are taken for it."""

OLD = {
    "--rank": "-r",
    "--local": "--here-too",
}
"""Flags of ours as they were called before: they work, and a line says the new ones."""

MEANT = {
    "--num-procs": "-n",
    "--nprocs": "-n",
    "--procs": "-n",
    "--num-workers": "-n",
    "--workers": "-n",
    "--world-size": "-n",
    "--ngpus": "-n",
    "--num-gpus": "-n",
    "--devices": "--gpus",
    "-t": "-r",
    "--noblock": "--no-wait",
}
"""Flags that say roughly what one of ours says."""

_PORT = "ranks meet without a port; `--rdzv-endpoint HOST:PORT` has them meet at a store"
_LOGS = "all output of all ranks is shown and kept: `%dist_output --log`"

TORCHRUN = {
    "--standalone": "leave it out, as one machine is the default",
    "--nnodes": "`-j 2x4` starts 2 nodes with 4 workers each, `--hosts a,b` names machines",
    "--node-rank": "leave it out, as nbdist numbers the nodes",
    "--master-addr": "`--hosts a,b` names machines, which find one another",
    "--master-port": _PORT,
    "--local-addr": "`--address` is the notebook's address for other machines",
    "--rdzv-id": "`--name` names the run",
    "--rdzv-conf": _PORT,
    "--log-dir": "NBDIST_LOG_DIR in the environment is where logs are, `--name` names their folder",
    "--tee": _LOGS,
    "--redirects": _LOGS,
    "--local-ranks-filter": "`%dist_output -r 0` shows one rank's output",
    "--role": "`--pool` names a group of workers",
    "--start-method": "workers are forked from a process that has torch; `--no-fork` spawns them",
    "--monitor-interval": "leave it out, as a death is seen at once",
    "--run-path": "leave it out, as a script always runs by its path",
}
"""Options of torchrun that have no flag here, and what there is in their place."""

_WITHOUT_VALUE = ("--standalone", "--run-path")

MAGICS = {
    "px": "begin the cell with `%%distributed`",
    "autopx": "`%dist_auto on` sends plain cells to the workers",
    "pxresult": "`%dist_output` shows the last result again",
    "sync": "`dist.barrier()` in a cell waits for all ranks, `%dist_sync model` copies variables",
    "dist_mode": "`%dist_auto on` sends plain cells to the workers",
    "dist_reset": "`%dist_restart` restarts the workers",
    "dist_sync_ide": "completion knows the workers' variables; nothing needs to be copied",
    "dist_env": "`%%distributed` shows them: `import os; os.environ`",
    "dist_start": "`%dist_init -n 4` starts workers",
    "dist_stop": "`%dist_interrupt` stops the cell, `%dist_shutdown` ends the workers",
    "dist_kill": "`%dist_restart` restarts all workers, `%dist_shutdown` ends them",
    "dist_wait": "`job.wait()` waits for a cell that was sent with `--no-wait -o job`",
    "parallel": "begin the cell with `%%distributed`",
    "torchrun": "`%dist_run -n 4 train.py` runs a script",
}
"""Magics of ipyparallel, nbdistributed and others, and what does the same here."""

_NOT_FOUND = re.compile(r"^(?:Line magic function|Cell magic) `(%%?)(\S+?)` not found\b")
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: ((\S+).*)")
_FLAG = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*(?=[=\s]|$)")

NEAR_FLAG, NEAR_MAGIC = 0.7, 0.75
"""How alike, from 0 to 1, what was typed has to be."""


def in_our_words(line: str, flags: Collection[str]) -> str:
    """Write others' flags in a magic's line as ours, where the magic has these alone."""
    return _FLAG.sub(lambda found: our_flag(found[0], flags), line)


def old_flags(line: str, flags: Collection[str]) -> str:
    """Say what flags of ours in a magic's line are called now; "" where none has changed."""
    typed = dict.fromkeys(flag for flag in _FLAG.findall(line) if flag in OLD)
    said = (f"`{flag}` is now `{OLD[flag]}`" for flag in typed if OLD[flag] in flags)
    return ", ".join(said)


def our_flag(flag: str, flags: Collection[str]) -> str:
    """Give our flag for one of others', for an old one or with underscores; or the same flag."""
    ours = SAME.get(flag) or OLD.get(flag) or _dashed(flag)
    return ours if ours in flags and flag not in flags else flag


def takes_value(flag: str) -> bool:
    """Say whether the word after an option of torchrun's belongs to it."""
    return _dashed(flag) in TORCHRUN and _dashed(flag) not in _WITHOUT_VALUE


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")


def meant_by(message: str, flags: Collection[str]) -> str:
    """Say what was meant by what argparse has not recognized, by its message; "" for nothing."""
    found = _UNRECOGNIZED.match(message)
    if found is None:
        return ""
    words = [_dashed(word.partition("=")[0]) for word in found[1].split()]
    if told := dict.fromkeys(f"`{word}`: {TORCHRUN[word]}" for word in words if word in TORCHRUN):
        return f"{'; '.join(told)}."
    typed, _, value = found[2].partition("=")
    if typed.isdigit() and "-n" in flags:
        return f"unexpected `{typed}`: did you mean `-n {typed}`?"
    if not typed.startswith("-"):
        return ""
    ours = {flag.strip("-"): flag for flag in flags}
    near = get_close_matches(typed.strip("-"), ours, 1, NEAR_FLAG)
    meant = MEANT.get(typed) or (ours[near[0]] if near else "")
    if meant not in flags:
        return f"unknown option `{typed}`."
    return f"unknown option `{typed}`: did you mean `{meant}{' ' if value else ''}{value}`?"


def hint_on_magic(message: str, shown_names: Iterable[str]) -> str:
    """Say what was meant by a magic that IPython has not found; "" where that is not known.

    `message` is IPython's, `shown_names` are those of our magics: `%dist_init`, `%%rank`.
    """
    found = _NOT_FOUND.match(message)
    if found is None or " exists, " in message:  # IPython has said it
        return ""
    if answer := MAGICS.get(found[2]):
        return f"In nbdist {answer}."
    ours = {name.lstrip("%"): name for name in shown_names}
    near = get_close_matches(found[2], ours, 1, NEAR_MAGIC)
    return f"Did you mean `{ours[near[0]]}`?" if near else ""

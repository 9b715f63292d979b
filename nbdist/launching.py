"""Which launcher the options of a world are for, and which of them contradict it; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbdist.errors import UsageError
from nbdist.hosts import Host
from nbdist.topology import Layout
from nbdist.words import count

LOCAL = "local"
"""The launcher for this machine."""

OTHER_MACHINES = frozenset({"copy_env", "address", "link_timeout", "rdzv_backend", "rdzv_endpoint"})
"""What only a world on other machines can be told, and all launchers of such worlds take."""

TAKES: Mapping[str, frozenset[str]] = {
    LOCAL: frozenset(),
    "ssh": OTHER_MACHINES | {"hosts"},
    "slurm": OTHER_MACHINES | {"salloc", "memory"},
    "join": OTHER_MACHINES,
    "ray": OTHER_MACHINES | {"memory"},
}
"""Of the options that are for some launchers alone those that each takes; others' take all."""

FOR_SOME = frozenset().union(*TAKES.values())
"""The fields of a world that are for some launchers alone."""


def launcher_here(environ: Mapping[str, str]) -> str:
    """Choose a launcher by where a process is, of which nothing was said.

    In an allocation of Slurm's it is Slurm's, unless that is this machine alone.
    """
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    # Slurm's daemon sets the second on the nodes; the shell of a `salloc` runs elsewhere.
    is_this_machine = nodes == "1" and "SLURMD_NODENAME" in environ
    return "slurm" if environ.get("SLURM_JOB_ID") and not is_this_machine else LOCAL


def launcher_for(said: Mapping[str, object], here: str = LOCAL) -> str:
    """Choose a launcher by what was said, where none was named; else that of this place."""
    return "ssh" if said.get("hosts") else "slurm" if said.get("salloc") else here


def newer(
    changes: Mapping[str, object], before: Mapping[str, object], here: str = LOCAL
) -> dict[str, object]:
    """Return what else changes with these: of launcher and options the newer ones hold."""
    said = {name for name in FOR_SOME if changes.get(name)}
    if "launcher" not in changes:
        launcher = before.get("launcher") or launcher_for(before, here)
        is_taken = said <= TAKES.get(str(launcher), FOR_SOME)
        other = launcher_for(changes, here)
        return {} if is_taken else {"launcher": None, **_without(said, other)}
    launcher = changes["launcher"] or launcher_for(changes, here)
    return _without(said, str(launcher))


def _without(said: Iterable[str], launcher: str) -> dict[str, object]:
    """Take back the options that the launcher has no use for, but for those that were said."""
    return dict.fromkeys(FOR_SOME - TAKES.get(launcher, FOR_SOME) - {*said})


def check_taken(launcher: str, said: Mapping[str, str]) -> None:
    """Raise UsageError where the launcher has no use for an option.

    `said` has those of `FOR_SOME` that were said, each as it was typed.
    """
    takes = TAKES.get(launcher, FOR_SOME)
    for name, typed in said.items():
        if name not in takes:
            by = " or ".join(f"`--launcher {each}`" for each, its in TAKES.items() if name in its)
            raise UsageError(f"`{typed}`: it is for {by}, and not for `--launcher {launcher}`.")
    if launcher == "ssh" and "hosts" not in said:
        raise UsageError("`--launcher ssh`: on which machines? Such as `--hosts a:4,b:4`.")
    if ("rdzv_backend" in said) != ("rdzv_endpoint" in said):
        raise UsageError(
            f"`{' '.join(said[each] for each in said if each.startswith('rdzv'))}`: it takes both, "
            "`--rdzv-backend etcd-v2 --rdzv-endpoint HOST:2379`."
        )


def check_room(
    typed: str, workers: int | None, layout: Layout | None, hosts: Sequence[Host]
) -> None:
    """Raise UsageError where the hosts have no room for what was `typed`, `-n 8` or `-j 2x4`."""
    slots = [host.slots for host in hosts]
    among = f"`{typed} --hosts {','.join(map(str, hosts))}`"
    if workers is not None and None not in slots:
        there_are = sum(filter(None, slots))
        if there_are < workers:
            raise UsageError(f"{among}: the hosts have room for {count(there_are, 'worker')}.")
    if layout is None:
        return
    if len(hosts) < (least := layout.least or layout.nodes):
        raise UsageError(f"{among}: {count(least, 'node')}, but {count(len(hosts), 'host')}.")
    small = [host for host in hosts if host.slots is not None and host.slots < layout.per_node]
    if len(hosts) - len(small) < least:
        raise UsageError(f"{among}: {small[0]} has no room for {count(layout.per_node, 'worker')}.")

"""`python -m tests.bench.peers`; see `tests/bench/peers/__init__.py`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.bench.lab import CellFailed, Lab
from tests.bench.peers.adapters import PEERS, RANKS, Peer
from tests.bench.peers.rows import ROWS, Answer, Bench

Answers = dict[str, dict[str, Answer]]
"""By row and peer."""


def main() -> None:
    """Ask each peer for each row, and write what was found."""
    options = _options()
    peers = [peer for peer in PEERS if peer.name in options.only]
    found: Answers = {row: {} for row in options.rows}
    with Lab(1, options.wait) as lab:
        for peer in peers:
            python = _environment(options.environments, peer)
            for row in options.rows:
                answer = _ask(Bench(lab, peer, python), row)
                found[row][peer.name] = answer
                sys.stdout.write(
                    f"{peer.name:20} {row:28} {answer.text:24} {answer.reason[:200]}\n"
                )
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(_as_json(found), indent=1))
    if options.table:
        options.table.write_text(_table(found, [peer.name for peer in peers]))


def _ask(bench: Bench, row: str) -> Answer:
    try:
        with bench:
            return ROWS[row](bench)
    except CellFailed as error:
        return Answer("no", reason=str(error))


def _environment(folder: Path, peer: Peer) -> Path:
    """Return the Python of the peer's environment, which sees the packages of this one's too."""
    if not peer.packages:
        return Path(sys.executable)
    place = folder / peer.name.replace(" ", "-")
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        ours = sysconfig.get_path("purelib")
        own = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
        Path(own, "beside.pth").write_text(f"{ours}\n")
        _install(python, peer)
        # A reset of nbdistributed's kills by name whatever runs on the machine.
        harmless = place / "bin" / "pkill"
        harmless.write_text("#!/bin/sh\nexit 1\n")
        harmless.chmod(0o755)
    return python


def _install(python: Path, peer: Peer) -> None:
    held = f"torch=={version('torch')}"
    command = [python, "-m", "pip", "install", "-q", peer.packages, held]
    subprocess.run(command, check=True, timeout=900)


def _table(found: Answers, names: list[str]) -> str:
    """The answers in Markdown, under what they were measured with and on."""
    cores, memory = os.cpu_count(), psutil.virtual_memory().total >> 30
    where = f"{cores} cores, {memory} GiB, no GPU, Python {platform.python_version()}"
    packages = ", ".join(peer.packages or peer.name for peer in PEERS if peer.name in names)
    when = datetime.date.today()
    lines = [
        f"{RANKS} ranks, gloo, {where}, torch {version('torch')}; {when}; {packages}.",
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for row, answers in found.items():
        lines.append(f"| {row} | {' | '.join(answers[name].text for name in names)} |")
    return "\n".join(lines) + "\n"


def _as_json(found: Answers) -> dict[str, dict[str, dict[str, object]]]:
    return {
        row: {name: answer._asdict() for name, answer in answers.items()}
        for row, answers in found.items()
    }


def _options() -> argparse.Namespace:
    names = ",".join(peer.name for peer in PEERS)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--only", default=names, metavar="PEERS", help=names)
    parser.add_argument("--rows", default=",".join(ROWS), help=", ".join(ROWS))
    parser.add_argument("--environments", type=Path, default=Path("peers"), metavar="FOLDER")
    parser.add_argument(
        "--wait", type=float, default=60, help="seconds for the machine to be quiet"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.only, options.rows = options.only.split(","), options.rows.split(",")
    options.environments = options.environments.absolute()
    for name in {*options.only} - {*names.split(",")} | {*options.rows} - {*ROWS}:
        parser.error(f"no peer or row {name}")
    return options


if __name__ == "__main__":
    main()

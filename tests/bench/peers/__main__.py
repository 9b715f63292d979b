"""`python -m tests.bench.peers`; see `tests/bench/peers/__init__.py`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import psutil

from tests.bench.lab import CellFailed, Lab
from tests.bench.peers.adapters import PEERS, RANKS, Peer
from tests.bench.peers.rows import ROWS, Answer, Bench

NOISE = re.compile(r"(\x1b|\\u001b)\[[\d;]*[A-Za-z]|(?:/[\w.+-]+)+/")
"""Colours, and folders of this machine."""


def main() -> None:
    """Ask each peer for each row, and write the answers."""
    options = _options()
    found: Found = {"about": _about(), "rows": {row: {} for row in ROWS}}
    if options.json and options.json.exists():
        found["rows"] |= json.loads(options.json.read_text())["rows"]
    with Lab(1, options.wait) as lab:
        for peer in PEERS:
            if peer.name not in options.only:
                continue
            python = _environment(options.environments, peer)
            for row in options.rows:
                answer = _ask(Bench(lab, peer, python), row)
                found["rows"][row][peer.name] = answer._asdict()
                sys.stdout.write(f"{peer.name:20} {row:28} {answer.text:32} {answer.reason}\n")
                sys.stdout.flush()
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        write(found)


def _ask(bench: Bench, row: str) -> Answer:
    try:
        with bench:
            answer = ROWS[row](bench)
    except (CellFailed, RuntimeError) as error:
        answer = Answer("no", reason=str(error))
    return answer._replace(reason=NOISE.sub("", answer.reason)[-500:])


def _environment(folder: Path, peer: Peer) -> Path:
    """Return the Python of the peer's environment, which sees the packages of this one, too."""
    if not peer.packages:
        return Path(sys.executable)
    place = folder / peer.name.replace(" ", "-")
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        ours = sysconfig.get_path("purelib")
        own = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
        Path(own, "beside.pth").write_text(f"{ours}\n")
        held = f"torch=={version('torch')}"
        command = [python, "-m", "pip", "install", "-q", peer.packages, held]
        subprocess.run(command, check=True, timeout=900)
    # A reset of nbdistributed runs pkill, which would end other processes of the machine.
    harmless = place / "bin" / "pkill"
    harmless.write_text("#!/bin/sh\nexit 1\n")
    harmless.chmod(0o755)
    return python


def _about() -> str:
    """Return the number of ranks, the machine, the versions and the date."""
    cores, memory = os.cpu_count(), psutil.virtual_memory().total >> 30
    where = f"{cores} cores, {memory} GiB, no GPU, Python {platform.python_version()}"
    packages = ", ".join(peer.packages or peer.name for peer in PEERS)
    when = f"torch {version('torch')}; {datetime.date.today()}"
    return f"{RANKS} ranks, gloo, {where}, {when}; {packages}."


def _options() -> argparse.Namespace:
    names = ",".join(peer.name for peer in PEERS)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--only", default=names, metavar="PEERS", help=names)
    parser.add_argument("--rows", default="", metavar="WORDS", help="; ".join(ROWS))
    parser.add_argument("--environments", type=Path, default=Path("peers"), metavar="FOLDER")
    parser.add_argument("--wait", type=float, default=60, help="seconds, for a quiet machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="answers that are there stay")
    parser.add_argument("--write", action="store_true", help="put all into README.md and docs")
    options = parser.parse_args()
    options.only, words = options.only.split(","), options.rows.split(",")
    options.rows = [row for row in ROWS if any(word in row for word in words)]
    options.environments = options.environments.absolute()
    if not options.rows or {*options.only} - {*names.split(",")}:
        parser.error(f"no such peer or row; peers: {names}; rows: {'; '.join(ROWS)}")
    return options


# --- the tables of README.md and docs/peers.md, and their plot ------------------------------

ROOT = Path(__file__).parents[3]
SHORT = ("`pass`", "a rank raises, others wait", "Stop in a barrier", "restart")
"""The rows that README.md shows."""

PANELS = ("first result", "restart", "4 x 50,000 lines", *SHORT[1:3])
GREY = "#7d7d7d"
"""A colour that can be read on white and on black."""

Found = dict[str, Any]


def write(found: Found) -> None:
    """Write all answers into docs, README.md and the plot."""
    docs = ROOT / "docs"
    (docs / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    _put(docs / "peers.md", "measured", found["about"])
    _put(docs / "peers.md", "peers", _table(found, tuple(found["rows"])))
    _put(ROOT / "README.md", "peers", _table(found, SHORT))
    draw(found, ROOT / ".github" / "peers.svg")


def _table(found: Found, rows: tuple[str, ...]) -> str:
    names = [peer.name for peer in PEERS]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for row in rows:
        answers = found["rows"][row]
        texts = (answers[name]["text"] if name in answers else "" for name in names)
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _put(page: Path, mark: str, text: str) -> None:
    """Replace the text between a comment of the page and the next empty line."""
    pattern = rf"(?<=<!-- {mark} -->\n).*?(?=\n\n)"
    page.write_text(re.sub(pattern, lambda _: text, page.read_text(), count=1, flags=re.DOTALL))


def draw(found: Found, file: Path) -> None:
    """Draw bars of seconds, in a panel for each of some rows."""
    look = {"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 8, "text.color": GREY}
    with plt.rc_context(look):
        figure, panels = plt.subplots(
            1, len(PANELS), sharey=True, figsize=(9.6, 2.6), layout="constrained"
        )
        for axes, row in zip(panels, PANELS, strict=True):
            names = [peer.name for peer in reversed(PEERS) if peer.name in found["rows"][row]]
            answers = [found["rows"][row][name] for name in names]
            seconds = [answer["value"] or 0 for answer in answers]
            colours = ["C0" if name == "nbdist" else GREY for name in names]
            bars = axes.barh(names, seconds, color=colours, height=0.6)
            texts = [answer["text"].partition(",")[0] for answer in answers]
            axes.bar_label(bars, texts, padding=2)
            axes.set_title(row.strip("`"), fontsize=9, loc="left")
            axes.set_xlim(0, 1.5 * max([*seconds, 0.1]))
            axes.set_xticks([])
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelcolor=GREY)
        figure.savefig(file, transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()

"""The tables of README.md and docs/peers.md and their plot, from what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tests.bench.peers.adapters import PEERS

ROOT = Path(__file__).parents[3]
SHORT = ("`pass`", "a rank raises, others wait", "Stop in a barrier", "restart")
"""What README.md shows."""

PANELS = ("first result", "restart", "4 x 50,000 lines", *SHORT[1:3])
GREY = "#7d7d7d"
"""Can be read on white and on black."""

Found = dict[str, Any]


def write(found: Found) -> None:
    """Put all of it where people read it."""
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
    """Replace what is between this comment of the page and the next empty line."""
    pattern = rf"(?<=<!-- {mark} -->\n).*?(?=\n\n)"
    page.write_text(re.sub(pattern, lambda _: text, page.read_text(), count=1, flags=re.DOTALL))


def draw(found: Found, file: Path) -> None:
    """Bars of seconds, a panel for each of some rows."""
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

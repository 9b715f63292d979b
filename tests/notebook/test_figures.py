"""Tests of `nbdist.notebook.figures`: files of figures, and what is shown below the panel."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from nbdist.agent.worker_output import RUN
from nbdist.notebook.figures import Below, below_panel, save_figures
from nbdist.output.events import Display, Done, Update
from nbdist.output.html import MOST_BELOW
from nbdist.output.transcript import Transcript


def cell(*data: dict[str, object]) -> Transcript:
    """In which each rank has displayed one thing."""
    return said_by(*([Display(bundle, {})] for bundle in data))


def png(content: bytes) -> dict[str, object]:
    return {"image/png": base64.b64encode(content).decode(), "text/plain": "<Figure>"}


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, str]:
    """A folder for each rank, as there is in a run."""
    for rank in range(3):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    return {rank: str(tmp_path / "attempt_0" / str(rank) / "stdout.log") for rank in range(3)}


def test_equal_ones_are_one_file(logs: dict[int, str], tmp_path: Path):
    """It is private, is written once, and goes with its run one day."""
    transcript = cell(png(b"one"), png(b"one"), png(b"two"))
    first, second = save_figures(transcript, logs)
    assert [*save_figures(transcript, logs)] == [first, second]
    said, _, path = first.partition(": ")
    assert (said, Path(path).read_bytes()) == ("figure of ranks 0-1", b"one")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert RUN.fullmatch(str(Path(path).relative_to(tmp_path)))
    assert second.startswith(f"figure of rank 2: {tmp_path}/attempt_0/2/figure-")
    assert len([*tmp_path.rglob("*.png")]) == 2


def test_where_they_are_saved(
    logs: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An SVG is text; what cannot be read is left out; why one is not saved."""
    bad: dict[str, object] = {"image/png": "x", "text/plain": "<Figure>"}
    (svg,) = save_figures(cell({"image/svg+xml": "<svg/>"}, {"text/html": "<b>"}, bad), logs)
    assert Path(svg.partition(": ")[2]).read_text() == "<svg/>"
    (said,) = save_figures(cell(png(b"one")), {})
    assert said == "figure of rank 0: not saved: there is no log folder (NBDIST_LOG_DIR)"
    gone = str(Path(logs[0]).parent / "gone" / "stdout.log")
    (said,) = save_figures(cell(png(b"one")), {0: gone})
    assert said.endswith("/gone: No such file or directory")
    monkeypatch.setenv("NBDIST_LOG_DIR", str(tmp_path))
    (said,) = save_figures(cell(png(b"one")), {0: "node1:/logs/0/stdout.log"})
    path = Path(said.removeprefix("figure of rank 0: "))
    assert path.parent == tmp_path / "figures"
    assert path.read_bytes() == b"one"


def markdown(text: str, display_id: str | None = None) -> Display:
    data = {"text/markdown": text, "text/plain": "<IPython.core.display.Markdown object>"}
    return Display(data, {}, display_id)


def said_by(*said: list[Display]) -> Transcript:
    """What each rank has displayed."""
    transcript = Transcript(range(len(said)))
    for rank, displays in enumerate(said):
        for each in displays:
            transcript.receive(rank, each, 0.0)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript


def texts(transcript: Transcript) -> list[str]:
    """The captions, and the Markdown below them in stars."""
    bundles = [shown.data for shown in below_panel(transcript)]
    return [
        f"*{data['text/markdown']}*" if "text/markdown" in data else data["text/plain"]
        for data in bundles
    ]


def test_order_and_captions() -> None:
    """Equal ones of ranks are one, in their order; of many a line says whose the others are."""
    a, b, c = map(markdown, "abc")
    assert texts(said_by([a, b], [a, b])) == ["ranks 0-1", "*a*", "*b*"]
    assert texts(said_by([a, a], [a], [c, a])) == [
        "ranks 0-2", "*a*", "rank 0", "*a*", "rank 2", "*c*"
    ]  # fmt: skip
    many = [markdown(str(n)) for n in range(MOST_BELOW + 4)]
    said = texts(said_by([markdown("first")], many))
    assert len([text for text in said if text.startswith("*")]) == MOST_BELOW
    assert said[-1] == "… 5 more displays of rank 1: `%dist_output -r 1` shows them"
    assert len(below_panel(said_by(many), [0])) == 37


def test_what_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes in its place, and what is no longer there leaves nothing."""
    page: dict[str, dict[str, Any]] = {}

    def draw(data: dict[str, Any], *, metadata: object, display_id: str, raw: bool) -> None:
        page[display_id] = data

    for name in ("display", "update_display"):
        monkeypatch.setattr(f"nbdist.notebook.figures.{name}", draw)
    transcript = said_by([markdown("one", "a")], [markdown("1", "a")])
    below = Below()
    below.add(transcript)
    assert len(page) == 4
    for rank in range(2):
        transcript.receive(rank, Update(markdown("two").data, {}, "a"), 2.0)
    below.change(transcript)
    plain = [data["text/plain"] for data in page.values()]
    assert plain == ["ranks 0-1", "<IPython.core.display.Markdown object>", "", ""]

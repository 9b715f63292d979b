"""Tests of `nbdist.notebook.figures`: files of figures, beside the log of their rank."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from nbdist.agent.worker_output import RUN
from nbdist.notebook.figures import CHUNK, can_draw, save_figures
from nbdist.output.events import Display, Done
from nbdist.output.transcript import Transcript


def cell(*data: dict[str, object]) -> Transcript:
    """What each rank has displayed."""
    transcript = Transcript(range(len(data)))
    for rank, bundle in enumerate(data):
        transcript.receive(rank, Display(bundle, {}), 0.0)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript


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


def test_other_kinds(logs: dict[int, str]):
    """An SVG is text; what is no image, or none that can be read, is left out."""
    bad: dict[str, object] = {"image/png": "x", "text/plain": "<Figure>"}
    (svg,) = save_figures(cell({"image/svg+xml": "<svg/>"}, {"text/html": "<b>"}, bad), logs)
    assert Path(svg.partition(": ")[2]).read_text() == "<svg/>"


def test_where_nothing_can_be_saved(logs: dict[int, str]):
    """The line says why."""
    (said,) = save_figures(cell(png(b"one")), {})
    assert said == "figure of rank 0: not saved: there is no log folder (NBDIST_LOG_DIR)"
    gone = str(Path(logs[0]).parent / "gone" / "stdout.log")
    (said,) = save_figures(cell(png(b"one")), {0: gone})
    assert said.endswith("/gone: No such file or directory")


@pytest.mark.parametrize(
    ("environ", "can"),
    [
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, True),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "TERM_PROGRAM": "vscode"}, False),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, False),
        ({}, False),
    ],
)
def test_terminals_that_draw(environ: dict[str, str], *, can: bool):
    """Those that say so themselves, with nothing in between."""
    assert can_draw(environ) == can


def test_what_kitty_draws(logs: dict[int, str]):
    """The bytes in chunks, the last of which says that it is; nothing is to be answered."""
    image = bytes(range(256)) * 16
    said, escapes = save_figures(cell(png(image)), logs, draws=True)
    assert said.startswith("figure of rank 0: ")
    *chunks, end = escapes.split("\x1b\\")
    assert end == ""
    heads, texts = zip(*(chunk.removeprefix("\x1b_G").split(";") for chunk in chunks), strict=True)
    assert heads == ("f=100,a=T,q=2,m=1", "q=2,m=0")
    assert base64.b64decode("".join(texts)) == image
    assert max(map(len, texts)) == CHUNK


def test_figures_of_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved here, as their log folder is there."""
    monkeypatch.setenv("NBDIST_LOG_DIR", str(tmp_path))
    (said,) = save_figures(cell(png(b"one")), {0: "node1:/logs/0/stdout.log"})
    path = Path(said.removeprefix("figure of rank 0: "))
    assert path.parent == tmp_path / "figures"
    assert path.read_bytes() == b"one"

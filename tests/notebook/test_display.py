"""Where a cell's output appears: in panels, as lines, in files, and in displays below a panel."""

from __future__ import annotations

import ast
import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest

from nbdist.agent.worker_output import ATTEMPT_FOLDER
from nbdist.notebook.display import (
    FIRST_DRAWING,
    PanelDisplay,
    PlainDisplay,
    is_of_magic,
    table,
)
from nbdist.notebook.output_count import OUTPUTS
from nbdist.notebook.rich_output import EMPTY_HTML, Below, below_panel, save_figures
from nbdist.output.ansi import strip
from nbdist.output.events import Display, DisplayUpdate, Done, Failure, Output, Text
from nbdist.output.html import MAX_DISPLAYS_BELOW
from nbdist.output.mimes import MIMES
from nbdist.output.transcript import Transcript
from nbdist.words import aligned
from nbdist.world.task_run import RankOutputs


def ended_cell(*outputs: Output) -> tuple[Transcript, RankOutputs]:
    """Return the transcript of a cell that two ranks have run, and the outputs, all of rank 0."""
    transcript = Transcript(range(2))
    transcript.start(0.0)
    for output in outputs:
        transcript.receive(0, output, 1.0)
    for rank in range(2):
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript, [(0, output) for output in outputs]


def shown(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """Return the displays since the last call: without a shell IPython prints displays."""
    return displayed(capsys.readouterr().out)


def displayed(printed: str) -> list[dict[str, str]]:
    """Return the displays in a printed text."""
    lines = map(str.strip, strip(printed).splitlines())
    return [ast.literal_eval(line) for line in lines if line.startswith("{")]


def test_plain_lines_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    """A line about waiting ranks is printed once; `show_again` prints the output as in a panel."""
    display = PlainDisplay()
    transcript, outputs = ended_cell(Text("stdout", "a\nb"))
    display.add_note("a note")
    for waits in ("rank 0 waits", "rank 0 waits", ""):
        display.show(transcript, outputs, waits)
        outputs = []
    display.end(transcript, {})
    display.redraw_ended(transcript, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a note"
    assert sorted(lines[1:4]) == ["[0] a", "[0] b", "rank 0 waits"]
    assert lines[4:] == ["2 ranks · 1.0 s · ✓ 2"]
    for kind in (PlainDisplay, PanelDisplay):
        kind().show_again(transcript, {})
    *lines, drawn = capsys.readouterr().out.splitlines()
    assert lines == ["2 ranks · 1.0 s · ✓ 2", "── rank 0 ──", "a", "b", "── rank 1 (no output) ──"]
    assert ast.literal_eval(drawn)["text/plain"].splitlines() == ["2 ranks · ✓ 2", *lines[1:]]


def test_a_traceback_is_coloured_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal shows the colours of a traceback if, and only if, `colours` is set."""
    transcript = Transcript([0])
    for output in (Failure("E", "bad", ("\x1b[31m-----\x1b[39m",), 1), Done("error", 1.0)):
        transcript.receive(0, output, 1.0)
    for colours in (True, False):
        PlainDisplay(colours=colours).end(transcript, {})
        assert ("\x1b[31m-----" in capsys.readouterr().out) == colours


@pytest.mark.parametrize(
    ("seconds", "in_text", "in_html"), [("page", 0, 1), ("all", 1, 1), ("none", 0, 0)]
)
def test_the_setting_seconds_chooses_where_seconds_appear(
    capsys: pytest.CaptureFixture[str], seconds: str, in_text: int, in_html: int
) -> None:
    """Seconds appear on the page, also in the text, or nowhere: then the panel is drawn once."""
    display = PanelDisplay(seconds=seconds)
    transcript, outputs = ended_cell(Text("stdout", "a\n"))
    display.show_status("starting 2 workers")
    time.sleep(FIRST_DRAWING)
    display.show(transcript, outputs)
    display.end(transcript, {})
    *before, last = shown(capsys)
    assert len(before) == (0 if seconds == "none" else 2)
    assert last["text/plain"].count("1.0 s") == in_text
    assert last["text/html"].count("1.0 s") == in_html


def test_warnings_stand_below_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    """A panel has warnings below its head; a terminal prints each warning once, when it comes."""
    transcript = transcript_of([Text("stdout", "done\n")], [Text("stdout", "done\n")])
    plain = PlainDisplay()
    for _ in range(3):
        transcript.warn("watch: rank 1 differs")
        plain.show(transcript, [])
    plain.end(transcript, {})
    assert capsys.readouterr().out.count("watch: rank 1 differs\n") == 1
    plain.show_again(transcript, {})
    assert "\nwatch: rank 1 differs\n── ranks 0-1 (same) ──" in capsys.readouterr().out


def test_a_fast_cell_does_not_flash(capsys: pytest.CaptureFixture[str]) -> None:
    """The output of a fast cell is first drawn at its end, with the notes that stay."""
    display = PanelDisplay()
    transcript, outputs = ended_cell(Text("stdout", "a\n"))
    display.show(transcript, outputs)
    assert shown(capsys) == []
    display.add_note("4 workers on 2 CPU cores", stays=False)
    display.add_note("restarted")
    assert shown(capsys)[-1]["text/plain"].endswith("restarted · 4 workers on 2 CPU cores")
    display.end(transcript, {})
    *_, last = shown(capsys)
    assert last["text/plain"] == (
        "2 ranks · ✓ 2\n── rank 0 ──\na\n── rank 1 (no output) ──\nrestarted"
    )
    assert last["text/html"].startswith("<div")


@pytest.mark.parametrize("kind", [PanelDisplay, PlainDisplay])
def test_a_quiet_display_shows_what_must_be_told(
    capsys: pytest.CaptureFixture[str], kind: type[PanelDisplay | PlainDisplay]
) -> None:
    """A quiet display shows nothing but notes, waiting ranks, warnings, and all of a failure."""
    transcript, outputs = ended_cell(Text("stdout", "a\n"))
    display = kind(("automatic",), is_quiet=True)
    display.show_status("starting 2 workers")
    display.add_note("4 workers on 2 CPU cores", stays=False)
    time.sleep(FIRST_DRAWING)
    display.show(transcript, outputs)
    display.end(transcript, {})
    display.add_late(transcript, outputs)
    display.finish_late()
    display.redraw_ended(transcript, {})
    assert capsys.readouterr().out == ""
    display.show_status("in the background", in_background=True)
    display.show(transcript, outputs, "rank 0 waits")
    display.add_note("restarted")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("in the background", "rank 0 waits", "restarted"))
    transcript.warn("watch: rank 1 differs")
    display.end(transcript, {})
    printed = capsys.readouterr().out
    assert "watch: rank 1 differs" in printed
    assert "rank 0 ──" not in printed
    failed = Transcript([0])
    for output in (Text("stdout", "a\n"), Failure("E", "bad", ("-----",), 1), Done("error", 1.0)):
        failed.receive(0, output, 1.0)
    kind(is_quiet=True).end(failed, {})
    printed = capsys.readouterr().out
    assert "-----" in printed
    assert re.search(r"\ba\b", printed)


def test_a_panel_continues_below_typed_input(capsys: pytest.CaptureFixture[str]) -> None:
    """The panel continues in a new display, and the old display is emptied.

    At the end the output of the cell is cleared if all of it is from the panel.
    """
    for is_alone in (True, False):
        OUTPUTS.number = 0  # as at the start of a magic
        display = PanelDisplay(is_alone=is_alone)
        transcript, _ = ended_cell(Text("stdout", "a\n"))
        display.show_all(transcript, "rank 0 waits for your input", 0)
        display.continue_below_input()
        display.show_all(transcript, "", 0)
        display.end(transcript, {})
        printed = capsys.readouterr().out
        above, below, emptied, last = displayed(printed)
        assert (CLEARED in printed) == is_alone  # clearing would remove output of other code
        assert "rank 0 waits" in above["text/plain"]
        assert "rank 0 waits" not in below["text/plain"]
        assert emptied == {"text/html": EMPTY_HTML, "text/plain": ""}
        assert "\na" in last["text/plain"]


CLEARED = "\x1b[2K"  # printed by `clear_output` without a kernel


@pytest.mark.parametrize("is_page", [True, False])
@pytest.mark.parametrize("other", ["", "display", "cell", "magic"])
def test_last_panel_is_new(capsys: pytest.CaptureFixture[str], other: str, is_page: bool) -> None:  # noqa: FBT001
    """The final panel replaces all output of the cell if all of it is from the panel.

    Otherwise a page redraws the panel in its place, and other clients get a new display.  If
    another cell runs by then, no new display is made.
    """
    running = ["cell 1"]
    transcript, _ = ended_cell(Text("stdout", "a\n"))
    OUTPUTS.number = 0
    display = PanelDisplay(
        is_alone=other != "magic", is_page=is_page, find_request=lambda: running[0], seconds="all"
    )
    display.show_status("starting")
    if other == "display":
        PanelDisplay().show_text("another")
    elif other == "cell":
        running[0] = "cell 2"
    display.end(transcript, {})
    printed = capsys.readouterr().out
    shown = [each["text/plain"].rstrip() for each in displayed(printed) if each["text/plain"]]
    assert [text for text in shown if text != "another"] == ["starting", shown[-1]]
    assert (CLEARED in printed) == (other == "")
    is_new = not other or not (is_page or other == "cell")
    display.close()
    assert not capsys.readouterr().out  # it makes no further display
    assert display._is_redrawn != is_new


@pytest.mark.parametrize(
    ("is_alone", "is_page", "texts"),
    [
        (True, True, ["now 3 workers"]),
        (False, False, ["now 3 workers", ""]),  # and the display above is emptied
        (False, True, []),  # the page has redrawn the display, and keeps it
    ],
)
def test_a_magic_ends_with_a_new_display(
    capsys: pytest.CaptureFixture[str], *, is_alone: bool, is_page: bool, texts: list[str]
) -> None:
    """`close` shows a magic's answer once as a new display, except on a page with other output."""
    OUTPUTS.number = 0
    display = PanelDisplay(is_alone=is_alone, is_page=is_page)
    display.show_status("starting a worker")
    display.answer("now 3 workers")
    assert [each["text/plain"].strip() for each in shown(capsys)][-1] == "now 3 workers"
    display.close()
    assert [each["text/plain"] for each in shown(capsys)] == texts
    display.close()
    assert shown(capsys) == []


def test_a_cell_of_one_magic_is_recognized() -> None:
    """A cell is of one magic if all its output must come from that magic of nbdist."""
    assert all(map(is_of_magic, ("%%distributed\nx", "\n%%rank 0\nx", "%dist_run train.py")))
    assert is_of_magic("%debug")
    assert not is_of_magic("print(1)\n%dist_run train.py")
    assert not is_of_magic("%dist_run a.py\n%dist_run b.py")
    assert not any(map(is_of_magic, ("%run all.ipy", "%%time\n%dist_run a.py", "%%local\nx")))


def test_figures_are_also_displays_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A panel's figure is also a display for programs, which pages hide, below other displays."""
    transcript, outputs = ended_cell(
        Text("stdout", "a\n"),
        Display({"image/png": "aGk=", "text/plain": "<Figure>"}, {}),
        Display({"application/javascript": "alert(1)", "text/plain": "js"}, {}),
    )
    PanelDisplay().end(transcript, {})
    panel, caption, script, figure = shown(capsys)
    assert "aGk=" in panel["text/html"]
    assert caption["text/plain"] == "rank 0"
    assert script["application/javascript"] == "alert(1)"
    assert (figure["image/png"], figure["text/html"]) == ("aGk=", EMPTY_HTML)
    assert figure["text/plain"] == "figure of rank 0, shown above"
    plain = PlainDisplay()
    plain.show(transcript, outputs)
    plain.end(transcript, {})
    assert "figure of rank 0: not saved" in capsys.readouterr().out


def test_a_table_is_the_same_as_text_and_html():
    """A table has a head, headings and rows; its HTML is escaped and has the given colours."""
    rows = [("rank", "state"), ("0", "busy 3 s"), ("11", "<idle>")]
    shown = table("4 workers <here>", rows, {"busy": "#123456"})
    assert shown.text.splitlines() == ["4 workers <here>", *aligned(rows)]
    assert "<b>4 workers &lt;here&gt;</b>" in shown.html
    assert (shown.html.count("<th"), shown.html.count("<td")) == (2, 4)
    assert "&lt;idle&gt;</td>" in shown.html
    assert shown.html.count("color:#123456") == 1
    # On a narrow page a long text is wrapped, such as a line of Python, but not a short text.
    long = table("", [("state", "line"), ("busy 7.5 s", "x" * 40)]).html
    assert 'white-space:nowrap">busy 7.5 s' in long
    assert long.count("nowrap") == 1
    wide = table("", rows, first_width=9)
    assert wide.text.splitlines()[1] == "rank       state"
    assert wide.html.count("min-width:5.6em") == 1


# --- files of figures, and displays below the panel -----------------------------------------


def cell(*data: dict[str, object]) -> Transcript:
    """Return the transcript of a cell in which each rank has made one display."""
    return transcript_of(*([Display(bundle, {})] for bundle in data))


def png(content: bytes) -> dict[str, object]:
    return {"image/png": base64.b64encode(content).decode(), "text/plain": "<Figure>"}


@pytest.fixture
def logs(tmp_path: Path) -> dict[int, str]:
    """The path of each rank's log file; each rank has its own folder, as in a real run."""
    for rank in range(3):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
    return {rank: str(tmp_path / "attempt_0" / str(rank) / "stdout.log") for rank in range(3)}


def test_equal_figures_share_a_file(logs: dict[int, str], tmp_path: Path):
    """A figure's file is private, is written once, and lies in the log folder of its run."""
    transcript = cell(png(b"one"), png(b"one"), png(b"two"))
    first, second = save_figures(transcript, logs)
    assert [*save_figures(transcript, logs)] == [first, second]
    caption, _, path = first.partition(": ")
    assert (caption, Path(path).read_bytes()) == ("figure of ranks 0-1", b"one")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert ATTEMPT_FOLDER.fullmatch(Path(path).relative_to(tmp_path).parts[0])
    assert second.startswith(f"figure of rank 2: {tmp_path}/attempt_0/2/figure-")
    assert len([*tmp_path.rglob("*.png")]) == 2


def test_figures_are_saved_beside_the_logs(
    logs: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All kinds of images are saved, broken ones are left out; a line says why none was saved."""
    bad: dict[str, object] = {"image/png": "x", "text/plain": "<Figure>"}
    (svg,) = save_figures(cell({"image/svg+xml": "<svg/>"}, {"text/html": "<b>"}, bad), logs)
    assert Path(svg.partition(": ")[2]).read_text() == "<svg/>"
    for mime in (each for each in MIMES if each.is_base64):
        (line,) = save_figures(cell({mime.kind: "aGk="}), logs)
        path = Path(line.partition(": ")[2])
        assert (path.suffix, path.read_bytes()) == (f".{mime.suffix}", b"hi")
    (line,) = save_figures(cell(png(b"one")), {})
    assert line == "figure of rank 0: not saved: there is no log folder (NBDIST_LOG_DIR)"
    missing = str(Path(logs[0]).parent / "gone" / "stdout.log")
    (line,) = save_figures(cell(png(b"one")), {0: missing})
    assert line.endswith("/gone: No such file or directory")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NBDIST_LOG_DIR", "~/mine")
    (line,) = save_figures(cell(png(b"one")), {0: "node1:/logs/0/stdout.log"})
    path = Path(line.removeprefix("figure of rank 0: "))
    assert path.parent == tmp_path / "mine" / "figures"
    assert path.read_bytes() == b"one"
    monkeypatch.setenv("NBDIST_LOG_DIR", "")
    (line,) = save_figures(cell(png(b"one")), {0: "node1:/logs/0/stdout.log"})
    assert line == "figure of rank 0: not saved: there is no log folder (NBDIST_LOG_DIR)"


def markdown(text: str, display_id: str | None = None) -> Display:
    data = {"text/markdown": text, "text/plain": "<IPython.core.display.Markdown object>"}
    return Display(data, {}, display_id)


def transcript_of(*outputs: list[Display]) -> Transcript:
    """Return the transcript of a cell in which each rank has made these outputs."""
    transcript = Transcript(range(len(outputs)))
    for rank, displays in enumerate(outputs):
        for each in displays:
            transcript.receive(rank, each, 0.0)
        transcript.receive(rank, Done("ok", 1.0), 1.0)
    return transcript


def texts(transcript: Transcript) -> list[str]:
    """Return what is below the panel: the captions, and the Markdown texts in stars."""
    bundles = [shown.data for shown in below_panel(transcript)]
    return [
        f"*{data['text/markdown']}*" if "text/markdown" in data else data["text/plain"]
        for data in bundles
    ]


def test_equal_displays_of_ranks_share_a_caption() -> None:
    """Equal displays are shown once, in order; a caption says how many are left out, if any."""
    a, b, c = map(markdown, "abc")
    assert texts(transcript_of([a, b], [a, b])) == ["ranks 0-1", "*a*", "*b*"]
    assert texts(transcript_of([a, a], [a], [c, a])) == [
        "ranks 0-2", "*a*", "rank 0", "*a*", "rank 2", "*c*"
    ]  # fmt: skip
    many = [markdown(str(n)) for n in range(MAX_DISPLAYS_BELOW + 4)]
    shown = texts(transcript_of([markdown("first")], many))
    assert len([text for text in shown if text.startswith("*")]) == MAX_DISPLAYS_BELOW
    assert shown[-1] == "… 5 more displays of rank 1: `%dist_output -r 1` shows them"
    assert len(below_panel(transcript_of([], many), [1])) == 37
    # If a cell has a single rank, no caption names the rank, because the panel's head does.
    assert texts(transcript_of([a, b])) == ["*a*", "*b*"]


def test_displays_below_the_panel_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An updated display changes in its place; a display that is not needed any more is empty."""
    page: dict[str, dict[str, Any]] = {}

    def draw(data: dict[str, Any], *, metadata: object, display_id: str, raw: bool) -> None:
        page[display_id] = data

    for name in ("display", "update_display"):
        monkeypatch.setattr(f"nbdist.notebook.rich_output.{name}", draw)
    transcript = transcript_of([markdown("one", "a")], [markdown("1", "a")])
    below = Below()
    below.add(transcript)
    assert len(page) == 4
    for rank in range(2):
        transcript.receive(rank, DisplayUpdate(markdown("two").data, {}, "a"), 2.0)
    below.change(transcript)
    plain = [data["text/plain"] for data in page.values()]
    assert plain == ["ranks 0-1", "two", "", ""]

"""The README and the manual: every block of code runs, and shows the output in its page.

Each page has its own notebook: `python` blocks are its cells, and `sh` blocks run in bash.  A
`text` block below is the expected output: a line `...` stands for lines, and `...` in a line for
its rest; a number before a unit, or of four digits or more, stands for any number, and so does a
time in s or ms.  If the last line of the text names an error, the code must fail.  `MARKS` has the
comments that can be above a block.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path

import pytest
import yaml

from nbdist.cluster.ticket import join_key_file, place_from
from tests.notebook.front_end import Notebook
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md"]
PAGES += sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))
HOW_TO = sorted(f"docs/howto/{page.name}" for page in ROOT.glob("docs/howto/*.md"))
PAGES += HOW_TO

NOT_RUN = {
    **{"docs/machines.md": 2, "docs/output.md": 1},
    **{"docs/howto/gpus.md": 2, "docs/howto/kaggle-colab.md": 1, "docs/howto/vscode.md": 2},
    ".github/CONTRIBUTING.md": 1,
    **{"docs/howto/slurm.md": 3, "docs/howto/environments.md": 2, "docs/howto/uninstall.md": 2},
    **{"docs/howto/assistants.md": 1, "docs/howto/platforms.md": 1},
}
"""The number of blocks that no test runs, by page; the comment above each block says why."""

NEEDS = {
    "docs/howto/huggingface.md": ("accelerate", "transformers"),
    "docs/howto/lightning.md": ("lightning",),
    "docs/howto/papermill.md": ("papermill", "nbconvert"),
    "docs/howto/peft-trl.md": ("peft", "trl"),
    "docs/howto/tracking.md": ("mlflow", "tensorboard", "wandb"),
}
"""The packages that a page's code uses; if one of them is missing, the page's test is skipped."""

MARKS = {
    "not run": "the block needs what tests do not have",
    "quickstart": "`.ci/run` runs the block",
    "tests": "`.ci/run` runs the block",
    "drawing": "no code shows the text",
    "new kernel": "a new notebook begins with the block, and the former one has ended",
}

DETACHING = ("docs/failures.md", "docs/howto/uninstall.md", "docs/howto/vscode.md")
MARK = dict.fromkeys(PAGES, pytest.mark.kernel) | dict.fromkeys(DETACHING, pytest.mark.own_agent)
"""The marker of each page: workers that outlive a notebook need a kernel that is not shared."""

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[\w ]+)(?:: [^>]+)? -->\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$"
    r"(?:\n\n?```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
LOOSE = re.compile(
    r"((?<=\n)\.{3}\n|\.{3}|\d+(?:\.\d+)? m?s(?!\w)|\d+(?:\.\d+)?(?= ?%| [kMG]i?B(?!\w))"
    r"|(?<![\d.])\d{4,}(?![\d.]))"
)
"""Matches the parts of an expected text that stand for any text, or for any number."""

DATA = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: [*yaml.safe_load_all(text)]}
"""Functions that read blocks which are data and not code, by the language of the block."""

FAILS = re.compile(r"^\w*(?:Error|Released|Died|NotSent): .*\n\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    mark: str | None
    kind: str
    code: str
    shown: str | None


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(**block.groupdict()) for block in BLOCK.finditer(text)]


def to_run(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.mark not in MARKS.keys() - {"new kernel"}]


def plain(text: str) -> str:
    """Replace spaces that align columns by single ones, and sort successive lines by rank."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    # Lines come as the ranks run, so a page cannot say in which order.
    runs = groupby(lines, lambda line: re.match(r"\[\d+\] ", line) is not None)
    ordered = (sorted(run) if of_ranks else run for of_ranks, run in runs)
    return "\n".join(["", *chain.from_iterable(ordered), ""])


def loosely(piece: str) -> str:
    """Return a pattern of all texts for which a match of `LOOSE` stands."""
    number = r"\d+(?:\.\d+)?"
    is_time = piece.endswith("s")
    return {"...\n": r"(?:.*\n)*?", "...": ".*"}.get(piece, number + " m?s" * is_time)


def shows(output: str, expected: str) -> bool:
    """Return True if an output has the lines that the page expects."""
    pieces = enumerate(LOOSE.split(plain(expected)))
    pattern = "".join(loosely(piece) if n % 2 else re.escape(piece) for n, piece in pieces)
    return re.search(pattern, plain(output)) is not None


def test_outputs_are_compared_by_line() -> None:
    """Outputs must agree line by line, except for `...`, for figures and for the order of ranks."""
    for output, expected, agrees in (
        ("a\nrank 0  12\nb", "rank 0 12", True),
        ("rank 0 12, more", "rank 0 12", False),
        ("rank 0 12, more", "rank 0 12...", True),
        ("a\nb\nc\nd", "a\n...\nd", True),
        ("a\nb\nc\nd", "a\nd", False),
        ("a\n[1] x\n[0] x\nb", "a\n[0] x\n[1] x\nb", True),
        ("a\n[1] x\nb\n[0] x", "a\n[0] x\nb\n[1] x", False),
        ("pid 7995, 0.31 s, 98.2 MiB", "pid 12345, 2 s, 136 MiB", True),
        ("pid 7995, line 3", "pid 12345, line 4", False),
        ("572 ms (90%)", "1.1 s (8%)", True),
        ("572 ms", "572 MiB", False),
    ):
        assert shows(output, expected) == agrees


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARK[page]) for page in PAGES if to_run(page)]
)
def test_blocks_of_a_page_show_their_output(page: str, tmp_path: Path) -> None:
    """A page's blocks run in order, show the page's output, and fail if the page shows an error."""
    for name in NEEDS.get(page, ()):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    with closing(run(page, tmp_path)) as outcomes:
        for block, output, failed in outcomes:
            assert failed == bool(FAILS.search(block.shown or "")), f"{block.code}\n{output}"
            assert block.shown is None or shows(output, block.shown), f"{block.code}\n{output}"


def run(page: str, folder: Path) -> Generator[tuple[Block, str, bool]]:
    """Run the blocks of a page; yield each block with its output, and whether the block failed."""
    notebook: Notebook | None = None
    before = 0  # the process id of the former notebook
    with ExitStack() as opened:
        for block in to_run(page):
            if block.kind == "sh":
                yield block, *in_bash(block.code, folder)
                continue
            if block.kind in DATA:
                DATA[block.kind](block.code)
                continue
            assert block.kind == "python", block
            if notebook is None or block.mark == "new kernel":
                before = notebook.process.pid if notebook else 0
                opened.close()
                begins = bool(re.search("%load_ext|from nbdist import", block.code))
                first = [f"%cd -q {folder}", *["%load_ext nbdist"] * (not begins)]
                environ = {"NBDIST_LOG_DIR": f"{folder}/logs"}
                notebook = Notebook(*first, env=environ, may_have_torch=True)
                opened.enter_context(closing(notebook))
            outcome = notebook.run(block.code)
            # `%dist_attach` needs a name if tests in other processes have detached worlds too.
            if others := re.search(rf"there are .*`(\S+-{before})`.* takes one", outcome.seen):
                outcome = notebook.run(f"%dist_attach {others[1]}")
            yield block, outcome.seen, bool(outcome.errors)


def in_bash(code: str, folder: Path) -> tuple[str, bool]:
    """Run code in bash, with `nbdist` as a command; return the output and whether it failed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", code],
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SOON,
    )
    return done.stdout, done.returncode != 0


def test_no_block_of_code_is_left_out() -> None:
    """All code is in fences with a language, and only blocks that `NOT_RUN` counts do not run."""
    not_run = Counter(page for page in PAGES for each in blocks(page) if each.mark == "not run")
    assert not_run == NOT_RUN
    for page in PAGES:
        text = (ROOT / page).read_text()
        page_blocks = blocks(page)
        assert {each.mark for each in page_blocks if each.mark} <= MARKS.keys(), page
        assert all(each.mark == "drawing" for each in page_blocks if each.kind == "text"), page
        fences = 2 * sum(1 + (each.shown is not None) for each in page_blocks)
        others = 2 * len(re.findall(r"^```\{", text, re.MULTILINE))
        assert len(re.findall("^```", text, re.MULTILINE)) == fences + others, page
        assert not re.search(r"\n\n(?: {4}|\t)", BLOCK.sub("", text)), page


def test_how_to_pages_are_short() -> None:
    """A how-to page has at most 300 words, without its blocks of code."""
    lengths = {page: len(BLOCK.sub("", (ROOT / page).read_text()).split()) for page in HOW_TO}
    assert {page: length for page, length in lengths.items() if length > 300} == {}


def test_the_page_of_limits_is_short() -> None:
    """The page of limits has at most 400 words: only what users must know."""
    assert len((ROOT / "docs" / "limits.md").read_text().split()) <= 400


LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")


def test_links_lead_to_files_and_headings() -> None:
    """The files and headings to which the pages link exist."""
    for page in PAGES:
        text = BLOCK.sub("", (ROOT / page).read_text())
        for file, anchor in LINK.findall(text):
            target = (ROOT / page).parent / file if file else ROOT / page
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if anchor else ()
            names = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert target.exists(), f"{page}: {file}"
            assert not anchor or anchor in names, f"{page}: {file}#{anchor}"


@pytest.mark.unit
def test_the_manuals_job_for_kubernetes_is_valid() -> None:
    """The manual's Job follows the schemas of Kubernetes, and its pods get the Secret's key."""
    checker = pytest.importorskip("kubernetes_validate", reason="it has the schemas")
    (source,) = (each.code for each in blocks("docs/machines.md") if each.kind == "yaml")
    service, job = DATA["yaml"](source)
    for document in (service, job):
        checker.validate(document, checker.latest_version(), strict=True)
    pods = job["spec"]["template"]
    pod, (container,) = pods["spec"], pods["spec"]["containers"]
    secret, memory, _ = pod["volumes"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert pods["metadata"]["labels"] == service["spec"]["selector"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2  # as in `-j 2x4`
    assert mounts[memory["name"]] == "/dev/shm"
    assert secret["secret"] == {"secretName": "nbdist-key", "defaultMode": 0o440}
    place, key = "10.0.0.1:45123", f"{mounts[secret['name']]}/key"
    assert container["command"] == ["nbdist", "join", place, "--key-file", key]
    (commands,) = (each.code for each in blocks("docs/machines.md") if "kubectl" in each.code)
    file = f"joins/{join_key_file(place_from(place)).name}"
    made = r'kubectl create secret generic nbdist-key --from-file=key="\$HOME/.local/state/nbdist/'
    assert re.search(f'{made}{re.escape(file)}"\n', commands)
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(checker.ValidationError):
        checker.validate(job, checker.latest_version(), strict=True)


@pytest.mark.own_agent
def test_every_kernel_loads_nbdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manual's line of IPython's configuration loads nbdist in kernels, also after a restart.

    The line loads nbdist in a terminal too.
    """
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("NBDIST_PRESTART", "0")
    page_blocks = blocks("docs/output.md")
    (commands,) = (each.code for each in page_blocks if "ipython profile" in each.code)
    shown, failed = in_bash(commands, tmp_path)
    assert not failed, shown
    with closing(Notebook()) as notebook:
        assert "── ranks 0-1" in notebook.run("%%distributed -n 2\nworld_size").text
        notebook.manager.restart_kernel(now=True)
        notebook.client.wait_for_ready(timeout=SOON)
        place = "split the cell at line 2."
        assert notebook.run("x = 1\n%%distributed\nx").error.endswith(place)
        assert notebook.run("%dist_status").text.startswith("no workers are running")
    shown, failed = in_bash("ipython --no-banner -c '%dist_status'", tmp_path)
    assert (shown.startswith("no workers are running"), failed) == (True, False), shown

"""Tests of `nbdist tutorial`: the copy of the quickstart, and JupyterLab, which opens the copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.terminal.tutorial import TUTORIAL_COPY, copy_quickstart
from tests.notebooks.test_notebooks import QUICKSTART
from tests.waiting import SOON, wait_until

FOLDERS = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")


@pytest.mark.own_agent
def test_jupyterlab_opens_the_copy(tmp_path: Path) -> None:
    """JupyterLab has the options of the line, and opens a page with the copy in the browser."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f"#!/bin/sh\ncp ${{1#file://}} {opened}.part\nmv {opened}.part {opened}\n")
    browser.chmod(0o700)
    environ = os.environ | {each: str(tmp_path / each) for each in FOLDERS}
    environ |= {"BROWSER": f"{browser} %s"}
    options = ("--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0")
    server = subprocess.Popen(
        [sys.executable, "-m", "nbdist.terminal", "tutorial", *options],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    about = tmp_path / "JUPYTER_RUNTIME_DIR" / f"jpserver-{server.pid}.json"
    try:
        wait_until(lambda: server.poll() is not None or opened.exists(), "a page is opened")
        found = json.loads(about.read_text())
        assert (
            f"{found['url']}lab/tree/{TUTORIAL_COPY}?token={found['token']}" in opened.read_text()
        )
        place = f"{found['url']}files/{TUTORIAL_COPY}?token={found['token']}"
        with urllib.request.urlopen(place, timeout=SOON) as answer:
            assert answer.read() == QUICKSTART.read_bytes()
    finally:
        server.terminate()
        said, _ = server.communicate(timeout=SOON)
    assert said.startswith(f"The quickstart was copied to {tmp_path / TUTORIAL_COPY}.\n")


def test_a_file_of_the_user_is_not_overwritten(tmp_path: Path) -> None:
    """A file of the copy's name keeps its content, and a line says that it is there."""
    copy = tmp_path / TUTORIAL_COPY
    copy.write_text("changed by the user")
    assert copy_quickstart(tmp_path) == f"{copy} is there already and was not changed."
    assert copy.read_text() == "changed by the user"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder of the copy's name, a link to nothing and a missing folder are errors of a line."""
    (tmp_path / TUTORIAL_COPY).mkdir()
    with pytest.raises(UsageError, match="is no file: run `nbdist tutorial` in another folder"):
        copy_quickstart(tmp_path)
    links = tmp_path / "links"
    links.mkdir()
    (links / TUTORIAL_COPY).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is no file"):
        copy_quickstart(links)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        copy_quickstart(tmp_path / "missing")

"""Tests of `nbdist mcp` with real clients and a real notebook: answers, refusals, secrets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nbdist.errors import UsageError
from nbdist.notebook import mcp_calls
from nbdist.system.secrets import secret_values
from nbdist.terminal import kernel, mcp
from nbdist.terminal.__main__ import main
from nbdist.terminal.worlds import stacks_text
from nbdist.wire.places import RankPosition, Stack, StackFrame
from tests.notebook.front_end import Notebook, lasting
from tests.waiting import SOON, wait_until

WORLD = f"asked-{os.getpid()}"
SERVER = [sys.executable, "-m", "nbdist.terminal", "mcp"]
MODEL = "%%distributed\nmodel = torch.nn.Linear(4, 4)\nmodel.weight.data.fill_(rank)"

notebook = lasting(
    "%load_ext nbdist",
    f"%dist_init -n 2 --name {WORLD} --env POOL_PASSWD=by-the-option",
    MODEL,
    NBDIST_SNAPSHOT_DIR="{folder}",
    NBDIST_LOG_DIR="{folder}",
)


def test_secrets_are_hidden() -> None:
    """Known secrets, tokens of known services, and values assigned to secret names are hidden."""
    token = f"hf_{'a1' * 12}"
    texts = f"{token} WANDB_API_KEY=abcdef123 'password': 'hunter22' s3cr3t-of-mine keys=3"
    shown = mcp.masked(texts, {"s3cr3t-of-mine"})
    hidden = mcp.HIDDEN
    code = "max_tokens=4096, tokenizer=AutoTokenizer, author: somebody, pad_token='<eos>'"
    assert mcp.masked(code, {"s3cr3t-of-mine"}) == code
    assert shown == f"{hidden} WANDB_API_KEY={hidden} 'password': '{hidden}' {hidden} keys=3"
    assert mcp.masked("environ['A_TOKEN'] = 'abcdef'", ()) == f"environ['A_TOKEN'] = '{hidden}'"


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("one-two\nthree-four", "three-four one-two", "H H"),
        ('it\'s "so" secret', repr('it\'s "so" secret'), "'H'"),
        ("abcdefghijkl", "abcdefghi… abcdefg... abcdef\nabcdefgh", "H… H... H\nH"),
        ("abcdefghijkl", "abcde abcdefx abcdefghijkl", "abcde abcdefx H"),
    ],
)
def test_parts_of_secrets_are_hidden(secret: str, text: str, shown: str) -> None:
    """Each line of a secret, its quoted text, and the beginning of a cut secret are hidden."""
    assert mcp.masked(text, {secret}) == shown.replace("H", mcp.HIDDEN)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("MY_SIGNING_KEY", "hf_token", "Db_Password", "KEY", "PASS_1")),
        *((name, True) for name in ("APIKEY", "GOOGLE_CREDENTIALS", "DB_PASS", "X_PWD")),
        *((name, False) for name in ("KEYBOARD", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM")),
        *((name, False) for name in ("MONKEY", "XAUTHORITY", "BYPASSED", "PATH")),
    ],
)
def test_names_of_variables_show_which_are_secret(name: str, *, is_secret: bool) -> None:
    """The words in a variable's name, in upper or lower case, decide if its value is secret."""
    assert secret_values({name: "abcdef"}) == ({"abcdef"} if is_secret else set())


@pytest.mark.world
def test_secrets_of_other_processes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secret variables of this and other processes are known, except those with short values."""
    monkeypatch.setenv("MY_SECRET_TOKEN", "x-y-z-1234")
    assert "x-y-z-1234" in mcp.secrets_of([])
    environ = {
        **os.environ,
        "AWS_SECRET_ACCESS_KEY": "of-another",
        "API_KEY": "abc",
        "N": "eight888",
    }
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        # The kernel does not show the environment of a process that has just begun.
        wait_until(lambda: "of-another" in mcp.secrets_of([process.pid]))
        found = mcp.secrets_of([process.pid, 2**22 + 1])
        process.kill()
    assert not {"abc", "eight888"} & found


def test_long_answers_are_cut() -> None:
    """A long answer names the number of lines left out, and has no control characters."""
    lines = "\n".join(map(str, range(9999)))
    for keep_end in (False, True):
        shown = mcp.bounded(lines, keep_end=keep_end)
        assert len(shown) < mcp.MAX_ANSWER_LENGTH + 100
        said = shown.splitlines()[0 if keep_end else -1]
        assert re.fullmatch(r"\(\d+ lines left out: ask for fewer ranks or lines\)", said)
    assert mcp.bounded("a\x07b\u202ec") == "a b c"
    assert mcp.bounded("x" * 500).endswith("… (line cut)")


def test_equal_stacks_are_shown_once() -> None:
    """Equal stacks are shown once, with the pids of all ranks."""
    frames = (StackFrame("Cell In[5]", 3, "<module>", "f()"),)
    stacks = [Stack(rank, 100 + rank, "busy", RankPosition(line=3), frames) for rank in range(3)]
    shown = stacks_text(stacks)
    first = "── ranks 0-2 (pid 100, 101, 102) same · in line 3: f() ──"
    assert shown.splitlines()[0] == first
    assert shown.count("Cell In[5], line 3") == 1


@pytest.mark.parametrize(
    "names",
    [
        "",
        "f()",
        "a; b",
        "x=1",
        "--pool other",
        "a.b",
        "m[0]",
        "if",
        "`id`",
        "{}",
        "x " * 21,
        "x" * 1001,
    ],
)
def test_only_names_are_compared(names: str) -> None:
    """`diff` refuses everything except names of variables: an expression could run any code."""
    with pytest.raises(UsageError, match=r"^names"):
        mcp.diff(names)


@pytest.mark.parametrize(
    "code",
    [
        *("x = 1\n%dist_gather x", "x = 1\ny = %dist_gather x", "%dist_shutdown", "!ls", "x?"),
        *(
            "%%time\nx = 1",
            "x = !ls",
            "if x:\n    %cd /",
            "get_ipython().run_line_magic('cd', '/')",
        ),
        *("import IPython\nIPython.get_ipython().system('ls')", "x = 1 \\\n%dist_shutdown"),
        *("x = 1\n'''\n%dist_shutdown\n# '''", "x = (", "x = '\0'", "for"),
    ],
)
def test_only_plain_python_is_run(code: str) -> None:
    """Code with magics, shell commands or syntax errors is refused, and nothing is run."""
    with pytest.raises(UsageError, match=r"^code: .*nothing was run$"):
        mcp.check_is_plain(code)


def test_without_the_sdk_a_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the SDK `nbdist mcp` ends with a line that says how to install the SDK."""
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2
    assert capsys.readouterr().err == f"nbdist: {mcp.NO_MCP_SDK}\n"


def test_a_process_that_is_no_kernel_is_refused() -> None:
    """A process that is no kernel, or does not exist, is refused."""
    for pid in (1, 2**22 + 1):
        with pytest.raises(UsageError, match="no Jupyter kernel"):
            kernel.connection_file(pid)


# --- a client that breaks the rules -------------------------------------------------------------


class Raw:
    """A server to which a test sends lines."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.number = 0

    def send(self, *lines: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(line + b"\n" for line in lines))
        self.process.stdin.flush()

    def call(self, method: str, **params: Any) -> int:
        self.number += 1
        said = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        self.send(json.dumps(said).encode())
        return self.number

    def answers(self, count: int) -> dict[int, dict[str, Any]]:
        """Return the next answers to calls, by number; other messages are skipped."""
        assert self.process.stdout is not None
        found: dict[int, dict[str, Any]] = {}
        while len(found) < count:
            said = json.loads(self.process.stdout.readline())
            if isinstance(said.get("id"), int):
                found[said["id"]] = said
        return found


@pytest.fixture
def raw() -> Iterator[Raw]:
    pytest.importorskip("mcp")
    made = Raw()
    with made.process:
        yield made
        made.process.kill()


def test_the_server_survives_garbage_and_floods(notebook: Notebook, raw: Raw) -> None:
    """The server skips garbage, answers floods, lacks forbidden tools, and ends with its stdin."""
    raw.send(b"garbage", b"\xff\xfe\x00", b"[]", b'{"jsonrpc": "2.0"}', b"{" * 100_000, b"")
    about = {"name": "flood", "version": "1"}
    raw.call("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=about)
    raw.answers(1)
    raw.send(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    ends = psutil.Process(raw.process.pid).net_connections("inet")
    assert ends == []  # nothing listens
    listed = raw.call("tools/list")
    tools = {each["name"] for each in raw.answers(1)[listed]["result"]["tools"]}
    assert tools == {tool.__name__ for tool in mcp.LOOKING}
    for name in (tool.__name__ for tool in mcp.ACTING):
        refused = raw.call("tools/call", name=name, arguments={"code": "x = 1", "rank": 0})
        assert "result" not in (said := raw.answers(1)[refused]) or said["result"]["isError"]
    flood = [raw.call("tools/call", name="worlds", arguments={}) for _ in range(50)]
    found = raw.answers(len(flood))
    assert all(WORLD in found[each]["result"]["content"][0]["text"] for each in flood)
    wrong = raw.call("tools/call", name="status", arguments={"world": "of-another-user"})
    said = raw.answers(1)[wrong]["result"]["content"][0]["text"]
    assert "`world of-another-user`: none of your worlds on this machine has this name" in said
    raw.process.communicate(timeout=SOON)
    assert raw.process.returncode == 0


# --- an assistant that helps ----------------------------------------------------------------------


class Assistant:
    """A client of the official SDK, on a loop in a thread."""

    def __init__(self, portal: Any, client: Any) -> None:
        self._portal, self._client = portal, client

    def ask(self, tool: str, **arguments: Any) -> str:
        """Return the text of an answer, also of a refusal."""
        given = {"world": WORLD, **arguments}
        answer = self._portal.call(self._client.call_tool, tool, given)
        return "\n".join(each.text for each in answer.content)


@pytest.fixture(scope="module")
def assistant() -> Iterator[Assistant]:
    sdk = pytest.importorskip("mcp")
    from anyio.from_thread import start_blocking_portal

    command = sdk.StdioServerParameters(
        command=SERVER[0], args=[*SERVER[1:], "--allow-run"], env={**os.environ}
    )
    client = sdk.Client(command)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client) as connected:
        yield Assistant(portal, connected)


def test_why_shows_which_rank_failed_first(notebook: Notebook, assistant: Assistant) -> None:
    """`why` shows which rank failed first, its traceback, and how the other ranks ended."""
    source = "if rank == 1: raise ValueError('bad shard')\ndist.barrier()"
    notebook.run(f"%%distributed\n{source}")
    said = assistant.ask("why")
    assert "first failure: rank 1: ValueError: bad shard" in said
    assert "----> 2 if rank == 1: raise" in said
    assert "rank 0: Released: waited" in said
    notebook.run("%%distributed\nprint('TOKEN=hf_abcdefghijklmnop', rank)")
    assert "did not fail; the last failure was before it:" in assistant.ask("why")
    shown = assistant.ask("output", cell=-1)
    assert f"TOKEN={mcp.HIDDEN}" in shown
    assert "hf_abc" not in shown
    assert "the output of" in assistant.ask("output", cell=-99)


def test_secrets_that_were_set_later_are_hidden(notebook: Notebook, assistant: Assistant) -> None:
    """Secrets that the notebook, `%env`, `--env` or a rank has set since its start are hidden."""
    notebook.run("import os\nos.environ['MY_SIGNING_KEY'] = 'of-the-notebook'")
    notebook.run("%env DB_PASSWORD=by-a-magic")
    notebook.run("%%distributed\nimport os\nos.environ['A_TOKEN'] = 'of-the-ranks'")
    names = "('MY_SIGNING_KEY', 'DB_PASSWORD', 'A_TOKEN', 'POOL_PASSWD')"
    failing = f"found = ' '.join(os.environ[each] for each in {names})\nprint(found, flush=True)"
    notebook.run(f"%%distributed\n{failing}\nraise ValueError(found)")
    answers = [assistant.ask(tool) for tool in ("status", "why", "memory", "worlds")]
    answers += [
        assistant.ask("output"),
        assistant.ask("output", cell=-1),
        assistant.ask("diff", names="found"),
    ]
    shown = "\n".join(answers)
    assert not re.search("of-the|by-a-magic|by-the-option", shown)
    assert all(mcp.HIDDEN in answers[at] for at in (0, 1, 4, 5))
    notebook.run("%%distributed\ndel os.environ['A_TOKEN']")


def test_an_assistant_can_ask_about_the_ranks(notebook: Notebook, assistant: Assistant) -> None:
    """An assistant can ask for differences, times, memory and metrics, without a new cell."""
    said = assistant.ask("diff", names="model")
    assert re.search(r"^weight .* rank 1 differs by at most 1\b", said, re.MULTILINE)
    assert "2 ranks ·" in assistant.ask("timeline")
    assert "model.weight" in assistant.ask("memory")
    notebook.run("%%distributed\nfor step in range(9): track(loss=step)")
    assert "loss 8 · step 8 · 2 ranks equal" in assistant.ask("metrics")
    assert "2 workers · gloo" in assistant.ask("status")
    count = notebook.value("get_ipython().execution_count")
    assistant.ask("diff", names="model")
    assert notebook.value("get_ipython().execution_count") == count + 1


def test_output_is_searched_for_plain_texts(notebook: Notebook, assistant: Assistant) -> None:
    """Output is searched for plain texts, so that no search is as slow as a regular expression."""
    lines = "a" * 300, "b (a+)+$", "c" * 3
    notebook.run(f"%%distributed\nfor line in {lines}: print(line)")
    for text, found in (("(a+)+$", lines[1:2]), ("ccc|(a+)+$|", lines[1:]), ("a", lines[:2])):
        shown = assistant.ask("output", ranks="0", lines=len(found), grep=text).splitlines()
        assert shown == ["── rank 0 ──", *found]
    assert "no lines with this text" in assistant.ask("output", grep="c+$")
    assert "at most 200 characters" in assistant.ask("output", grep="c" * 201)


def test_an_assistant_can_stop_a_cell_that_hangs(notebook: Notebook, assistant: Assistant) -> None:
    """`why` shows which ranks wait in a running cell; the notebook shows who has stopped it."""
    source = "%%distributed\nimport time\nif rank: time.sleep(600)\ndist.barrier()"
    request = notebook.client.execute(source, stop_on_error=False)
    wait_until(
        lambda: "rank 0 waits in barrier, line 4 · rank 1 is in line 3" in assistant.ask("why")
    )
    assert "time.sleep(600)" in assistant.ask("stacks", ranks="1")
    assert "a cell runs" in assistant.ask("memory")
    assert assistant.ask("interrupt") == "stopped"
    assert notebook.reply_to(request)["status"] == "error"
    notebook.next_shown("mcp 0.1.0 stopped this cell by `nbdist mcp`")


def test_code_that_nobody_would_see_is_not_run(notebook: Notebook, assistant: Assistant) -> None:
    """Code is not run in a world without a distributed cell under which it would be shown."""
    assert notebook.run(f"%dist_init -n 1 --pool other --name {WORLD}-2").errors == []
    assert "model" in (said := assistant.ask("diff", names="model", world=f"{WORLD}-2"))
    assert "differ" not in said  # the workers have no model
    said = assistant.ask("run", code="x = 1", world=f"{WORLD}-2")
    assert said == f"UsageError: {mcp_calls.UNSEEN}: nothing was run"
    notebook.run("%dist_shutdown --pool other")


@pytest.mark.shared_world  # a rank is another process afterwards
def test_code_of_an_assistant_is_shown(notebook: Notebook, assistant: Assistant) -> None:
    """Code of an assistant is shown under the user's last cell, with its output and its author."""
    notebook.run("%%distributed\nbefore = 1")
    assert "1 to 50,000 characters" in assistant.ask("run", code=" ")
    assert "nothing was run" in assistant.ask("run", code="found = 3\n%dist_gather found")
    assert notebook.value("'found' in globals()") is False
    mcp.check_is_plain("text = '''\n%time is %d''' % 3\nawait f(text) if text else get(text)")
    said = assistant.ask("run", code="found = rank + 40\nfound")
    assert "41" in said
    shown = notebook.next_shown("ran this by `nbdist mcp`", "found = rank + 40")
    assert "%%distributed" in shown["data"]["text/plain"]
    assert "41" in notebook.run("%%distributed\nfound").text
    assert "ZeroDivisionError" in assistant.ask("run", code="1 / 0")
    assert "rank 1" in assistant.ask("restart", rank=1)
    assert "saved before of 2 ranks" in assistant.ask("snapshot", names="before")

"""Gives each test a tier, chooses the tiers that run, and assigns modules to processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # a machine with a GPU may have no xdist
    LoadScopeScheduling = None

TESTS = Path(__file__).parent

# Modules that begin first: several processes run a module each, and no long one must be last.
LONGEST = (
    "hosts/test_ray.py",
    "hosts/test_membership.py",
    "hosts/test_slurm.py",
    "faults/test_nothing_left.py",
    "notebooks/test_notebooks.py",
    "notebook/test_pages.py",
    "faults/test_freeing.py",
    "browser/test_looks.py",
    "browser/test_cells.py",
    "world/test_lifecycle.py",
    "test_api.py",
    "world/test_world.py",
    "notebook/test_magics.py",
    "agent/test_inspect.py",
    "libraries/test_libraries.py",
    "agent/test_agent.py",
    "gpu/test_command.py",
    "agent/test_processes.py",
    "worker/group/test_gloo.py",
)


# Folders whose modules share servers, so that a single process runs them all.
ONE_PROCESS = ("tests/browser/",)

# The tier of a test says what the test needs and costs; each test is marked with its tier.
TIERS = {
    "unit": "starts no process",
    "world": "has workers of the agent that all tests of the process share, or a short process",
    "kernel": "has a notebook kernel",
    "slow": "has agents of its own: starts, deaths, what is left behind",
    "hosts": "needs machines: network namespaces with sshd, Slurm, etcd, Ray",
    "browser": "opens JupyterLab in headless Chromium",
    "gpu": "needs a GPU",
    "matrix": "runs with other versions of what nbdist stands on",
}
OF_FOLDER = {
    **{name: name for name in ("hosts", "browser", "gpu", "matrix")},
    **dict.fromkeys(("attacks", "bench", "faults", "libraries", "notebooks", "package"), "slow"),
}
OF_FIXTURE = {"Notebook": "kernel", "World": "world", "NewWorld": "world"}  # by type of result
MARKERS = {
    **TIERS,
    "own_agent": "starts agents of its own, so that it is `slow`",
    "smoke": "is run also without `--all`, whatever it costs",
    "shared_world(ranks)": "the `world` of a module's tests, after which leaks are counted",
}
QUICK = "unit or world or smoke"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"all tests, and not only: {QUICK}")


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test by its marker, else by its folder, else by its fixtures."""
    if item.get_closest_marker("own_agent"):
        return "slow"
    for tier in TIERS:
        if item.get_closest_marker(tier):
            return tier
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    return OF_FOLDER.get(folder) or min(_tiers_of_fixtures(item), default="unit")


def may_share_agent(item: pytest.Item) -> bool:
    """Whether a test may have a world of the agent that the tests of this process share."""
    is_elsewhere = any(map(item.get_closest_marker, ("unit", "kernel", "hosts", "browser")))
    return not (is_elsewhere or item.get_closest_marker("own_agent"))


def _tiers_of_fixtures(item: pytest.Item) -> Iterator[str]:
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        given = str(definitions[-1].func.__annotations__.get("return"))
        for word in re.findall(r"\w+", given):
            if word in OF_FIXTURE:
                yield OF_FIXTURE[word]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    if not hasattr(config, "workerinput"):
        return  # without xdist tests run in the order of their files
    place = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use four processes, since tests wait a third of their time; none if tests are named."""
    is_one_of_them = hasattr(config, "workerinput")
    has_said = getattr(config.option, "numprocesses", 0) is not None or _names_tests(config)
    if not (is_one_of_them or has_said):
        config.option.numprocesses = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a module in one process, and all tests that share costly servers in one."""
    config.option.loadscopereorder = False
    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = scope_of
    return scheduling


def scope_of(nodeid: str) -> str:
    """Return the module or folder of a test whose tests one process runs, in their order."""
    file = nodeid.partition("::")[0]
    return next(filter(file.startswith, ONE_PROCESS), file)


def _names_tests(config: pytest.Config) -> bool:
    return config.args_source is config.ArgsSource.ARGS


def choose(config: pytest.Config) -> None:
    """Describe the markers, and run only the quick tiers unless the command chooses tests."""
    for marker, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    asked_for = config.option.all or config.option.markexpr or config.option.keyword
    if not (asked_for or _names_tests(config)):
        config.option.markexpr = QUICK

"""What a death leads to, what new workers start with, and what is kept: with CUDA tensors.

Those of `tests.faults.test_policies` and `tests.world.test_setup`, on workers whose tensors are
on the GPU.
"""

from __future__ import annotations

import pytest

from nbdist.world.world import World
from tests.faults.test_policies import (
    test_hang_timeout,
    test_keep,
    test_policies_concern_deaths_alone,
    test_replace,
    test_restart_all,
    test_stop_policy,
    test_what_a_failed_cell_has_begun_is_ended,
)
from tests.node.test_worker_group import (
    test_a_new_rank_dies_before_it_is_ready,
    test_a_survivor_dies_while_it_forms_the_group,
    test_a_survivor_dies_while_the_others_heal,
)
from tests.world.test_setup import (
    test_setup_runs_in_every_new_worker,
    test_setup_with_collectives,
)

__all__ = [
    "test_a_new_rank_dies_before_it_is_ready",
    "test_a_survivor_dies_while_it_forms_the_group",
    "test_a_survivor_dies_while_the_others_heal",
    "test_hang_timeout",
    "test_keep",
    "test_policies_concern_deaths_alone",
    "test_replace",
    "test_restart_all",
    "test_setup_runs_in_every_new_worker",
    "test_setup_with_collectives",
    "test_stop_policy",
    "test_what_a_failed_cell_has_begun_is_ended",
]

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(75)]


@pytest.fixture
def world(world: World) -> World:
    """Four ready ranks with `kept` and nothing else."""
    if any(world.gather("'big' in globals()")):
        world.restart()
    world.execute("kept = rank")
    return world

"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Each takes seconds, and proves at length what tests beside it prove in short: they run where
# TESTS=all (`make test-all`).
LONG = (
    "test_cli_plan.py::test_calibration_makes_the_prediction_of_a_job_right",
    "test_cli_plan.py::test_an_encoder_gets_chips_of_its_own",
    "test_train_dryrun.py::test_a_rank_of_4096_takes_seconds[deepseek-v3]",
    "test_train_dryrun.py::test_documents_dropout_fp8_and_compression_run",
    "test_checkpoint_kill.py::test_a_death_at_any_request_leaves_a_whole_commit[after]",
    "test_conduct_simulation.py::test_every_schedule_ends_and_breaks_no_rule[waits]",
    "test_conduct_links.py::test_every_schedule_of_bad_links_ends_and_breaks_no_rule[none]",
    "test_train_zero.py::test_full_gradients_do_not_pile_up_over_a_backward_pass[2]",
    "test_chaos_members.py::test_memory_is_the_same_after_fifty_recoveries",
    "test_chaos_members.py::test_what_is_due_is_done_before_the_layout_changes",
    "test_chaos_members.py::test_of_two_that_update_differently_none_is_believed",
    "test_chaos_members.py::test_a_loss_of_who_speaks_while_weights_follow",
    "test_chaos_members.py::test_without_twins_a_weight_that_changes_is_found_too",
    "test_chaos_kinds.py::test_two_ranks_of_one_shadow_at_once",
    "test_chaos_kinds.py::test_one_process_and_its_shadow",
    "test_chaos_kinds.py::test_a_keeper_of_a_parity_dies",
    "test_chaos_kinds.py::test_a_shadow_that_always_differs_is_given_up",
    "test_chaos_layouts.py",
    "test_slurm_runs.py::test_without_a_spare",
    "test_hyperpod_software.py::test_a_service_that_is_killed_goes_on_where_it_was",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long ones out."""
    if "all" in (os.environ.get("TESTS"), os.environ.get("CHAOS")):
        return
    left_out = [item for item in items if any(name in item.nodeid for name in LONG)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test depends on, or adds to, what was measured on this machine before."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MESHWRIGHT_CONFIG", str(tmp_path_factory.mktemp("config")))
    yield
    patch.undo()

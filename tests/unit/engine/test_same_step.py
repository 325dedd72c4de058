"""Going on on another number of ranks: refused where steps would change, with settings that keep them."""

from __future__ import annotations

import pytest

from automodel.config.errors import UserError
from automodel.engine.state import check_same_step

FOUR = {"micro_batch_size": 2, "grad_acc_steps": 8, "packed_sequence_size": 0, "seed": 1}


def test_the_same_steps_go_on_anywhere():
    for now in (1, 2, 8):
        check_same_step(FOUR, dict(FOUR), 4, now, "run.yaml")


def test_other_steps_on_as_many_ranks_are_the_loaders_business():
    check_same_step(FOUR, {**FOUR, "grad_acc_steps": 4}, 4, 4, "run.yaml")


@pytest.mark.parametrize(
    ("size", "now", "said"),
    [
        (0, 2, "--nproc-per-node 2 step_scheduler.global_batch_size=16 dataloader.batch_size=2"),
        (0, 1, "--resume step_scheduler.global_batch_size=16 dataloader.batch_size=2"),
        (4096, 2, "--nproc-per-node 2 step_scheduler.global_batch_size=8 dataloader.batch_size=1"),
    ],
)
def test_other_steps_come_with_the_command_that_keeps_them(size, now, said):
    saved = {**FOUR, "packed_sequence_size": size}
    with pytest.raises(UserError, match="comes from 4 ranks") as refused:
        check_same_step(saved, {**saved, "grad_acc_steps": 4}, 4, now, "out/run/config.yaml")
    command = str(refused.value).splitlines()[-1].strip()
    assert command.startswith("automodel finetune llm -c out/run/config.yaml --resume")
    assert command.endswith(said)


def test_the_command_keeps_what_was_given():
    with pytest.raises(UserError) as refused:
        check_same_step(FOUR, {**FOUR, "grad_acc_steps": 4}, 4, 1, "run.yaml", ["--trust", "own", "a.b=c d"])
    command = str(refused.value).splitlines()[-1].strip()
    assert command == (
        "automodel finetune llm -c run.yaml --resume --trust own 'a.b=c d' step_scheduler.global_batch_size=16 "
        "dataloader.batch_size=2"
    )


def test_a_step_that_so_many_ranks_cannot_share_names_the_most_that_can():
    """One rank with a micro-batch of eight leaves nothing to share; two micro-batches can be shared by two of three."""
    one = {"micro_batch_size": 8, "grad_acc_steps": 1}
    with pytest.raises(UserError, match="which 2 ranks cannot share and 1 can.*\n.*--nproc-per-node 1 step_scheduler"):
        check_same_step(one, {**one, "grad_acc_steps": 2}, 1, 2, "run.yaml")
    two = {"micro_batch_size": 8, "grad_acc_steps": 2}
    with pytest.raises(UserError, match="which 3 ranks cannot share and 2 can.*\n.*--nproc-per-node 2 step_scheduler"):
        check_same_step(two, {**two, "grad_acc_steps": 3}, 1, 3, "run.yaml")

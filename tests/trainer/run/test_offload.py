"""AdamW's state in the host's memory gives the same run, to the bit on a CPU."""

import torch

from tests.trainer.runs import assert_same_run, checkpoint, make_loop, open_alone, train_alone
from trainer.run.checkpoint import OPTIMIZER_FILE
from trainer.run.folder import checkpoints_of
from trainer.run.optim import OffloadedAdamW


def test_a_run_with_its_optimizer_in_the_hosts_memory_is_the_run_without(configured_here, capfd):
    """The checkpoints are the same too, and each run resumes from the other's."""
    plain, offloaded = (train_alone(configured_here(f"offload-{on}", offload=on)) for on in (False, True))
    assert "AdamW's state in the host's memory" in capfd.readouterr().out
    assert_same_run(plain, offloaded)
    moments = [(checkpoints_of(each.run).newest() / OPTIMIZER_FILE).read_bytes() for each in (plain, offloaded)]
    assert moments[0] == moments[1]
    for before, on in ((plain, True), (offloaded, False)):
        config = train_alone(configured_here(f"after-{on}", offload=on, resume=checkpoint(before, 5)))
        newest = checkpoints_of(config.run).newest() / OPTIMIZER_FILE
        assert newest.read_bytes() == moments[0]


def test_updates_are_computed_on_copies_of_the_parameters(configured):
    loop = make_loop(open_alone(configured(offload=True, max_steps=2, val_fraction=0.0)))
    loop.run()
    optimizer = loop.updater.optimizer
    assert isinstance(optimizer, OffloadedAdamW)
    copies = [each for group in optimizer.param_groups for each in group["params"]]
    assert {each.device.type for each in copies} == {"cpu"}
    assert not {id(each) for each in loop.model.parameters()} & {id(each) for each in copies}
    assert all(torch.equal(*pair) for pair in zip(optimizer.trained, copies, strict=True))

"""AdamW's state in the host's memory: the same run, to the bit where the device is the host."""

import torch

from tests.trainer.runs import ALONE, assert_same_run, make_loop, open_alone
from trainer.run.checkpoint import OPTIMIZER_FILE
from trainer.run.folder import checkpoints_of
from trainer.run.optim import OffloadedAdamW
from trainer.train import train


def test_a_run_with_its_optimizer_in_the_hosts_memory_is_the_run_without(configured_here, capfd):
    """Its checkpoints too, and each goes on from the other's."""
    plain, offloaded = (configured_here(f"offload-{on}", offload=on) for on in (False, True))
    for config in (plain, offloaded):
        train(config, ALONE)
    assert "AdamW's state in the host's memory" in capfd.readouterr().out
    assert_same_run(plain, offloaded)
    moments = [(checkpoints_of(each.run).newest() / OPTIMIZER_FILE).read_bytes() for each in (plain, offloaded)]
    assert moments[0] == moments[1]
    for before, on in ((plain, True), (offloaded, False)):
        config = configured_here(f"after-{on}", offload=on, resume=str(checkpoints_of(before.run).path(5)))
        train(config, ALONE)
        newest = checkpoints_of(config.run).newest() / OPTIMIZER_FILE
        assert newest.read_bytes() == moments[0]


def test_updates_are_computed_on_copies_that_are_no_parameters_of_the_model(configured):
    loop = make_loop(open_alone(configured(offload=True, max_steps=2, val_fraction=0.0)))
    loop.run()
    optimizer = loop.updater.optimizer
    assert isinstance(optimizer, OffloadedAdamW)
    ours = {id(each) for each in loop.model.parameters()}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {each.device.type for each in held} == {"cpu"}
    assert not ours & {id(each) for each in held}
    for mine, copied in zip(optimizer.trained, held, strict=True):
        assert torch.equal(mine, copied)

"""Patches of Megatron's distributed optimizer: applied while DynaPipe trains, whatever the device.

That runs resume as they were saved is held by `entry/test_checkpoints.py`.
"""

import ast
from types import SimpleNamespace

import pytest
import torch

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.entry import checkout
from megatron_dynapipe.megatron.hooks import repairs, replacements
from tests.helpers.megatron_wheels import VERSIONS, source
from tests.helpers.processes import in_ranks


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", repairs.PATCHES, ids=lambda patch: patch.name)
def test_methods_have_the_parameters_relied_on(patch, version):
    module, _, name = patch.owner.rpartition(".")
    (owner,) = (n for n in ast.parse(source(version, module)).body if getattr(n, "name", "") == name)
    (method,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == patch.name)
    assert tuple(argument.arg for argument in method.args.args) == patch.parameters


def in_force(owner: type) -> bool:
    """Whether all patches of a class are, or none."""
    names = [patch.name for patch in repairs.PATCHES if patch.owner.endswith(f".{owner.__name__}")]
    (answer,) = {hasattr(getattr(owner, name), "__wrapped__") for name in names}
    return answer


@in_ranks(1)
def test_patches_are_applied_and_reverted_with_the_run():
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    manager = buffers._coalescing_manager
    assert not in_force(DistributedOptimizer)
    with replacements.installed(SimpleNamespace()):
        assert in_force(DistributedOptimizer)
        before = DistributedOptimizer.state_dict
        repairs.apply()
        assert DistributedOptimizer.state_dict is before
    assert not in_force(DistributedOptimizer) and buffers._coalescing_manager is manager
    repairs.revert()


def refuse(*_: object) -> None:
    raise ConfigError("the arguments are looked at after this")


@in_ranks(1)
def test_patches_are_applied_in_a_patched_checkout_before_it_loads():
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    checkout.check_arguments(SimpleNamespace(use_dynapipe=False))
    assert not in_force(DistributedOptimizer)
    checkout._check_device = checkout.compatibility.check_patches = lambda: None  # here is neither a GPU nor a checkout
    checkout._check_model_flags = refuse
    with pytest.raises(SystemExit):
        checkout.check_arguments(SimpleNamespace(use_dynapipe=True))
    assert in_force(DistributedOptimizer)


@in_ranks(1)
def test_patches_are_applied_for_steps_without_megatrons_loop():
    from tests.helpers.layouts.layout import Layout
    from tests.helpers.layouts.trainer import Trainer

    assert in_force(type(Trainer(Layout(distributed_optimizer=True)).optimizer.chained_optimizers[0]))


class Fused(torch.optim.SGD):
    """Stands for an optimizer that keeps its own state, as fused ones do."""


def test_other_optimizers_keep_their_own_state_and_steps():
    """Those of PyTorch's Adam: `entry/test_checkpoints.py` fails without any of the patches."""
    weight, seen = torch.nn.Parameter(torch.ones(3)), {}
    of = SimpleNamespace(optimizer=Fused([weight], lr=0.1), optimizer_state_keys=("exp_avg", "exp_avg_sq"))
    assert repairs.with_optimizer_state(lambda self: len(self.optimizer.state))(of) == 0
    repairs.without_step(lambda self, parameter, tensors: seen.update(tensors))(of, None, {"step": 7})
    assert seen == {"step": 7}


def test_a_state_is_gathered_with_its_padding_and_sizes_are_put_back():
    bucket = SimpleNamespace(grad_data=torch.zeros(128), numel_unpadded=100)
    buffer = SimpleNamespace(numel=256, numel_unpadded=228, buckets=[bucket])
    of = SimpleNamespace(buffers=[buffer])
    seen = repairs.with_padding(lambda self: (buffer.numel_unpadded, bucket.numel_unpadded))(of)
    assert seen == (256, 128)
    assert (buffer.numel_unpadded, bucket.numel_unpadded) == (228, 100)


def test_the_count_of_steps_is_found_where_the_saving_runs_adam_had_it():
    weight = torch.nn.Parameter(torch.ones(2))
    for kind, of_parameter, of_group in ((torch.optim.AdamW, {}, {"step": 3}), (torch.optim.SGD, {"step": 3.0}, {})):
        optimizer = kind([weight], lr=0.1)
        optimizer.state[weight] = {"exp_avg": weight} | {name: torch.tensor(n) for name, n in of_parameter.items()}
        optimizer.param_groups[0] |= of_group
        load = repairs.with_step_of_any_adam(lambda *_: None)
        load(SimpleNamespace(optimizer=optimizer), {})
        steps = [place["step"] for place in (optimizer.state[weight], optimizer.param_groups[0]) if "step" in place]
        assert steps == [3] and ("step" in optimizer.state[weight]) is (kind is torch.optim.AdamW)

"""These tests fail when torch changes one of the private names that the package uses."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks
from commhooks.gradients.torch_private import groups_here, in_join, run_after_backward
from tests.support.ddp_steps import process_group_of_one


@pytest.fixture
def alone() -> Iterator[None]:
    with process_group_of_one():
        yield


@pytest.mark.parametrize("divide", [True, False])
def test_join_tells_ddp_what_to_divide_by(alone, divide):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert getattr(ddp, "_divide_by_initial_world_size", True) is True
    with Join([ddp], divide_by_initial_world_size=divide):
        assert ddp._divide_by_initial_world_size is divide
        assert in_join(ddp)
    assert not in_join(DistributedDataParallel(nn.Linear(2, 2)))
    with Join([ddp], enable=False):
        assert not in_join(ddp)


def test_torch_counts_its_groups(alone):
    assert groups_here() == 1
    dist.new_group([0], use_local_synchronization=True)
    assert groups_here() == 2


def test_the_engine_runs_callbacks_at_the_end_of_backward_only():
    calls: list[str] = []
    engine = torch.autograd.Variable._execution_engine
    with pytest.raises(RuntimeError, match="during backward pass"):
        engine.queue_callback(lambda: None)
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    second.register_post_accumulate_grad_hook(
        lambda _: engine.queue_callback(lambda: calls.append("end"))
    )
    first.register_post_accumulate_grad_hook(lambda _: calls.append("first"))
    (first * (second * 2).sin()).sum().backward()
    assert calls == ["first", "end"]


def test_a_pass_within_a_pass_is_recognised():
    """`torch._C._current_autograd_node` tells them apart: the inner pass drops what is queued."""
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, layer in (("outer", model[0]), ("inner", model[1])):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, name=name: run_after_backward(lambda: calls.append(name))
        )
    checkpoint(model[1], model[0](torch.ones(1, 2)), use_reentrant=True).sum().backward()
    assert calls == ["outer"]
    assert torch._C._current_autograd_node() is None
    run_after_backward(lambda: calls.append("outside of a backward pass"))
    assert calls == ["outer"]


def test_a_parameter_shows_the_hooks_that_users_have_put_on_it():
    """`attach` refuses sharded models with such hooks, which would disorder FSDP's buffers."""
    parameter = nn.Parameter(torch.ones(1))
    assert not getattr(parameter, "_post_accumulate_grad_hooks", None)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(parameter._post_accumulate_grad_hooks) == 1
    handle.remove()
    assert not parameter._post_accumulate_grad_hooks


def test_futures_of_works_and_of_users_have_one_base_class(alone):
    assert isinstance(dist.all_reduce(torch.ones(1), async_op=True).get_future(), torch._C.Future)
    assert isinstance(torch.futures.Future(), torch._C.Future)


@pytest.mark.skipif(torch.version.cuda is not None, reason="with NCCL torch takes these names")
@pytest.mark.parametrize("name", ["bf16_compress_hook", "bf16_compress_wrapper_hook"])
def test_torch_refuses_bf16_hooks_by_their_name(alone, name):
    """Why ours have another `__name__`; if this fails, the renaming in default_hooks.py can go."""

    def hook(state, bucket):
        raise AssertionError("never called")

    hook.__name__ = name
    with pytest.raises(TypeError, match="BF16"):
        DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, hook)
    DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, commhooks.bf16_compress_hook)


def test_switches_of_float32_products_exist_and_are_honoured():
    from commhooks.gradients import precision

    with precision.full_precision():
        pass
    for switch in precision._PRECISION_SWITCHES:
        before = switch.fp32_precision
        try:
            switch.fp32_precision = "tf32"
            with precision.full_precision():
                assert switch.fp32_precision == "ieee"
            assert switch.fp32_precision == "tf32"
        finally:
            switch.fp32_precision = before


def test_sparse_gradients_show_their_values():
    assert torch.eye(3).to_sparse()._values().numel() == 3  # `values()` wants a coalesced tensor

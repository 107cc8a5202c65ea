"""A hook averages over the model's own process group, or over one of the hook's, and no further."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm.groups import new_group
from tests.support.ddp_steps import (
    backward,
    conservation_error,
    descend,
    gradients,
    local_gradients,
    mean_over_ranks,
    mlp,
    process_group_of_one,
    relative,
    replicas_equal,
    residuals,
    train,
    weights,
    wrap,
)

START = {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}


def _attach(
    ddp: DistributedDataParallel, name: str, group: dist.ProcessGroup | None
) -> commhooks.CommHook:
    return commhooks.attach(
        ddp, name, hook_options=START if name == "powerSGD" else None, process_group=group
    )


def _register(
    ddp: DistributedDataParallel, name: str, group: dist.ProcessGroup | None
) -> commhooks.PowerSGDState | None:
    state: Any = commhooks.PowerSGDState(group, **START) if name == "powerSGD" else group
    function = {"allreduce": commhooks.allreduce_hook, "fp16": commhooks.fp16_compress_hook}
    ddp.register_comm_hook(state, function.get(name, commhooks.powerSGD_hook))
    return state if name == "powerSGD" else None


def sub_group(name: str, how: Callable[..., Any], ddp_on_pair: bool) -> None:
    """Ranks 1 and 2 of 3 train; rank 0 is not in their group and does nothing."""
    pair = dist.new_group([1, 2])
    if ddp_on_pair and dist.get_rank() == 0:
        return
    # A model on all three ranks whose hook averages over a pair of them: then rank 0 has a group of
    # its own.
    alone = dist.new_group([0]) if not ddp_on_pair else None
    group = alone if dist.get_rank() == 0 else pair
    ddp = wrap(mlp(), process_group=pair) if ddp_on_pair else wrap(mlp())
    # `attach` takes the group of the model; torch's functions take the default group unless they
    # are told.
    passed = None if how is _attach and ddp_on_pair else group
    made = how(ddp, name, passed)
    for step in range(3):
        before = (
            residuals(made) if isinstance(made, commhooks.CommHook) and name == "powerSGD" else {}
        )
        local = local_gradients(ddp, partial(backward, step=step))
        backward(ddp, step)
        after = (
            residuals(made) if isinstance(made, commhooks.CommHook) and name == "powerSGD" else {}
        )
        for key, gradient in gradients(ddp).items():
            expected = mean_over_ranks(local[key], group)
            if name == "powerSGD" and key.endswith("weight") and step >= 1:
                assert relative(gradient - expected, expected) > 1e-3, "not compressed"
                if key in after:
                    error = conservation_error(
                        local[key], before.get(key), after[key], gradient, group
                    )
                    assert error <= 1e-6, (step, key, error)
            else:
                bound = 1e-3 if name == "fp16" else 1e-6
                assert relative(gradient - expected, expected) <= bound, (step, key)
        descend(ddp)
        assert replicas_equal(ddp, group), step
    if isinstance(made, commhooks.PowerSGDState):
        assert made.iter == 3
    if isinstance(made, commhooks.CommHook):
        assert made.stats()["step"] == 3
    if not ddp_on_pair:
        assert not replicas_equal(ddp)


@pytest.mark.parametrize(
    ("name", "how", "ddp_on_pair"),
    [
        ("allreduce", _register, True),
        ("fp16", _attach, False),
        ("powerSGD", _attach, True),
        ("powerSGD", _register, False),
    ],
)
def test_averages_over_the_group_only(run_ranks, name, how, ddp_on_pair):
    run_ranks(sub_group, name, how, ddp_on_pair, world_size=3)


def saved_on_a_sub_group(residual: str, gather: bool) -> None:
    """Let ranks 0 and 1 of 3 save and resume in a new model; rank 2 takes no part."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    ddp = wrap(mlp(), process_group=pair)
    hook = _attach(ddp, "powerSGD", None)
    train(ddp, 3)
    saved = hook.state_dict(residual, gather=gather)
    assert saved["exact"] and saved["step"] == 3
    again = wrap(mlp(seed=9), process_group=pair)
    new_hook = _attach(again, "powerSGD", None)
    again.module.load_state_dict(ddp.module.state_dict())
    new_hook.load_state_dict(saved)
    train(ddp, 2, first_step=3)
    train(again, 2, first_step=3)
    assert new_hook.stats()["compressed_steps"] >= 2 and new_hook.stats()["handshakes"] >= 1
    for name, weight in weights(ddp.module).items():
        assert torch.equal(weight, again.module.get_parameter(name)), name
    assert replicas_equal(again, pair)


@pytest.mark.parametrize("residual, gather", [("mean", False), ("per_rank", True)])
def test_save_and_resume_on_a_sub_group(run_ranks, residual, gather):
    run_ranks(saved_on_a_sub_group, residual, gather, world_size=3)


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 1)])
def test_all_ranks_make_all_groups_on_the_device_of_the_model(bound: torch.device | None) -> None:
    """All ranks must split NCCL's communicator of a group with a device together."""
    device = torch.device("cuda", 1)
    calls = []
    with (
        process_group_of_one(),
        mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(4))),
        mock.patch.object(dist.ProcessGroup, "size", lambda self: 4),
        mock.patch.object(dist.ProcessGroup, "bound_device_id", bound),
        mock.patch.object(
            dist, "new_group", lambda *args, **kwargs: calls.append((args, kwargs)) or args
        ),
    ):
        mine = new_group([[0, 2], [1, 3]], dist.group.WORLD, device)
    assert mine == ([0, 2],)
    assert [args for args, _ in calls] == [([0, 2],), ([1, 3],)], "in the same order on all ranks"
    for _, arguments in calls:
        assert not arguments["use_local_synchronization"]
        assert arguments.get("device_id", bound) == device


def test_some_ranks_of_a_bound_group_make_no_groups() -> None:
    """They would wait for the ranks that do not call."""
    with (
        process_group_of_one(),
        mock.patch.object(dist.ProcessGroup, "size", lambda self: 4),
        mock.patch.object(dist.ProcessGroup, "bound_device_id", torch.device("cuda", 0)),
        pytest.raises(
            commhooks.AttachError, match=r"bound to cuda:0.*init_process_group without device_id"
        ),
    ):
        new_group([[0]], dist.group.WORLD, torch.device("cuda", 0))


class _Work:
    def wait(self) -> None:
        pass

    def get_future(self) -> None:
        raise RuntimeError("Work::getFuture not implemented.")


@pytest.mark.parametrize("hook", ["powerSGD", "bf16"])
def test_torchcomms_without_futures_is_refused_in_one_sentence(hook: str) -> None:
    backend = type("_BackendWrapper", (), {"__module__": "torchcomms._comms"})()
    with (
        process_group_of_one(),
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda self, device: backend),
    ):
        commhooks.attach(wrap(mlp()), hook)  # a version that has futures
        with (
            mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: _Work()),
            pytest.raises(
                commhooks.AttachError,
                match=r"runs on torchcomms.*unset TORCH_DISTRIBUTED_USE_TORCHCOMMS$",
            ),
        ):
            commhooks.attach(wrap(mlp()), hook)


def _with_unequal_groups(config: commhooks.HookConfig, nodes: int | None) -> None:
    for _ in range(2):
        dist.new_group([0])  # such as one for an evaluation
    ddp = wrap(mlp())
    hook = commhooks.attach(ddp, config, ranks_per_node=nodes)
    train(ddp, 4)
    ddp.zero_grad()
    assert hook.synchronize() and replicas_equal(ddp)
    assert hook.stats()["bytes_sent"] > 0


@pytest.mark.parametrize(
    ("config", "ranks", "nodes"),
    [
        (commhooks.PowerSGD(start_powerSGD_iter=1), 4, 2),
        (commhooks.DiLoCo(sync_every=3, delay=1), 2, None),
    ],
)
def test_ranks_may_be_in_different_numbers_of_groups(
    run_ranks: Any, config: commhooks.HookConfig, ranks: int, nodes: int | None
) -> None:
    """torch names a new group by its ranks and by how many groups there are on this rank."""
    run_ranks(_with_unequal_groups, config, nodes, world_size=ranks)

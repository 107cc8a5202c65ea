"""`diloco` and `local_sgd` between the replicas of a sharded model: rounds, outer steps,
checkpoints.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import bits_equal
from tests.support.sharded import Prescribed, attached, random_gradients

EVERY, SAVE_AT, STEPS = 3, 4, 7
LR = 0.1


class Training:
    def __init__(
        self, replicas: int, shards: int, config: commhooks.HookConfig, momentum: float = 0.0
    ) -> None:
        """`shards` 0: a DDP model."""
        if shards:
            self.model, self.hook = attached(replicas, shards, config)
        else:
            ddp = DistributedDataParallel(Prescribed(), find_unused_parameters=True)
            self.model, self.hook = ddp, commhooks.attach(ddp, config, save_residual="distributed")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=momentum)

    def train(self, begin: int, end: int) -> "Training":
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.model(random_gradients(step)).backward()
            self.optimizer.step()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's replica, whole. All ranks of a sharding group must call this."""
        module: nn.Module = getattr(self.model, "module", self.model)
        named = module.named_parameters()
        return {
            n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named
        }

    def stateful(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"hook": self.hook, "model": model, "optimizer": optimizer}

    def save(self, folder: str) -> None:
        self.hook.state_dict()  # ends the round
        dcp.save(self.stateful(), checkpoint_id=folder)

    def load(self, folder: str) -> "Training":
        content = self.stateful()
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        return self


def _rounds(config: commhooks.HookConfig) -> list[dict[str, torch.Tensor]]:
    plain, local = Training(2, 2, commhooks.AllReduce()), Training(2, 2, config)
    found = []
    for begin, end in ((0, EVERY), (EVERY, EVERY + 1)):
        found += [plain.train(begin, end).weights(), local.train(begin, end).weights()]
    with torch.no_grad():
        local.model(random_gradients(0))  # an evaluation, after which the root's weights are whole
    local.hook.synchronize()
    local.model(random_gradients(0))
    return [*found, local.weights()]


def _worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_plain_sgd_comes_to_the_weights_of_an_all_reduce(run_ranks: Any) -> None:
    """Its steps add up, so that the mean of the weights is what the mean gradients lead to."""
    found = run_ranks(_rounds, commhooks.LocalSGD(sync_every=EVERY), world_size=4)
    for rank, (plain, local, later, apart, common) in enumerate(found):
        assert _worst(plain, local) < 1e-6
        assert _worst(later, apart) > 1e-3 and _worst(later, common) < 1e-6
        assert bits_equal(common, found[0][4])
        assert (_worst(apart, found[0][3]) > 1e-3) == (rank >= 2)  # of the other replica


def _in_other_memory() -> float:
    plain = Training(2, 1, commhooks.AllReduce())
    local = Training(2, 1, commhooks.LocalSGD(sync_every=1))
    for parameter in local.model.parameters():
        # torch 2.8 does this to small shards, in the first forward pass and in a load
        parameter._local_tensor = parameter._local_tensor.clone()  # type: ignore[attr-defined]
    return _worst(plain.train(0, 2).weights(), local.train(0, 2).weights())


def test_weights_that_torch_has_moved_to_other_memory_are_exchanged(run_ranks: Any) -> None:
    assert max(run_ranks(_in_other_memory)) < 1e-6


CONFIGS = {
    "int4": commhooks.DiLoCo(sync_every=EVERY, outer_lr=0.7, outer_momentum=0.5),
    "streaming": commhooks.DiLoCo(
        sync_every=4, fragments=2, delay=1, outer_momentum=0.3, wire="int8"
    ),
}


def _train_and_save(folder: str, config: commhooks.HookConfig) -> Any:
    training = Training(2, 2, config, momentum=0.9).train(0, SAVE_AT)
    training.save(folder)
    at_save = training.weights()
    training.train(SAVE_AT, STEPS)
    training.hook.synchronize()
    return at_save, training.weights()


def _load_and_go_on(folder: str, config: commhooks.HookConfig, replicas: int, shards: int) -> Any:
    training = Training(replicas, shards, config, momentum=0.9).load(folder)
    at_load = training.weights()
    training.train(SAVE_AT, STEPS)
    training.hook.synchronize()
    return at_load, training.weights(), training.hook.stats()


@pytest.fixture(scope="module")
def saved_with(worker_pool: Any, tmp_path_factory: Any) -> Any:
    """name of a config -> a folder with what two replicas of two shards have saved, and what each
    rank returned.
    """

    @functools.cache
    def saved(name: str) -> tuple[str, list[Any]]:
        folder = str(tmp_path_factory.mktemp("saved"))
        return folder, worker_pool.run(_train_and_save, folder, CONFIGS[name], world_size=4)

    return saved


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resume_in_mid_round_is_bit_equal(run_ranks: Any, saved_with: Any, name: str) -> None:
    folder, saved = saved_with(name)
    resumed = run_ranks(_load_and_go_on, folder, CONFIGS[name], 2, 2, world_size=4)
    for (at_save, end), (at_load, same, _) in zip(saved, resumed, strict=True):
        assert (
            bits_equal(at_save, at_load) and bits_equal(end, same) and bits_equal(end, saved[0][1])
        )
        assert _worst(at_save, end) > 1e-3


@pytest.mark.parametrize(("replicas", "shards"), [(1, 4), (2, 0)])
def test_other_numbers_of_replicas_and_shards_go_on(
    run_ranks: Any, saved_with: Any, replicas: int, shards: int
) -> None:
    folder, ((at_save, _), *_) = saved_with("int4")
    world_size = replicas * max(1, shards)
    found = run_ranks(
        _load_and_go_on, folder, CONFIGS["int4"], replicas, shards, world_size=world_size
    )
    for at_load, end, stats in found:
        assert bits_equal(at_load, at_save) and bits_equal(end, found[0][1])
        assert (
            all(bool(each.isfinite().all()) for each in end.values())
            and stats["nonfinite_steps"] == 0
        )


def _detached(delay: int) -> Any:
    training = Training(2, 2, commhooks.DiLoCo(sync_every=EVERY, delay=delay)).train(0, EVERY + 1)
    training.hook.detach()
    common, sent = training.weights(), training.hook.stats()["bytes_sent"]
    training.train(EVERY + 1, 3 * EVERY)
    return common, training.weights(), training.hook.stats()["bytes_sent"] - sent


def test_a_hook_that_is_taken_off_ends_its_round_and_does_no_more(run_ranks: Any) -> None:
    found = run_ranks(_detached, 2, world_size=4)
    for common, _, sent in found:
        assert bits_equal(common, found[0][0]) and sent == 0
    assert _worst(found[0][1], found[2][1]) > 1e-3  # each replica for itself


def _through_a_method(passes: int) -> Any:
    """A model that is trained through a method of its own, by an optimizer that torch does not
    know.
    """
    training = Training(2, 2, commhooks.LocalSGD(sync_every=EVERY))
    model: Any = training.model
    type(model).score = Prescribed.forward
    register_fsdp_forward_method(model, "score")
    rounds = []
    for step in range(passes):
        model.score(random_gradients(step)).backward()
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(LR * each.grad)
                each.grad = None
        rounds.append(training.hook.stats()["step"])
    training.hook.synchronize()
    return rounds, training.hook.stats()["step"], training.weights()


def test_a_model_without_a_forward_pass_of_its_own_gets_its_outer_steps(run_ranks: Any) -> None:
    found = run_ranks(_through_a_method, 3 * EVERY, world_size=4)
    for rounds, at_end, weights in found:
        assert rounds == [0, 0, 0, 1, 1, 1, 2, 2, 2] and at_end == 3  # with the next backward pass
        assert bits_equal(weights, found[0][2])


class _EightBits(torch.optim.Optimizer):
    """SGD with a momentum of integers and a scale per shard."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state, grad, mesh = self.state[p], p.grad.to_local(), p.device_mesh
            momentum = grad.clone()
            if state:
                momentum += 0.9 * state["codes"].to_local().double() * state["scale"].to_local()
            scale = (
                momentum.abs().max().clamp_min(1e-9)[None] / 127
                if momentum.numel()
                else momentum.new_ones(1)
            )
            codes = (momentum / scale).round().to(torch.int8)
            whole = {"shape": p.shape, "stride": p.stride()}
            state["codes"] = DTensor.from_local(codes, mesh, p.placements, run_check=False, **whole)
            state["scale"] = DTensor.from_local(scale, mesh, [Shard(0)], run_check=False)
            p.to_local().sub_(LR * momentum)


def _local_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        each.to_local().clone() for state in optimizer.state.values() for each in state.values()
    ]


def _saves_codes(folder: str) -> Any:
    training = Training(2, 2, commhooks.DiLoCo(sync_every=EVERY))
    training.optimizer = _EightBits(training.model.parameters(), {})
    training.train(0, SAVE_AT)
    before = _local_state(training.optimizer)
    training.save(folder)
    saved = _local_state(training.optimizer)
    again = Training(2, 2, commhooks.DiLoCo(sync_every=EVERY))
    again.optimizer = _EightBits(again.model.parameters(), {})
    again.train(0, 1).load(folder)
    loaded = _local_state(again.optimizer)
    for each in (training, again):
        each.train(SAVE_AT, STEPS).hook.synchronize()
    return before, saved, loaded, training.weights(), again.weights()


def test_codes_and_scales_are_those_of_one_replica(run_ranks: Any, tmp_path: Path) -> None:
    found = run_ranks(_saves_codes, str(tmp_path), world_size=4)
    for rank, (_, saved, loaded, end, same) in enumerate(found):
        first = found[rank % 2][0]  # of the first replica, with the same shard
        assert all(map(torch.equal, first, saved)) and all(map(torch.equal, saved, loaded))
        assert bits_equal(end, same)
    assert not all(map(torch.equal, found[0][0], found[2][0]))

"""Compressed shards in the modes of FSDP2: what it gathers when, evaluation, asynchronous gathers,
replicas, compiled blocks, and back to its own collectives.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import commhooks
from tests.sharded.shards_models import (
    Net,
    backward,
    equal,
    logged,
    sharded,
    shards_of,
    train,
)
from tests.support.features import custom_collectives
from tests.support.kernels import computing_with

pytestmark = custom_collectives

SHARDS = commhooks.Shards(block_size=32)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def _trained(shards: Any, steps: int = 4, **options: Any) -> tuple[Net, Any]:
    model = sharded(**options)
    hook = None if shards is None else commhooks.attach(model, None, shards=shards)
    train(model, _sgd(model), range(steps))
    return model, hook


def _counted(reshard: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    model, hook = _trained(SHARDS, 1, reshard_after_forward=reshard)
    first = hook.stats()
    train(model, _sgd(model), range(1))
    now, plan = hook.stats(), hook.plan()
    step = now["shards"]["gathers"] - first["shards"]["gathers"]
    hook.detach()
    return now, plan.as_dict(), step


def _regathered() -> tuple[dict[str, Any], str]:
    with logged() as lines:
        _, hook = _trained(SHARDS, 1, reshard_after_forward=2)
    return hook.stats()["shards"], "".join(lines)


def test_gathers_among_fewer_ranks_are_told_apart(run_ranks: Any) -> None:
    for rank, (stats, line) in enumerate(run_ranks(_regathered, world_size=4)):
        assert stats["gathers"] == 6 and stats["bytes_inside_nodes"] > 0
        expected = "for 3 all-gathers (3 more among fewer ranks, exactly) and 3 reduce-scatters"
        assert expected in line or rank > 0


@pytest.mark.parametrize(("reshard", "gathers"), [(None, 5), (True, 6), (False, 3)])
def test_the_plan_predicts_what_is_sent(run_ranks: Any, reshard: Any, gathers: int) -> None:
    """Three units; by default the root is not gathered again in the backward pass. Messages are
    padded to 8 bytes.
    """
    for stats, plan, counted in run_ranks(_counted, reshard):
        assert stats["shards"]["memory_bytes"] == plan["memory_bytes"]["total"] > 0
        assert counted == gathers and stats["shards"]["scatters"] == 6
        assert plan["bytes_before"] == stats["bytes_uncompressed"] / 2
        sent = stats["bytes_sent_last_pass"]
        assert plan["bytes_after"] <= sent <= plan["bytes_after"] + 16 * gathers
        assert stats["step"] == stats["backward_passes"] == 2 and stats["hook"] == "shards"
        assert sent < 0.32 * plan["bytes_before"]
        of_norm = next(p for p in plan["parameters"] if p["name"] == "blocks.0.norm.weight")
        assert of_norm["reason"] == "vector"


def _attached(**options: Any) -> tuple[Net, Any]:
    model = sharded(**options)
    return model, commhooks.attach(model, None, shards=SHARDS)


def _in_modes() -> dict[str, bool]:
    """Whether training in a mode gives the bits of plain training."""
    plain = shards_of(_trained(SHARDS)[0])
    return {
        "asynchronous gathers": equal(_gathered_ahead(), plain),
        "evaluation": equal(_evaluated(), plain),
        "another group": equal(_in_two_groups(), plain),
        "kernel of torch": equal(_by_torch(), plain),
    }


def _gathered_ahead() -> dict[str, torch.Tensor]:
    model, _ = _attached()
    optimizer = _sgd(model)
    model.set_modules_to_forward_prefetch([model.blocks[0]])  # type: ignore[operator]
    for step in range(4):
        optimizer.zero_grad()
        for block in model.blocks:
            block.unshard(async_op=True)  # type: ignore[operator]
        backward(model, step)
        optimizer.step()
    return shards_of(model)


def _evaluated() -> dict[str, torch.Tensor]:
    model, _ = _attached()
    optimizer = _sgd(model)
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        with torch.inference_mode():  # not before the first step, which fully_shard refuses
            model(torch.zeros(1, 2, dtype=torch.int64))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 2, dtype=torch.int64))
    return shards_of(model)


def _in_two_groups() -> dict[str, torch.Tensor]:
    model, _ = _attached()
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    train(model, _sgd(model), range(4))
    return shards_of(model)


def _by_torch() -> dict[str, torch.Tensor]:
    with computing_with("torch"):
        model, hook = _trained(SHARDS)
    assert hook.stats()["kernel"] == "torch"
    return shards_of(model)


def _rounded() -> dict[str, bool]:
    """What a forward pass uses is the same on all ranks, and not the optimizer's shard."""
    excluding = commhooks.Shards(block_size=32, exclude=["*.down.*"])
    block = _trained(excluding)[0].blocks[0]
    block.unshard()  # type: ignore[operator]
    weight = block.up.weight.detach().clone()
    excluded = block.down.weight.detach().clone()
    block.reshard()  # type: ignore[operator]
    everywhere = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weight)
    exact = block.up.weight.full_tensor().detach()  # type: ignore[operator]
    return {
        "same": all(torch.equal(other, weight) for other in everywhere),
        "rounded": bool(0 < (weight - exact).abs().max() < 0.01 * exact.abs().max()),
        "excluded": torch.equal(excluded, block.down.weight.full_tensor()),  # type: ignore[operator]
    }


def _ended() -> dict[str, bool]:
    """FSDP2's own collectives are back after `detach` and `close`."""
    bits = shards_of(_trained(None)[0])
    found = {"no shards": not equal(bits, shards_of(_trained(SHARDS)[0]))}
    for end in ("detach", "close"):
        model, hook = _attached()
        getattr(hook, end)()
        train(model, _sgd(model), range(4))
        found[end] = equal(shards_of(model), bits)
        found[f"memory after {end}"] = hook.stats()["shards"]["memory_bytes"] == 0
        found[f"plan after {end}"] = bool(hook.plan().compressed)
    hook = commhooks.attach(model, None, shards="bf16")  # again, on the same model
    train(model, _sgd(model), range(1))
    found["attached again"] = hook.stats()["shards"]["gathers"] == 5
    return found


@pytest.mark.parametrize("look", [_in_modes, _rounded, _ended])
def test_modes_of_fully_shard(run_ranks: Any, look: Any) -> None:
    for found in run_ranks(look):
        assert all(found.values()), found


class _Twice(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


def _only_of_fsdp() -> dict[str, Any]:
    """What a hook between replicas refuses: units that are called twice, and optimizers that step
    in the backward pass.
    """
    model, hook = _attached()
    model.forward = _Twice.forward.__get__(model)  # type: ignore[method-assign]
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    losses = [float(backward(model, 0)) for _ in range(6)]
    return {"losses": losses, "stats": hook.stats()}


def test_a_model_without_replicas_may_do_what_fsdp2_does(run_ranks: Any) -> None:
    for found in run_ranks(_only_of_fsdp):
        assert found["losses"][-1] < 0.9 * found["losses"][0]
        assert (
            found["stats"]["backward_passes"] == 6 and found["stats"]["shards"]["gathers"] == 6 * 9
        )


class _Checkpointed(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _alike() -> dict[str, float]:
    """How far each set-up is from training without shards, relative to what it has learned."""
    found = {}
    setups: dict[str, Any] = {
        "tied": {"tied": True},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }
    for name, options in setups.items():
        found[name] = _distance(_trained(None, **options)[0], _trained(SHARDS, **options)[0])
    for name in ("checkpointed", "compiled"):
        trained = []
        for shards in (None, SHARDS):
            model = sharded()
            if name == "checkpointed":
                model.forward = _Checkpointed.forward.__get__(model)  # type: ignore[method-assign]
            else:
                for block in model.blocks:
                    block.compile(backend="eager")
            if shards is not None:
                commhooks.attach(model, None, shards=shards)
            train(model, _sgd(model), range(4))
            trained.append(model)
        found[name] = _distance(*trained)
    return found


def _distance(a: nn.Module, b: nn.Module, mesh: Any = None) -> float:
    begin, first, second = shards_of(sharded(mesh)), shards_of(a), shards_of(b)
    learned = sum(float((first[n] - begin[n]).norm()) for n in first)
    return sum(float((first[n] - second[n]).norm()) for n in first) / learned


def test_set_ups_of_fully_shard_learn_nearly_the_same(run_ranks: Any) -> None:
    for found in run_ranks(_alike):
        assert found.keys() == {"tied", "offloaded", "checkpointed", "compiled"}
        assert all(0 < distance < 0.06 for distance in found.values()), found


class _Adapted(nn.Module):
    """A frozen layer in bfloat16 beside a trained one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


def _with_several_dtypes() -> tuple[float, dict[str, tuple[str, ...]], str]:
    """Return how far compressed gradients are from exact ones, the plan, and the summary."""
    gradients = []
    for shards in (None, SHARDS):
        torch.manual_seed(dist.get_rank())
        model = fully_shard(_Adapted())
        with logged() as lines:
            hook = None if shards is None else commhooks.attach(model, None, shards=shards)
            model(torch.randn(2, 64)).square().mean().backward()
        gradients.append(model.adapter.weight.grad.to_local())  # type: ignore[union-attr]
    assert hook is not None
    plan = hook.plan().as_dict()["parameters"]
    said = {row["name"]: (row["weights"], row["gradients"], row["reason"]) for row in plan}
    exact, compressed = gradients
    return float((compressed - exact).norm() / exact.norm()), said, "".join(lines)


def test_weights_of_several_dtypes_are_sent_as_they_are(run_ranks: Any) -> None:
    for rank, (distance, plan, line) in enumerate(run_ranks(_with_several_dtypes)):
        assert 0 < distance < 0.01
        frozen = ("1 x bfloat16", "none", "several dtypes in its unit")
        trained = ("1 x float32", "int8", "")
        assert plan == dict.fromkeys(["base.weight", "base.bias"], frozen) | {
            "adapter.weight": trained
        }
        assert rank > 0 or line.endswith("for 1 all-gather and 1 reduce-scatter of 1 unit")


def _with_replicas() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for hook in ("int4_compress", None):
        model = sharded(mesh["shard"])
        attached = commhooks.attach(model, hook, replicate_group=mesh["replicate"], shards=SHARDS)
        train(model, _sgd(model), range(3))
        stats, plan = attached.stats(), attached.plan()
        weight = model.blocks[0].up.weight.full_tensor()  # type: ignore[operator]
        everywhere = [torch.empty_like(weight) for _ in range(4)]
        dist.all_gather(everywhere, weight)
        found[str(hook)] = {
            "same": all(torch.equal(each, weight) for each in everywhere),
            "stats": copy.deepcopy(stats),
            "plan": plan.as_dict(),
            "text": str(plan),
        }
        attached.detach()
    return found


def test_beside_a_hook_between_replicas(run_ranks: Any) -> None:
    for found in run_ranks(_with_replicas, world_size=4):
        for name, of_hook in found.items():
            stats, shards = of_hook["stats"], of_hook["stats"]["shards"]
            assert of_hook["same"]
            assert stats["hook"] == (name if name != "None" else "allreduce")
            assert shards["gathers"] == 15 and shards["scatters"] == 9
            assert 0 < shards["bytes_sent"] < 0.32 * shards["bytes_uncompressed"]
            assert of_hook["plan"]["shards"]["hook"] == "shards: int8"
            assert "Units of fully_shard" in of_hook["text"]


def _averaged_weights() -> dict[str, float]:
    """How far the weights that `local_sgd` averages over two replicas are from the mean of two runs
    with shards alone, and those of DiLoCo from DiLoCo without shards, relative to what it learned.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicate = mesh["replicate"].get_group()

    def trained(hook: Any, shards: Any, **more: Any) -> Net:
        model = sharded(mesh["shard"])
        if hook is not None or shards is not None:
            commhooks.attach(model, hook, shards=shards, **more)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(6))
        return model

    found = {}
    among_replicas = {"replicate_group": mesh["replicate"]}
    alone = shards_of(trained(None, SHARDS))
    for weight in alone.values():
        dist.all_reduce(weight, group=replicate)
        weight.div_(2)
    local = commhooks.LocalSGD(sync_every=6)
    averaged = shards_of(trained(local, SHARDS, **among_replicas))
    found["local_sgd"] = max(float((averaged[name] - alone[name]).abs().max()) for name in alone)
    diloco = commhooks.DiLoCo(sync_every=3)
    exact = trained(diloco, None, **among_replicas)
    found["diloco"] = _distance(exact, trained(diloco, SHARDS, **among_replicas), mesh["shard"])
    return found


def test_hooks_that_average_weights_between_replicas(run_ranks: Any) -> None:
    for found in run_ranks(_averaged_weights, world_size=4):
        assert found["local_sgd"] < 1e-6
        assert 0 < found["diloco"] < 0.06


def _scaled() -> list[tuple[bool, float]]:
    """Train in float16 with a GradScaler; in the second step one gradient of the last rank is not
    finite, in a row of the embedding. Return whether a step was taken, and the scale after it.
    """
    model, _ = _attached(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    first_of_last_rank = torch.tensor(float("inf") if dist.get_rank() == 2 else 1.0)
    steps = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0, 0] *= first_of_last_rank if len(steps) == 1 else 1.0
        return gradient

    model.embed.register_forward_hook(lambda module, given, out: out.register_hook(spoil) and None)
    for step in range(3):
        optimizer.zero_grad()
        before = shards_of(model)
        backward(model, step, scaler.scale(torch.ones(())))
        scaler.step(optimizer)
        scaler.update()
        steps.append((not equal(shards_of(model), before), scaler.get_scale()))
    return steps


def test_a_grad_scaler_skips_a_step_on_all_ranks(run_ranks: Any) -> None:
    expected = [(True, 1024.0), (False, 512.0), (True, 512.0)]
    assert run_ranks(_scaled, world_size=3) == [expected] * 3


def _resumed() -> bool:
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    whole = shards_of(_trained(SHARDS, 6)[0])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model = sharded()
    hook, optimizer = commhooks.attach(model, None, shards=SHARDS), _sgd(model)
    train(model, optimizer, range(3))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "hook": hook}, checkpoint_id=folder[0])
    model = sharded()
    hook, optimizer = commhooks.attach(model, None, shards=SHARDS), _sgd(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer, "hook": hook}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    train(model, optimizer, range(3, 6))
    return equal(shards_of(model), whole) and hook.stats()["step"] == 6


def test_a_resumed_run_is_bit_equal(run_ranks: Any) -> None:
    assert run_ranks(_resumed) == [True, True]

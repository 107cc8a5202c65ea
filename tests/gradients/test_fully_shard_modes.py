"""Averaged gradients are right with each option of FSDP2, and nothing hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import commhooks
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.features import (
    fully_shard_on_gloo,
    reduce_scatter_unused_params,
    reset_iter_state,
)
from tests.support.models import bits_equal, worst_error
from tests.support.sharded import (
    NAMES,
    POWERSGD,
    Prescribed,
    accumulating,
    attached,
    backward,
    learned,
    mean_over_ranks,
    mesh_of,
    random_gradients,
    shard,
    whole_gradients,
)


def _on_every_rank(run_ranks: Any, work: Callable[..., Any], *args: Any) -> None:
    """`work` returns what went wrong, by name."""
    for problems in run_ranks(work, *args, world_size=4):
        assert problems == {}


def _wrong(**is_right: bool) -> dict[str, bool]:
    return {name: right for name, right in is_right.items() if not right}


# ---- accumulation --------------------------------------------------------------------------------


def _accumulation(setter: str) -> dict[str, bool]:
    model, hook = attached(2, 2, "allreduce")
    sum_of_two = {n: mean_over_ranks(0, 4)[n] + mean_over_ranks(1, 4)[n] for n in NAMES}
    sum_of_three = {n: sum_of_two[n] + mean_over_ranks(2, 4)[n] for n in NAMES}
    with accumulating(model, setter):
        for step in range(2):
            model(random_gradients(step)).backward()
    accumulated = hook.stats()
    late = worst_error(_go_on(model, 2), sum_of_three)
    passes, sent = hook.stats()["backward_passes"], hook.stats()["bytes_sent"]
    # What was accumulated is used once, and gradients that were averaged before stay.
    model.zero_grad()
    first = worst_error(_go_on(model, 0), mean_over_ranks(0, 4))
    with accumulating(model, setter):
        model(
            {name: gradient for name, gradient in random_gradients(1).items() if "weight" in name}
        ).backward()
    kept = worst_error(whole_gradients(model), mean_over_ranks(0, 4))
    wanted = {
        n: (
            sum_of_two[n] + mean_over_ranks(2, 4)[n]
            if "weight" in n
            else mean_over_ranks(0, 4)[n] + mean_over_ranks(2, 4)[n]
        )
        for n in NAMES
    }
    again = worst_error(_go_on(model, 2), wanted)
    return _wrong(
        nothing_sent=accumulated["bytes_sent"]
        == accumulated["collectives"]
        == accumulated["backward_passes"]
        == 0,
        one_pass=passes == 1 and sent == 8 * sum(p.to_local().numel() for p in model.parameters()),
        without_communication=max(late, first, kept, again) < 1e-14,
    )


def _go_on(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    model(random_gradients(step)).backward()
    return whole_gradients(model)


def _compressed_accumulation() -> dict[str, bool]:
    options = POWERSGD | {"start_powerSGD_iter": 0}
    model, hook = attached(2, 2, hook_options=options)
    apart = [backward(model, random_gradients(step)) for step in range(2)]
    other, other_hook = attached(2, 2, hook_options=options)
    backward(other, random_gradients(0))
    weight = next(other.parameters())
    before = weight.grad
    together = _go_on(other, 1)
    return _wrong(
        sum=worst_error(together, {n: apart[0][n] + apart[1][n] for n in NAMES}) < 1e-14,
        same_tensor=weight.grad is before,
        learned=bits_equal(learned(hook), learned(other_hook)),
    )


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_accumulated_gradients_are_averaged(run_ranks: Any, setter: str) -> None:
    _on_every_rank(run_ranks, _accumulation, setter)


def test_gradients_that_were_averaged_are_not_compressed_again(run_ranks: Any) -> None:
    _on_every_rank(run_ranks, _compressed_accumulation)


# ---- options of fully_shard ----------------------------------------------------------------------


def _with_options(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> dict[str, bool]:
    mesh = mesh_of(2, 2)
    model = shard(Prescribed(dtype), mesh["shard"], **options)
    hook = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    got = backward(model, random_gradients(0))
    reduced = options.get("mp_policy", MixedPrecisionPolicy()).reduce_dtype or dtype
    return _wrong(
        close=worst_error(got, mean_over_ranks(0, 4)) < tolerance,
        dtype=all(gradient.dtype == dtype for gradient in got.values()),
        bytes=hook.stats()["bytes_sent"]
        == sum(p.to_local().numel() for p in model.parameters()) * reduced.itemsize,
    )


@fully_shard_on_gloo
@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({"reshard_after_forward": False}, torch.float64, 1e-14),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, torch.float32, 4e-3),
        ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, torch.float32, 1e-2),
    ],
    ids=["no reshard", "bf16 compute", "bf16 reduction"],
)
def test_gradients_are_right_with_each_option(
    run_ranks: Any, options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    _on_every_rank(run_ranks, _with_options, options, dtype, tolerance)


def _as_wide_as_the_reduction() -> dict[str, bool]:
    """The average is taken in the reduction's float32 and rounded to bfloat16 once."""
    mesh = mesh_of(2, 2)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = shard(Prescribed(torch.bfloat16), mesh["shard"], mp_policy=policy)
    hook = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    got = backward(model, random_gradients(0))
    every = [random_gradients(0, rank, torch.bfloat16) for rank in range(4)]
    mean = {
        name: (sum(of_rank[name].float() for of_rank in every) / 4).bfloat16() for name in NAMES
    }
    sent = 4 * sum(p.to_local().numel() for p in model.parameters())
    return _wrong(rounded_once=bits_equal(got, mean), bytes=hook.stats()["bytes_sent"] == sent)


@fully_shard_on_gloo
def test_the_wider_dtype_of_the_reduction_is_kept(run_ranks: Any) -> None:
    _on_every_rank(run_ranks, _as_wide_as_the_reduction)


# ---- parameters without a gradient ---------------------------------------------------------------


def _without(*names: str, step: int = 0) -> dict[str, torch.Tensor]:
    return {
        name: gradient
        for name, gradient in random_gradients(step).items()
        if not name.startswith(names)
    }


def _unused() -> dict[str, bool]:
    model, hook = attached(2, 2, hook_options=POWERSGD | {"start_powerSGD_iter": 0})
    backward(model, random_gradients(0))
    before = learned(hook)
    got = backward(model, _without("even", "first.bias", "own"))
    after = learned(hook)
    kept = [key for key in before if " even.weight" in key or " own" in key]
    exact, _ = attached(2, 2, "allreduce")
    wanted = backward(exact, _without("even", "first.bias", "own"))
    return _wrong(
        names=got.keys() == wanted.keys() == {"first.weight", "tiny.weight", "tiny.bias"},
        untouched=len(kept) >= 4 and all(torch.equal(before[key], after[key]) for key in kept),
        others=not torch.equal(
            before["residual of first.weight"], after["residual of first.weight"]
        ),
        step=after["step"].item() == 2,
        still_trains=backward(model, random_gradients(2)).keys() == NAMES.keys(),
        nothing_at_all=not _go_on_without_any(model),
    )


def _go_on_without_any(model: nn.Module) -> bool:
    model.zero_grad()
    model({}).requires_grad_().backward()
    return bool(whole_gradients(model))


def _frozen() -> dict[str, bool]:
    mesh = mesh_of(2, 2)
    model = Prescribed()
    model.get_parameter("first.weight").requires_grad_(False)
    model.get_submodule("tiny").requires_grad_(False)
    shard(model, mesh["shard"])
    hook = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    got = backward(model, random_gradients(0))
    expected = {
        n: g
        for n, g in mean_over_ranks(0, 4).items()
        if n != "first.weight" and not n.startswith("tiny")
    }
    model.get_parameter("even.scale").requires_grad_(False)
    later = backward(model, random_gradients(1))
    return _wrong(
        mean=worst_error(got, expected) < 1e-14,
        plan=[row.name for row in hook.plan().parameters] == list(got),
        frozen_later=got.keys() - later.keys() == {"even.scale"},
    )


def _used_on_some_ranks() -> dict[str, bool]:
    model, _ = attached(2, 2, "allreduce")
    model.set_reduce_scatter_unused_params(True)
    left_out = {
        0: ("first.bias", "tiny.weight"),
        1: ("first.weight", "own_bias"),
        2: (),
        3: ("tiny.weight",),
    }
    got = backward(model, _without(*left_out[dist.get_rank()]))
    every = [
        {n: g for n, g in random_gradients(0, rank).items() if n not in left_out[rank]}
        for rank in left_out
    ]
    return _wrong(
        mean=worst_error(got, {n: sum(of_rank.get(n, 0.0) for of_rank in every) / 4 for n in NAMES})
        < 1e-14
    )


@pytest.mark.parametrize(
    "work",
    [_unused, _frozen, pytest.param(_used_on_some_ranks, marks=reduce_scatter_unused_params)],
)
def test_parameters_without_a_gradient_are_left_out(
    run_ranks: Any, work: Callable[..., Any]
) -> None:
    _on_every_rank(run_ranks, work)


# ---- real layers: tied weights, checkpoints, clipping --------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 21), nn.Tanh(), nn.Linear(21, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 19)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return {"logits": [self.head(x)]}

    def loss(self, step: int, rank: int) -> torch.Tensor:
        tokens = torch.randint(
            0, 19, (6, 5), generator=torch.Generator().manual_seed(100 * step + rank)
        )
        logits = self(tokens)["logits"][0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def _tied(reentrant: bool) -> dict[str, bool]:
    mesh = mesh_of(2, 2)
    model = Tied(reentrant).double()
    alone = Tied(None).double()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    hook = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    torch.stack([alone.loss(0, rank) for rank in range(4)]).mean().backward()
    model.loss(0, dist.get_rank()).backward()
    got = whole_gradients(model)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    clipped = {name: g * (0.01 / (whole + 1e-6)) for name, g in expected.items()}
    return _wrong(
        mean=worst_error(got, expected) < 1e-13,
        one_name="head.weight" not in [row.name for row in hook.plan().parameters],
        norm=torch.allclose(norm, whole),
        clipped=worst_error(whole_gradients(model), clipped) < 1e-6,
        one_pass=hook.stats()["backward_passes"] == 1,
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights_activation_checkpoints_and_clipping_work(
    run_ranks: Any, reentrant: bool
) -> None:
    _on_every_rank(run_ranks, _tied, reentrant)


def _inside_of_a_reentrant_checkpoint() -> str:
    model, _ = attached(2, 2, "allreduce")
    x = torch.zeros((), requires_grad=True)
    output = checkpoint(lambda _: model(random_gradients(0)), x, use_reentrant=True)
    with pytest.raises(commhooks.HookRunError) as error:
        output.backward()
    return str(error.value)


def test_a_reentrant_checkpoint_around_the_model_is_refused(run_ranks: Any) -> None:
    for message in run_ranks(_inside_of_a_reentrant_checkpoint, world_size=4):
        assert "use_reentrant=False" in message


# ---- unusual backward passes ---------------------------------------------------------------------


class _Failure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


def _abandoned() -> dict[str, bool]:
    """A backward pass fails after `tiny` was reduced. (Of `own`, which has a gradient by then and
    is not reduced, FSDP keeps that gradient in spite of `reset_iter_state`.)
    """
    options = POWERSGD | {"start_powerSGD_iter": 0}
    model, hook = attached(2, 2, hook_options=options)
    undisturbed, other = attached(2, 2, hook_options=options)
    for step in range(2):
        backward(model, random_gradients(step))
        backward(undisturbed, random_gradients(step))
    before = learned(hook)
    handle = model.get_submodule("even").register_forward_hook(
        lambda module, args, output: _Failure.apply(output)
    )
    with pytest.raises(ZeroDivisionError):
        backward(model, _without("own", step=7))
    handle.remove()
    nothing_changed = bits_equal(learned(hook), before)
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()
    got = backward(model, random_gradients(2))
    return _wrong(
        nothing_changed=nothing_changed,
        as_if_nothing_had_happened=bits_equal(got, backward(undisturbed, random_gradients(2))),
        learned=bits_equal(learned(hook), learned(other)),
    )


def _several_passes() -> dict[str, bool]:
    """Evaluate in between, go through one graph twice, and begin at an inner unit."""
    model, hook = attached(2, 2, "allreduce")
    model.eval()
    with torch.no_grad():
        model(random_gradients(5))
    model.train()
    model(random_gradients(5))
    got = backward(model, random_gradients(0))
    model.zero_grad()
    loss = model(random_gradients(1))
    with log_lines() as lines:
        loss.backward(retain_graph=True)
        loss.backward()
    twice = {name: 2 * gradient for name, gradient in mean_over_ranks(1, 4).items()}
    return _wrong(
        first=worst_error(got, mean_over_ranks(0, 4)) < 1e-14,
        twice=worst_error(whole_gradients(model), twice) < 1e-14,
        passes=hook.stats()["backward_passes"] == 3,
        silent=lines == [],
    )


@pytest.mark.parametrize(
    "work", [pytest.param(_abandoned, marks=reset_iter_state), _several_passes]
)
def test_unusual_backward_passes_are_averaged(run_ranks: Any, work: Callable[..., Any]) -> None:
    _on_every_rank(run_ranks, work)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.cell = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(self.cell(x).tanh()).square().mean()


def _called_twice() -> float:
    mesh = mesh_of(2, 2)
    model, alone = _Recurrent().double(), _Recurrent().double()
    fully_shard(model.cell, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    inputs = [
        torch.full((2, 16), float(rank + 1), dtype=torch.float64, requires_grad=True)
        for rank in range(4)
    ]
    torch.stack([alone(image) for image in inputs]).mean().backward()
    model(inputs[dist.get_rank()]).backward()
    return worst_error(
        whole_gradients(model), {name: p.grad for name, p in alone.named_parameters()}
    )


def test_a_unit_may_be_called_twice(run_ranks: Any) -> None:
    """Autograd adds up the gradients of both calls before FSDP reduces them."""
    assert max(run_ranks(_called_twice, world_size=4)) < 1e-13


class _ReducedTwice(torch.autograd.Function):
    """Does in its backward pass what FSDP does when it reduces the cell."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, model: nn.Module, hook: commhooks.CommHook
    ) -> torch.Tensor:
        ctx.model = model
        ctx.hook = hook
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        parameters = list(ctx.model.parameters())
        for _ in range(2):
            ctx.hook._source._on_reduced(
                lambda: None, torch.zeros(sum(p.numel() for p in parameters))
            )
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                ctx.hook._source._on_accumulated(parameter)
        return grad, None, None


def test_a_unit_that_is_reduced_twice_is_refused() -> None:
    with process_group_of_one():
        mesh = mesh_of(1, 1)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
        hook = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
        with pytest.raises(
            commhooks.HookRunError, match="reduced weight twice in one backward pass.*around all of"
        ):
            _ReducedTwice.apply(torch.ones(1, requires_grad=True), model, hook).backward()

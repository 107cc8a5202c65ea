"""Parameters of every kind are averaged; what cannot be compressed, as plain DDP does."""

from functools import partial

import pytest
import torch
from torch import nn

import commhooks
from tests.support.ddp_steps import (
    batch,
    conservation_error,
    descend,
    gradients,
    local_gradients,
    relative,
    replicas_equal,
    residuals,
    wrap,
)
from tests.support.features import complex_on_gloo

POWER_SGD = commhooks.PowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2)


class Kinds(nn.Module):
    """A matrix worth compressing beside parameters that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-dim
        self.shift = nn.Parameter(torch.randn(24))
        self.empty = nn.Parameter(torch.empty(0, 24))
        # a bucket of no elements at all
        self.empty_half = nn.Parameter(torch.empty(24, 0, dtype=torch.bfloat16))
        self.matrix = nn.Parameter(torch.randn(24, 24) / 5)
        self.half_matrix = nn.Parameter((torch.randn(24, 32) / 5).bfloat16())
        self.half_vector = nn.Parameter(torch.randn(32).bfloat16())
        self.waves = nn.Parameter(torch.randn(24, 24, dtype=torch.complex64) / 5)
        self.wave = nn.Parameter(torch.randn(24, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale * (x @ self.matrix) + self.shift
        z = (y.to(self.waves.dtype) @ self.waves + self.wave).abs()
        h = z.bfloat16() @ self.half_matrix + self.half_vector
        return h.float().square().mean() + self.empty.sum() + self.empty_half.sum().float()


def _pass(model: nn.Module, step: int) -> None:
    model(batch(step)).backward()


def all_kinds(wrapper: str | None) -> None:
    ddp, plain = wrap(Kinds()), wrap(Kinds())
    hook = commhooks.attach(ddp, POWER_SGD, wrapper=wrapper)
    compressed = {p.name for p in hook.plan().compressed}
    assert compressed == {"matrix", "half_matrix"}
    for step in range(4):
        local = local_gradients(ddp, partial(_pass, step=step))
        before = residuals(hook)
        plain.module.load_state_dict(ddp.module.state_dict())
        for model in (ddp, plain):
            model.zero_grad(set_to_none=True)
            _pass(model, step)
        after = residuals(hook)
        expected = gradients(plain)
        averaged = gradients(ddp)
        assert averaged.keys() == expected.keys() == dict(ddp.module.named_parameters()).keys()
        for name, gradient in averaged.items():
            assert (
                gradient.dtype == expected[name].dtype and gradient.shape == expected[name].shape
            ), name
            if name in compressed:
                # The gradient itself is rounded to the parameter's dtype.
                bound = 3e-3 if wrapper or gradient.dtype == torch.bfloat16 else 1e-6
                assert (
                    conservation_error(local[name], before.get(name), after[name], gradient)
                    <= bound
                ), name
                assert not torch.equal(gradient, expected[name]), name
            elif wrapper and gradient.numel():
                assert relative((gradient - expected[name]).abs(), expected[name].abs()) <= 1e-2, (
                    name
                )
            else:
                assert torch.equal(gradient, expected[name]), (step, name)
        assert after.keys() == compressed
        assert {r.dtype for r in after.values()} == {torch.float32}
        descend(ddp)
        assert replicas_equal(ddp)
    assert hook.stats()["compressed_steps"] == 4


@complex_on_gloo
@pytest.mark.parametrize("wrapper", [None, "bf16"])
def test_scalars_vectors_empty_mixed_and_complex_parameters_are_averaged(run_ranks, wrapper):
    run_ranks(all_kinds, wrapper)


# ---- sparse gradients ----------------------------------------------------------------------------


def _words(model: nn.Module, step: int) -> None:
    words = torch.randint(
        0, 50, (16,), generator=torch.Generator().manual_seed(int(batch(step)[0, 0] * 1e6) % 99991)
    )
    model(words).square().mean().backward()


def sparse_embeddings(config: commhooks.HookConfig, wrapper: str | None) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 24))
    reference = nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 24))
    ddp, plain = wrap(module), wrap(reference)
    hook = commhooks.attach(ddp, config, wrapper=wrapper)
    if isinstance(config, commhooks.PowerSGD):
        assert {p.name: p.reason for p in hook.plan().parameters}["0.weight"] == "sparse gradient"
    for step in range(3):
        plain.module.load_state_dict(ddp.module.state_dict())
        for model in (ddp, plain):
            model.zero_grad(set_to_none=True)
            _words(model, step)
        assert ddp.module[0].weight.grad.is_sparse
        assert torch.equal(gradients(ddp)["0.weight"], gradients(plain)["0.weight"])
        descend(ddp)
        assert replicas_equal(ddp)
    assert hook.stats()["step"] == 3


@pytest.mark.parametrize(
    ("config", "wrapper"),
    [
        (commhooks.AllReduce(), None),
        (commhooks.BF16Compress(), None),
        (POWER_SGD, None),
        (POWER_SGD, "fp16"),
    ],
)
def test_sparse_embeddings_are_averaged_as_in_plain_ddp(run_ranks, config, wrapper):
    run_ranks(sparse_embeddings, config, wrapper)


# ---- memory formats ------------------------------------------------------------------------------


def _images(model: nn.Module, step: int) -> None:
    model(batch(step, width=4 * 6 * 6).view(8, 4, 6, 6)).square().mean().backward()


def channels_last() -> None:
    """Hand the same Q to both formats by a checkpoint: only the order of columns differs."""
    torch.manual_seed(0)
    usual = wrap(nn.Sequential(nn.Conv2d(4, 12, 3), nn.Tanh(), nn.Conv2d(12, 8, 3)))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 12, 3), nn.Tanh(), nn.Conv2d(12, 8, 3))
    last = wrap(module.to(memory_format=torch.channels_last))
    assert not last.module[0].weight.is_contiguous()
    hook, last_hook = commhooks.attach(usual, POWER_SGD), commhooks.attach(last, POWER_SGD)
    for step in range(2):
        usual.zero_grad(set_to_none=True)
        _images(usual, step)
        descend(usual)
    last.module.load_state_dict(usual.module.state_dict())
    last_hook.load_state_dict(hook.state_dict("per_rank"))
    for step in range(2, 6):
        for ddp in (usual, last):
            ddp.zero_grad(set_to_none=True)
            _images(ddp, step)
        for name, gradient in gradients(usual).items():
            assert relative(gradient - gradients(last)[name], gradient) <= 1e-4, (step, name)
        assert last.module[0].weight.grad.stride() == last.module[0].weight.stride()
        for ddp in (usual, last):
            descend(ddp)
            assert replicas_equal(ddp)
    saved, last_saved = (h.state_dict("per_rank")["parameters"] for h in (hook, last_hook))
    for name in ("0.weight", "2.weight"):  # the payload is in logical order in both cases
        q = saved[name]["q"]
        residual = saved[name]["residual"][0]
        assert relative(q - last_saved[name]["q"], q) <= 1e-3, name
        assert relative(residual - last_saved[name]["residual"][0], residual) <= 1e-3, name
    assert last_hook.stats()["compressed_steps"] == 4


def test_channels_last_gives_the_same_gradients(run_ranks):
    run_ranks(channels_last)

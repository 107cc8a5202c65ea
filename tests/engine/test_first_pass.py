"""The first backward pass with parameters of several dtypes, or with sparse gradients: several
buckets at once.

With `static_graph` DDP calls the hook for all of them at the end of that pass, numbers each 0 and
marks none as last.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import HookRunError
from tests.support.ddp_steps import replicas_equal
from tests.support.kinds import KINDS, Kind

STEPS = 3
# One of each way through a pass: all-reduces, compressed ones, gathers, whole buckets, and codecs
# that change.
SORTS = ("fp16", "powerSGD", "int8, torch", "batched", "auto, chooses int8")
MODES = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


class Words(nn.Module):
    """An embedding and layers of one dtype, or of two."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 24, sparse=what == "sparse")
        self.layers = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
        self.norm = nn.LayerNorm(
            24, dtype=torch.bfloat16 if what == "two dtypes" else torch.float32
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embedding(words)).to(self.norm.weight.dtype)).float()


def _trained(kind: Kind, what: str, mode: str, **attach: Any) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(Words(what), bucket_cap_mb=0.003, **MODES[mode])
    hook = commhooks.attach(
        ddp, kind.hook, hook_options=kind.options or None, wrapper=kind.wrapper, **attach
    )
    for step in range(STEPS):
        ddp.zero_grad()
        words = torch.randint(
            0, 20, (6, 5), generator=torch.Generator().manual_seed(10 * step + rank)
        )
        ddp(words).pow(3).mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.to_dense(), alpha=0.1)
    stats = hook.stats()
    return {
        "step": stats["step"],
        "passes": stats["backward_passes"],
        "compressed": stats["compressed_steps"],
        "equal": replicas_equal(ddp),
        "weights": [parameter.detach().clone() for parameter in ddp.parameters()],
    }


@pytest.mark.parametrize(
    ("name", "what"),
    [(name, "two dtypes") for name in SORTS]
    + [(name, "sparse") for name in ("fp16", "powerSGD", "batched")]
    + [("auto, chooses int8", "one dtype")],
)
def test_a_pass_of_several_buckets_in_every_mode_of_ddp(
    run_ranks: Any, name: str, what: str
) -> None:
    kind = KINDS[name]
    for rank in run_ranks(_in_every_mode, kind, what):
        for mode, run in rank.items():
            assert run["step"] == run["passes"] == STEPS and run["equal"], mode
            assert not kind.learns or "auto" in kind.hook or run["compressed"] > 0, mode
            if not kind.layouts_matter:
                for ours, plain in zip(run["weights"], rank["plain"]["weights"], strict=True):
                    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6), mode


def _in_every_mode(kind: Kind, what: str) -> dict[str, Any]:
    return {mode: _trained(kind, what, mode) for mode in MODES}


def test_the_first_pass_works_between_nodes(run_ranks: Any) -> None:
    for rank in run_ranks(_between_nodes, world_size=4):
        for run in rank:
            assert run["step"] == STEPS and run["equal"]


def _between_nodes() -> list[dict[str, Any]]:
    sorts = [
        ("bf16", "sparse"),
        ("powerSGD", "two dtypes"),
        ("powerSGD", "sparse"),
        ("int8, torch", "two dtypes"),
    ]
    return [_trained(KINDS[name], what, "static graph", ranks_per_node=2) for name, what in sorts]


def _drop_in(attached: bool) -> str:
    ddp = DistributedDataParallel(Words("two dtypes"), static_graph=True)
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=0)
    if attached:
        commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
    else:
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    try:
        for _ in range(2):
            ddp(torch.zeros(6, 5, dtype=torch.long)).square().mean().backward()
    except HookRunError as error:
        return str(error)
    return str(state.iter)


def test_the_drop_in_says_to_attach_it(run_ranks: Any) -> None:
    for rank in run_ranks(_drop_in, False):
        assert (
            "static_graph=True" in rank
            and "commhooks.attach(ddp_model, hook, hook_state=state)" in rank
        )
    assert run_ranks(_drop_in, True) == ["2", "2"]


def _frozen_since() -> str:
    ddp = DistributedDataParallel(Words("two dtypes"), static_graph=True)
    ddp.module.norm.requires_grad_(False)  # type: ignore[operator]  # a bucket of its own, which DDP still reduces
    commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0})
    with pytest.raises(HookRunError) as raised:
        ddp(torch.zeros(6, 5, dtype=torch.long)).square().mean().backward()
    return str(raised.value)


def test_a_bucket_of_parameters_frozen_after_wrapping_is_an_error(run_ranks: Any) -> None:
    for rank in run_ranks(_frozen_since):
        assert "or that were frozen then" in rank

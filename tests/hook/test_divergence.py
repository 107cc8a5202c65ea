"""Every rank learns at the next comparison which parameter has drifted apart."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm.collectives import checksum
from tests.support.training import Run, make_model

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _perturbed(
    hook: str, every: int, at: int, name: str, ddp: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One bit of one weight changes on rank 1 before step `at`."""
    options = OPTIONS if hook == "powerSGD" else None
    model = make_model()
    model[3].weight.requires_grad_(hook != "allreduce")  # frozen weights are compared, too
    run = Run.new(model, hook=hook, hook_options=options, check_every=every, ddp=ddp)
    for step in range(at + 2 * every):
        if step == at and dist.get_rank() == 1:
            with torch.no_grad():
                weight = run.ddp.module.get_parameter(name).view(-1)
                weight[-1:].view(torch.int32).bitwise_xor_(1)
        try:
            run.train(1)
        except commhooks.HookRunError as error:
            stats = run.hook.stats()
            return {
                "step": step,
                "text": str(error),
                "handshakes": stats["handshakes"],
                "at": stats["step"],
            }
    return {"step": None, "text": "", "handshakes": run.hook.stats()["handshakes"]}


@pytest.mark.parametrize(
    ("hook", "every", "at", "found_at", "ddp"),
    [
        ("powerSGD", 1, 3, 3, {}),
        ("powerSGD", 2, 0, 0, {"static_graph": True}),
        ("allreduce", 3, 3, 3, {}),
        ("bf16", 2, 3, 4, {"find_unused_parameters": True}),
    ],
)
def test_one_changed_bit_is_found(
    run_ranks: Any, hook: str, every: int, at: int, found_at: int, ddp: dict[str, Any]
) -> None:
    results = run_ranks(_perturbed, hook, every, at, "3.weight", ddp)
    for result in results:
        assert result["step"] == found_at
        # All gradients are averages, so that it is the only one also some steps later.
        assert "they differ in parameter 3.weight (ranks [1] against rank 0)." in result["text"]
        assert f"before step {found_at}" in result["text"]
        assert result["at"] == found_at  # that step was not taken


def _equal(every: int | None) -> tuple[int, torch.Tensor]:
    run = Run.new(hook_options=OPTIONS, check_every=every).train(5)
    return run.hook.stats()["handshakes"], run.weights()


def test_equal_replicas_train_as_without_comparisons(run_ranks: Any) -> None:
    without, every_4 = run_ranks(_equal, None), run_ranks(_equal, 4)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(without, every_4, strict=True))
    # Two small exchanges before steps 0 and 4.
    assert [b[0] - a[0] for a, b in zip(without, every_4, strict=True)] == [4, 4]


def _uneven() -> tuple[int, torch.Tensor]:
    """Rank 1 runs out of data after 3 steps and shadows the others with older weights."""
    run = Run.new(hook_options=OPTIONS, check_every=1)
    with Join([run.ddp]):
        run.train(3 if dist.get_rank() == 1 else 6)
    return run.hook.stats()["step"], run.weights()


def test_a_rank_without_data_is_left_out(run_ranks: Any) -> None:
    (steps_0, weights_0), (steps_1, weights_1) = run_ranks(_uneven)
    assert steps_0 == steps_1 == 6
    assert torch.equal(weights_0, weights_1)


class OfNoSize(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def _nothing_to_compare() -> int:
    ddp = DistributedDataParallel(OfNoSize())
    hook = commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0}, check_every=1)
    for _ in range(2):
        ddp().backward()
    return hook.stats()["backward_passes"]


def test_a_model_without_a_single_number_is_compared(run_ranks: Any) -> None:
    assert run_ranks(_nothing_to_compare) == [2, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3000, dtype=torch.float64),
        torch.randn(5, 300).to(torch.bfloat16),
        torch.randn(40, 60).half().t(),
        torch.randn(33, dtype=torch.complex64),
        torch.rand(1021) > 0.5,
        torch.tensor(1.5),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)
def test_a_fingerprint_sees_every_bit_and_the_order(tensor: torch.Tensor) -> None:
    whole = checksum(tensor)
    assert whole == checksum(tensor.clone())
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        changed = tensor.clone().contiguous().view(-1)
        changed[place : place + 1].view(torch.uint8)[0] ^= 1
        assert checksum(changed.view(tensor.shape)) != whole
    if tensor.numel() > 2 and tensor.dtype != torch.bool:
        swapped = tensor.clone().contiguous().view(-1)
        swapped[:2] = swapped[:2].flip(0)
        assert checksum(swapped.view(tensor.shape)) != whole

"""What error feedback has left when `auto` changes to something that keeps no residuals: it is sent, once, whatever
the pass of the change looks like."""

import copy
from typing import Any

import torch
import torch.distributed as dist

from commhooks.compressors.registry import register_compressor
from tests.support.inside import session_of
from tests.support.prescribed_auto import TRIAL, PrescribedAuto, PrescribedAutoCompressor, decision_of, new
from tests.support.training import Run, batch, make_model, residuals

LAST_BUCKET = ["7.*", "5.bias"]
"""The parameters of the first bucket that DDP fills."""


def _mean_gradient(run: Run) -> torch.Tensor:
    """The true mean at the weights of this moment, of the next step's batch."""
    model = copy.deepcopy(run.ddp.module)
    images, labels = batch(run.step, dist.get_rank())
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
    dist.all_reduce(own)
    return own / dist.get_world_size()


def _sent_in_the_end() -> dict[str, Any]:
    run = new(tried_s=2.0, bf16_s=None)  # worse than all-reduce
    true, kept, labels = torch.zeros((), dtype=torch.float64), [], []
    for _ in range(2 + TRIAL + 2):
        true = true + _mean_gradient(run)
        run.train(1)
        kept.append(bool(residuals(run.hook)))
        labels.append(run.hook.stats()["chosen"])
    applied = torch.stack(run.gradients).double().sum(0)
    return {
        "labels": labels,
        "kept": kept,
        "error": float((applied - true).norm() / true.norm()),
        "weights": run.weights(),
        "decision": decision_of(run),
    }


def test_a_choice_that_does_not_hold_is_taken_back_and_nothing_is_lost(run_ranks: Any) -> None:
    """After the change back, all gradients that error feedback had left were applied, to rounding."""
    ranks = run_ranks(_sent_in_the_end)
    for rank in ranks:
        assert rank["labels"] == ["allreduce"] * 2 + ["int8"] * TRIAL + ["allreduce"] * 2
        assert rank["kept"] == [False] * 2 + [True] * TRIAL + [False] * 2
        assert rank["error"] < 1e-6
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["decision"].phase == "resting" and rank["decision"].switches == 2


def _another_bucket_is_not_finite() -> dict[str, Any]:
    """int8 is taken back in a pass in which the bucket without residuals overflows on one rank."""
    run = new(tried_s=2.0, bf16_s=None, exclude=LAST_BUCKET).train(2 + TRIAL)
    before = residuals(run.hook)
    bias = run.ddp.module[7].bias  # type: ignore[index]
    spoil = bias.register_hook(lambda gradient: gradient / (0.0 if dist.get_rank() == 0 else 1.0))
    images, labels = batch(run.step, dist.get_rank())
    torch.nn.functional.cross_entropy(run.ddp(images), labels).backward()  # no step: a GradScaler would skip it
    spoil.remove()
    after, finite = residuals(run.hook), bool(bias.grad.isfinite().all())
    owed = _mean_gradient(run)
    at = 0
    for name, parameter in run.ddp.module.named_parameters():
        if name in before:
            left = before[name].double()
            dist.all_reduce(left)
            owed[at : at + parameter.numel()] += left / dist.get_world_size()
        at += parameter.numel()
    run.train(1)
    return {
        "chosen": run.hook.stats()["chosen"],
        "alone": [
            list(names) for names in session_of(run.hook).consensus.buckets.names() if not set(names) & before.keys()
        ],
        "finite": finite,
        "kept": before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before),
        "error": float((run.gradients[-1] - owed).norm() / owed.norm()),
        "end": residuals(run.hook),
        "nonfinite_steps": run.hook.stats()["nonfinite_steps"],
    }


def test_what_is_left_waits_if_another_bucket_of_the_pass_is_not_finite(run_ranks: Any) -> None:
    for rank in run_ranks(_another_bucket_is_not_finite):
        assert rank["alone"] == [["7.bias", "7.weight", "5.bias"]] and not rank["finite"]
        assert rank["chosen"] == "allreduce" and rank["kept"] and rank["nonfinite_steps"] == 1
        assert rank["error"] < 1e-6 and rank["end"] == {}


class Branching(torch.nn.Module):
    """A part of it is not used while it `skips`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = make_model(), torch.nn.Linear(10, 10)
        self.skips = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.trunk(images)
        return scores if self.skips else scores + self.branch(scores)


def _branch_is_not_used_at_the_change() -> dict[str, Any]:
    register_compressor(PrescribedAutoCompressor)
    options = {"find_unused_parameters": True}
    run = Run.new(Branching(), hook=PrescribedAuto(tried_s=2.0, bf16_s=None), ddp=options).train(2 + TRIAL)
    model: Any = run.ddp.module
    before = residuals(run.hook)["branch.weight"]
    model.skips = True
    run.train(1)  # int8 is taken back
    after = residuals(run.hook)
    saved = run.save(residual="per_rank")
    again = Run.new(Branching(), hook=PrescribedAuto(tried_s=2.0, bf16_s=None), ddp=options).load(saved)
    model.skips = False
    true = _mean_gradient(run)[-110:-10]  # of branch.weight
    left = before.double()
    dist.all_reduce(left)
    run.train(1)
    again.train(1)
    saved["hook"]["loss_scale"] = 2.0
    scaled = Run.new(Branching(), hook=PrescribedAuto(tried_s=2.0, bf16_s=None), ddp=options).load(saved)
    scaled.ddp.module.skips = True  # type: ignore[assignment]
    scaled.train(1)
    return {
        "scaled": residuals(scaled.hook)["branch.weight"],
        "chosen": run.hook.stats()["chosen"],
        "kept": after,
        "applied": model.branch.weight.grad.flatten().double(),
        "owed": true + left / dist.get_world_size(),
        "before": before,
        "end": [residuals(each.hook) for each in (run, again)],
        "weights": [each.weights() for each in (run, again)],
    }


def test_what_is_left_for_a_branch_that_is_not_used_at_the_change_waits_for_its_next_gradient(run_ranks: Any) -> None:
    """DDP drops what the hook returns for it. Also through a checkpoint that is made meanwhile."""
    for rank in run_ranks(_branch_is_not_used_at_the_change):
        assert rank["chosen"] == "allreduce" and rank["before"].any()
        assert rank["kept"].keys() == {"branch.weight"} and torch.equal(rank["kept"]["branch.weight"], rank["before"])
        assert torch.allclose(rank["applied"], rank["owed"], rtol=1e-5, atol=1e-8)
        assert torch.equal(rank["scaled"], rank["before"] / 2)
        assert rank["end"] == [{}, {}] and torch.equal(*rank["weights"])

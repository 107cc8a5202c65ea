"""The doctor on real ranks: what it measures, and that it leaves everything as it was."""

import inspect
import json
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.tools.doctor.copies import copy_of
from tests.support.ddp_steps import batch, mlp, wrap
from tests.support.doctor_models import Net, loss_of
from tests.support.training import plain
from tests.support.workers import RanksFailed


def _everything(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, hook: Any) -> dict[str, Any]:
    everything = {
        "weights and buffers": ddp.state_dict(),
        "gradients": [p.grad for p in ddp.parameters()],
        "optimizer": optimizer.state_dict(),
        "hook": hook.state_dict(),
        "stats": hook.stats(),
        "random": [torch.get_rng_state(), random.getstate()],
        "hooks of modules": [len(m._forward_pre_hooks) for m in ddp.modules()],
        "training": [m.training for m in ddp.modules()],
    }
    return plain(everything)


def _in_the_middle_of_a_training(consult: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    ddp = wrap(Net())
    hook = commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 1})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(ddp).backward()
            optimizer.step()

    train(3)
    seen: dict[str, Any] = {}
    if consult:
        before = _everything(ddp, optimizer, hook)
        copies: set[Any] = set()
        lines: list[str] = []

        def batch_fn(model: nn.Module) -> torch.Tensor:
            copies.update(weakref.ref(p) for p in model.parameters())
            alive = sum(p() is not None for p in copies)
            assert alive == len(list(model.parameters())), "one copy at a time"
            return loss_of(model)

        with torch.no_grad():  # as in a validation loop
            report = commhooks.doctor(ddp, batch_fn, steps=4, powersgd_ranks=[1, 2], progress=lines.append)
        after = _everything(ddp, optimizer, hook)
        seen = {
            "changed": [key for key in before if before[key] != after[key]],
            "copies": len(copies) // len(list(ddp.parameters())),
            "copies left": sum(p() is not None for p in copies),
            "lines": lines,
            "report": report.as_dict(),
            "text": str(report),
        }
    train(2)
    seen["weights"] = plain(ddp.state_dict())
    seen["compressed"] = hook.stats()["compressed_steps"]
    return seen


def test_a_training_goes_on_as_if_nobody_had_asked(run_ranks: Callable[..., list[Any]]) -> None:
    without = run_ranks(_in_the_middle_of_a_training, False)
    ranks = run_ranks(_in_the_middle_of_a_training, True)
    for unasked, asked in zip(without, ranks, strict=True):
        assert asked["changed"] == []
        assert asked["copies"] >= 6 and asked["copies left"] == 0
        assert unasked["weights"] == asked["weights"]
        assert asked["compressed"] == unasked["compressed"] == 4
    # ---- and what it found, the same on both ranks, bit for bit
    assert ranks[0]["report"] == ranks[1]["report"] and ranks[0]["text"] == ranks[1]["text"]
    report = ranks[0]["report"]
    json.dumps(report)
    figures = report["candidates"]
    labels = ["noop", "allreduce", "fp16", "bf16", "int8", "int4"]
    labels += ["powerSGD rank 1", "powerSGD rank 2"]
    assert list(figures) == labels
    gradient = 4 * sum(p.numel() for p in Net().parameters())
    assert report["gradient_bytes"] == gradient and report["world_size"] == 2 and report["backend"] == "gloo"
    sent = {label: figures[label]["bytes_sent"] for label in labels}
    assert sent["noop"] == 0 and sent["allreduce"] == gradient and sent["fp16"] == sent["bf16"] == gradient / 2
    assert 0 < sent["int4"] < sent["int8"] < gradient / 2
    assert 0 < sent["powerSGD rank 1"] < sent["powerSGD rank 2"] < gradient / 2
    for label, each in figures.items():
        assert len(each["step_ms"]) == 4 and all(ms > 0 for ms in each["step_ms"]), label
    # ---- they took turns, each round in another order
    turns = [line.rpartition(": ")[2] for line in ranks[0]["lines"] if line.startswith("round")]
    rounds = [turns[i : i + 8] for i in range(0, 24, 8)]
    assert len(turns) == 24 and all(sorted(each) == sorted(labels) for each in rounds)
    assert len({each[0] for each in rounds}) == 3
    assert f"{report['chosen']} <-" in ranks[0]["text"]


def _options_of_copies() -> list[Any]:
    taken = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in taken else "broadcast_buffers"
    found = []
    for options in (
        {},
        {"bucket_cap_mb": None},
        {"bucket_cap_mb_list": [1, 2]},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, buffers: False},
        {"static_graph": True, "process_group": dist.new_group()},
    ):
        if not options.keys() <= taken.keys():  # torch 2.8 has no list of limits
            continue
        ddp = DistributedDataParallel(Net(), **options) if "bucket_cap_mb_list" in options else wrap(Net(), **options)
        twin = copy_of(ddp)
        names = ["bucket_bytes_cap", "bucket_bytes_cap_default", "find_unused_parameters"]
        names += ["gradient_as_bucket_view", buffers, "static_graph", "process_group"]
        names += ["bucket_bytes_cap_list"] if "bucket_cap_mb_list" in taken else []
        found.append([(name, getattr(ddp, name) == getattr(twin, name)) for name in names])
        own = {p.data_ptr() for p in ddp.module.parameters()}
        found.append([("copied", own.isdisjoint(p.data_ptr() for p in twin.module.parameters()))])
    return found


def test_copies_are_wrapped_as_the_model_is(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(_options_of_copies):
        assert [name for each in rank for name, same in each if not same] == []


def _other_arguments() -> None:
    commhooks.doctor(wrap(mlp()), loss_of, steps=1 + dist.get_rank())


def test_ranks_that_ask_for_different_things(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_other_arguments, timeout_s=20)
    for rank in range(2):
        assert failed.value.errors[rank].message.startswith(
            "ranks [1] call the doctor with other arguments than rank 0"
        )


SLOW_S = 0.08


def _slow_rank() -> Any:
    ddp = wrap(mlp())

    def batch_fn(model: nn.Module) -> torch.Tensor:
        time.sleep(SLOW_S if dist.get_rank() == 1 else 0)
        return model(batch(0)).square().mean()

    report = commhooks.doctor(ddp, batch_fn, steps=2, powersgd_ranks=[1], powersgd_options={"exclude": ["4.*"]})
    short = commhooks.doctor(ddp, batch_fn, steps=9, seconds=0.001, powersgd_ranks=[])
    thin = wrap(nn.Linear(24, 1))
    useless = commhooks.doctor(thin, batch_fn, steps=1)
    return report.as_dict(), short.as_dict(), useless.as_dict(), str(useless)


def test_the_slowest_rank_decides_and_options(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(_slow_rank)
    assert ranks[0] == ranks[1]
    report, short, useless, text = ranks[0]
    for label, each in report["candidates"].items():
        assert min(each["step_ms"]) >= 1000 * SLOW_S, label  # on both ranks
    assert report["candidates"]["powerSGD rank 1"]["hook_options"]["exclude"] == ["4.*"]
    # `seconds` ends a candidate, after one measured step at least.
    assert {len(each["step_ms"]) for each in short["candidates"].values()} == {1}
    assert list(short["candidates"]) == ["noop", "allreduce", "fp16", "bf16", "int8", "int4"]
    assert useless["not_measured"] == ["int8", "powerSGD rank 1", "powerSGD rank 2", "powerSGD rank 4"]
    assert "powerSGD rank 2 compresses no parameter of this model: not measured." in text


def _errors() -> tuple[dict[str, Any], dict[str, float]]:
    """Of the doctor, and by hand: what each hook makes of the gradients of one batch. Every batch is another one."""
    ddp, seed = wrap(mlp()), iter(range(1000))

    def batch_fn(model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * next(seed) + dist.get_rank())
        return model(torch.randn(8, 24, generator=generator)).square().mean()

    found = commhooks.doctor(ddp, batch_fn, steps=1, powersgd_ranks=[1, 4]).as_dict()["candidates"]
    gradients = {}
    for label, each in found.items():
        again, seed = copy_of(ddp), iter(range(1000))
        commhooks.attach(again, each["hook"], hook_options=each["hook_options"] or None)
        batch_fn(again).backward()
        gradients[label] = torch.cat([p.grad.double().flatten() for p in again.parameters()])
    mean = gradients["allreduce"]
    return found, {label: float((each - mean).norm() / mean.norm()) for label, each in gradients.items()}


def test_the_error_is_that_of_one_step(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(_errors)
    errors = [{label: each["error"] for label, each in found.items()} for found, _ in ranks]
    assert errors[0] == errors[1]
    found, by_hand = errors[0], ranks[0][1]
    for label in found.keys() - {"noop"}:
        assert found[label] == pytest.approx(by_hand[label], rel=1e-3, abs=1e-9), label
    assert found["noop"] is None and found["allreduce"] == 0
    assert 0 < found["fp16"] < found["bf16"] < found["int8"] < found["int4"] < found["powerSGD rank 1"]
    assert found["powerSGD rank 4"] < found["powerSGD rank 1"] < 1

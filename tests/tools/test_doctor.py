"""The doctor on real ranks: what it measures, refuses and recommends, and that it leaves everything as it was."""

import contextlib
import inspect
import io
import json
import os
import random
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import DoctorError
from commhooks.auto.options import ALLREDUCE, BF16, FP16, INT8, NOOP, powersgd
from commhooks.tools.cli import main
from commhooks.tools.doctor import DoctorReport, Measured, check_model, copy_of, wrapped
from tests.support.ddp_steps import backward, batch, descend, mlp, process_group_of_one, wrap
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
            report = commhooks.doctor(ddp, batch_fn, steps=3, powersgd_ranks=[1, 2], progress=lines.append)
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
        assert len(each["step_ms"]) == 3 and all(ms > 0 for ms in each["step_ms"]), label
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
            "ranks [1] call the doctor with different arguments than rank 0"
        )


SLOW_S = 0.08


@mock.patch("commhooks.tools.doctor.ROUNDS", 1)
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


@mock.patch("commhooks.tools.doctor.ROUNDS", 1)
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


# ---- what it refuses, on all ranks -----------------------------------------------------------------------------------

WRONG_FUNCTIONS = {
    "no argument": "batch_fn cannot be called with one argument (too many positional arguments)",
    "dict": "batch_fn returned a dict. batch_fn(model) makes a batch, calls the model that it is given",
    "shape": "batch_fn returned a tensor of shape (8, 24)",
    "detached": "batch_fn returned a tensor without a gradient",
    "original": "batch_fn called your own model instead of the copy",
    "module": "batch_fn called your own model instead of the copy",
    "other model": "does not depend on the parameters of the model that it was given",
    "raises": "raised KeyError: 'no such column' (",
}


def _wrong() -> dict[str, str]:
    """The message about each of these functions; training goes on after each."""
    ddp = wrap(mlp())
    inputs, other = batch(1), nn.Linear(24, 1)

    def raises(model: nn.Module) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such column")
        return model(inputs).mean()

    functions: dict[str, Any] = {
        "no argument": lambda: inputs.mean(),
        "dict": lambda model: {"loss": model(inputs).mean()},
        "shape": lambda model: model(inputs),
        "detached": lambda model: model(inputs).mean().detach(),
        "original": lambda model: ddp(inputs).mean(),
        "module": lambda model: ddp.module(inputs).mean(),
        "other model": lambda model: other(inputs).mean(),
        "raises": raises,
    }
    found = {}
    for case, function in functions.items():
        backward(ddp, 0)
        before = [p.grad.clone() for p in ddp.parameters()]
        with pytest.raises(DoctorError) as raised:
            commhooks.doctor(ddp, function, steps=1)
        found[case] = str(raised.value)
        assert all(torch.equal(b, p.grad) for b, p in zip(before, ddp.parameters(), strict=True))
        descend(ddp)
    return found


def test_a_batch_fn_that_does_not_work(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(_wrong)
    for case, sentence in WRONG_FUNCTIONS.items():
        assert sentence in second[case] and sentence in first[case]
    assert "test_doctor.py, line " in second["raises"]
    assert first["raises"].startswith("rank 1 cannot go on: batch_fn or the backward pass")


def _bad_arguments() -> None:
    ddp = wrap(mlp())
    for arguments, text in (
        ({"steps": 0}, "steps=0; expected a number of steps, 1 or more"),
        ({"steps": True}, "steps=True"),
        ({"seconds": 0}, "seconds=0; expected a positive number"),
        ({"powersgd_ranks": [0]}, "matrix_approximation_rank=0; expected at least 1"),
        ({"powersgd_options": {"exclud": []}}, "did you mean 'exclude'"),
        ({"powersgd_options": {"start_powerSGD_iter": 3}}, "is set by the doctor"),
    ):
        with pytest.raises((DoctorError, commhooks.HookConfigError)) as raised:
            commhooks.doctor(ddp, loss_of, **arguments)  # type: ignore[arg-type]
        assert text in str(raised.value)
    half, frozen, locked = wrap(mlp()), wrap(mlp()), wrap(mlp())
    half.mixed_precision = object()  # type: ignore[assignment]
    frozen.module.requires_grad_(False)
    with open(os.devnull) as locked.module.lock:
        for model, text in ((half, "occupies the"), (frozen, "no parameter"), (locked, "cannot be copied.*TypeError")):
            with pytest.raises(DoctorError, match=text):
                commhooks.doctor(model, loss_of)


def test_bad_arguments(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_bad_arguments)


def test_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        with pytest.raises(DoctorError, match="one rank only: there is nothing to exchange"):
            check_model(ddp)
        with pytest.raises(DoctorError, match="expected a torch.nn.parallel.DistributedDataParallel model, got a t"):
            check_model(mlp())
        assert main(["doctor", "test_doctor:frozen"]) == 1
        assert "commhooks doctor: one rank only" in capsys.readouterr().err
        with mock.patch.object(dist, "get_world_size", return_value=2):
            assert main(["doctor", "test_doctor:frozn"]) == 1
        assert capsys.readouterr().err.endswith("'test_doctor' has no 'frozn' (did you mean 'frozen'?)\n")
    with pytest.raises(DoctorError, match="no process group: the doctor measures on the ranks"):
        check_model(ddp)
    assert main(["doctor", "test_doctor:frozen"]) == 1
    assert "commhooks doctor: no process group" in capsys.readouterr().err


def frozen() -> Any:
    return mlp().requires_grad_(False), loss_of


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: mlp(), "build returned a Sequential; expected (model, batch_fn)"),
        (lambda: (loss_of, mlp()), "build returned (a function, ...); expected an nn.Module"),
        (lambda: (mlp(), None), "build returned (model, a NoneType); expected a function: batch_fn(model) makes"),
        (frozen, "no parameter of this model requires a gradient"),
        (lambda: (nn.Sequential(), loss_of), "no parameter of this model requires a gradient"),
    ],
)
def test_what_build_returns(build: Callable[[], Any], sentence: str) -> None:
    with process_group_of_one(), pytest.raises(DoctorError) as raised:
        wrapped(build())
    assert sentence in str(raised.value)


def _command() -> tuple[str, str]:
    """Output and errors on a rank that torchrun has started."""
    arguments = ["doctor", "examples.doctor_transformer:build", "--steps", "1", "--powersgd-ranks", "2", "--json"]
    small = mock.patch.multiple("examples.doctor_transformer", WORDS=100, WIDTH=32, LENGTH=8)
    with (
        small,
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        assert main(arguments) == 0
    return output.getvalue(), errors.getvalue()


def test_the_command(run_ranks: Callable[..., list[Any]]) -> None:
    (output, errors), other = run_ranks(_command)
    assert errors.count("commhooks doctor: round 1 of 1: noop") == 1
    assert "commhooks: powerSGD" not in errors  # that line is for trainings
    content = json.loads(output)
    assert content["world_size"] == 2 and content["gradient_bytes"] > 0
    assert content["candidates"]["powerSGD rank 2"]["error"] > content["candidates"]["int8"]["error"] > 0
    assert other == ("", "")


# ---- the report ------------------------------------------------------------------------------------------------------

MB = [(NOOP, 0), (ALLREDUCE, 100), (FP16, 50), (BF16, 50), (INT8, 25), *((powersgd(r, {}), r / 2) for r in (1, 2, 4))]


def report_of(**ms: float) -> DoctorReport:
    """`r4=...` is PowerSGD at rank 4; megabytes as a model of 100 MB would send them."""
    known = {each.label.replace("powerSGD rank ", "r"): (each, mb) for each, mb in MB}
    found = {}
    for name, value in ms.items():
        candidate, mb = known[name]
        made = Measured(candidate, [value, value - 1, value + 1], int(mb * 1e6), 100_000_000)
        made.error = None if candidate is NOOP else candidate.changes / 4
        found[candidate.label] = made
    return DoctorReport(found, 2, "gloo", ("int4",))


@pytest.mark.parametrize(
    ("report", "chosen"),
    [
        # Measured on a link between two namespaces at 100 Mbit/s, 1 Gbit/s and without a limit, and made-up ones.
        (report_of(noop=24, allreduce=1539, fp16=773, bf16=756, r1=46, r2=59, r4=76), "powerSGD rank 1"),
        (report_of(noop=37, allreduce=156, fp16=95, bf16=94, r1=41, r2=42, r4=53), "powerSGD rank 2"),
        (report_of(noop=25, allreduce=45, fp16=47, bf16=43, r1=42, r2=42, r4=47), "allreduce"),
        # Half the bytes are about as good: the gradients stay what they are.
        (report_of(noop=50, allreduce=100, fp16=60, bf16=62, r1=58), "bf16"),
        (report_of(noop=50, allreduce=100, r1=92), "allreduce"),
    ],
)
def test_the_choice(report: DoctorReport, chosen: str) -> None:
    assert report.chosen == json.loads(json.dumps(report.as_dict()))["chosen"] == chosen
    text = str(report)
    assert f"{chosen} <-" in text and text.count("<-") == 1
    assert ("train without one" in text) == (chosen == "allreduce") != ("commhooks.attach(ddp_model, " in text)


def test_the_table() -> None:
    report = report_of(noop=192, allreduce=1093, fp16=592, r1=277)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines()]
    assert ["noop", "192.0", "(191.5", "..", "192.5)", "5.69", "0.000", "-"] in rows
    assert ["allreduce", "1093.0", "(1092.5", "..", "1093.5)", "1.00", "100.000", "0"] in rows
    assert ["powerSGD", "rank", "1", "<-", "277.0", "(276.5", "..", "277.5)", "3.95", "0.500", "0.75"] in rows
    assert "commhooks.attach(ddp_model, 'powerSGD', hook_options={'matrix_approximation_rank': 1})" in text
    assert "int4 compresses no parameter of this model: not measured." in text
    report.measured["fp16"].error = float("inf")
    assert report.as_dict()["candidates"]["fp16"]["error"] is None and "  inf" in str(report)

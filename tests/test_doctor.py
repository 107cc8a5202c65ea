"""The doctor: what it measures, what it makes of it, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_steps import backward, batch, descend, mlp, process_group_of_one, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import RanksFailed

import commhooks
from commhooks import DoctorError, doctor_command
from commhooks.cli import main
from commhooks.doctor_copies import copy_of
from commhooks.doctor_judge import Advice, estimate_ms, judge, pays_below
from commhooks.doctor_link import Link, wire_s
from commhooks.doctor_measure import Candidate, Measured, quartiles
from commhooks.doctor_report import DoctorReport, bandwidth, check_output

REPOSITORY = Path(__file__).parents[1]


class Net(nn.Module):
    """Something of all that could be changed by accident: weights, buffers, random numbers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(24)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.norm(self.body(x)))


def loss_of(model: nn.Module) -> torch.Tensor:
    """Draws from every global generator."""
    return (model(torch.randn(8, 24)) * random.random()).square().mean()


# ------------------------------------------------------------------------------------------- nothing of yours changes


def _everything(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, hook: Any) -> dict[str, Any]:
    stats = {k: v for k, v in hook.stats().items()}
    return copy.deepcopy(
        {
            "weights and buffers": ddp.state_dict(),
            "gradients": [p.grad for p in ddp.parameters()],
            "optimizer": optimizer.state_dict(),
            "hook": hook.state_dict(),
            "stats": stats,
            "random": (torch.get_rng_state(), random.getstate()),
            "hooks of modules": [len(m._forward_pre_hooks) for m in ddp.modules()],
            "training": [m.training for m in ddp.modules()],
        }
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


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
            "changed": [key for key in before if not _equal(before[key], after[key])],
            "copies": len(copies) // len(list(ddp.parameters())),
            "copies left": sum(p() is not None for p in copies),
            "lines": lines,
            "report": report.as_dict(),
            "text": str(report),
        }
    train(2)
    seen["weights"] = {name: value.clone() for name, value in ddp.state_dict().items()}
    seen["compressed"] = hook.stats()["compressed_steps"]
    return seen


def test_a_training_goes_on_as_if_nobody_had_asked(run_ranks: Callable[..., list[Any]]) -> None:
    without = run_ranks(_in_the_middle_of_a_training, False)
    ranks = run_ranks(_in_the_middle_of_a_training, True)
    for plain, asked in zip(without, ranks, strict=True):
        assert asked["changed"] == []
        assert asked["copies"] >= 6 and asked["copies left"] == 0
        assert _equal(plain["weights"], asked["weights"])
        assert asked["compressed"] == plain["compressed"] == 4
    # ---- and what it found, the same on both ranks, bit for bit
    assert ranks[0]["report"] == ranks[1]["report"] and ranks[0]["text"] == ranks[1]["text"]
    report = ranks[0]["report"]
    json.dumps(report)
    figures = report["candidates"]
    labels = ["noop", "allreduce", "fp16", "bf16", "powerSGD rank 1", "powerSGD rank 2"]
    assert list(figures) == labels
    gradient = 4 * sum(p.numel() for p in Net().parameters())
    assert report["gradient_bytes"] == gradient and report["world_size"] == 2 and report["backend"] == "gloo"
    sent = {label: figures[label]["bytes_sent"] for label in labels}
    assert sent["noop"] == 0 and sent["allreduce"] == gradient and sent["fp16"] == sent["bf16"] == gradient / 2
    assert 0 < sent["powerSGD rank 1"] < sent["powerSGD rank 2"] < gradient / 2
    for label, each in figures.items():
        assert len(each["step_ms"]) == len(each["codec_ms"]) == len(each["waiting_ms"]) == 4, label
        assert all(ms > 0 for ms in each["step_ms"])
        assert each["compressed_steps"] == (4 if "powerSGD" in label else 0)
        assert (each["collectives"] > 2) == (label != "noop"), label  # several buckets, as in the user's DDP
        assert all(c + w <= s for s, c, w in zip(each["step_ms"], each["codec_ms"], each["waiting_ms"], strict=True))
    assert report["link"]["mbit_per_s"] > 0 < report["link"]["latency_ms"]
    # ---- they took turns, each round in another order
    turns = [line.rpartition(": ")[2] for line in ranks[0]["lines"] if line.startswith("round")]
    rounds = [turns[i : i + 6] for i in range(0, 18, 6)]
    assert len(turns) == 18 and all(sorted(each) == sorted(labels) for each in rounds)
    assert len({each[0] for each in rounds}) == 3
    assert report["advice"]["reason"] in ranks[0]["text"].replace("\n", " ").replace("  ", " ")


def _options_of_copies() -> list[Any]:
    found = []
    for options in (
        {},
        {"bucket_cap_mb": None},
        {"bucket_cap_mb_list": [1, 2]},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "forward_sync_buffers": False},
        {"static_graph": True, "process_group": dist.new_group()},
    ):
        ddp = wrap(Net(), **options) if options != {"bucket_cap_mb_list": [1, 2]} else None
        ddp = ddp if ddp is not None else DistributedDataParallel(Net(), **options)
        twin = copy_of(ddp)
        names = ("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "find_unused_parameters")
        names += ("gradient_as_bucket_view", "forward_sync_buffers", "static_graph", "process_group")
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


def _slow_rank() -> Any:
    ddp = wrap(mlp())

    def batch_fn(model: nn.Module) -> torch.Tensor:
        time.sleep(0.03 if dist.get_rank() == 1 else 0)
        return model(batch(0)).square().mean()

    report = commhooks.doctor(
        ddp, batch_fn, steps=2, powersgd_ranks=[1], powersgd_options={"alternate": True, "exclude": ["4.*"]}
    )
    short = commhooks.doctor(ddp, batch_fn, steps=9, seconds=0.001, powersgd_ranks=[])
    thin = wrap(nn.Linear(24, 1))
    useless = commhooks.doctor(thin, batch_fn, steps=1)
    return report.as_dict(), short.as_dict(), useless.as_dict(), str(useless)


def test_the_slowest_rank_decides_and_options(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(_slow_rank)
    assert ranks[0] == ranks[1]
    report, short, useless, text = ranks[0]
    for label, each in report["candidates"].items():
        assert min(each["step_ms"]) >= 30, label  # on both ranks
        # The rank that is never waited for waits least: 30 ms of waiting for it are not the network's.
        assert min(each["waiting_ms"]) < 20, label
    assert report["candidates"]["powerSGD rank 1"]["hook_options"]["exclude"] == ["4.*"]
    # `seconds` ends a candidate, after one measured step at least.
    assert {len(each["step_ms"]) for each in short["candidates"].values()} == {1}
    assert list(short["candidates"]) == ["noop", "allreduce", "fp16", "bf16"]
    assert useless["not_measured"] == ["powerSGD rank 1", "powerSGD rank 2", "powerSGD rank 4"]
    assert "powerSGD rank 2 compresses no parameter of this model: not measured." in text


# ------------------------------------------------------------------------------------------------------------- advice


def measured(label: str, *step_ms: float, mb: float = 0.0, codec_ms: float = 0.1) -> Measured:
    hook, _, rank = label.partition(" rank ")
    options = {"matrix_approximation_rank": int(rank), "start_powerSGD_iter": 0} if rank else {}
    hook = {"fp16": "fp16_compress", "bf16": "bf16_compress"}.get(hook, hook)
    samples = list(step_ms) * (1 if len(step_ms) > 1 else 5)
    return Measured(Candidate(label, hook, options), samples, [codec_ms] * len(samples), bytes_sent=int(mb * 1e6))


def figures(**ms: float | tuple[float, ...]) -> dict[str, Measured]:
    """`r4=...` is PowerSGD at rank 4; megabytes as a model of 100 MB would send them."""
    mb = {"noop": 0, "allreduce": 100, "fp16": 50, "bf16": 50, "r1": 0.5, "r2": 1, "r4": 2}
    found = {}
    for name, value in ms.items():
        label = f"powerSGD rank {name[1:]}" if name in ("r1", "r2", "r4") else name
        found[label] = measured(label, *(value if isinstance(value, tuple) else (value,)), mb=mb[name])
    return found


def advice(found: dict[str, Measured], mbit_per_s: float = 1000) -> Advice:
    return judge(found, Link(mbit_per_s, 0.2), world_size=2)


# Those measured on a link between two namespaces at 100 Mbit/s, 1 Gbit/s and without a limit, and made-up ones.
@pytest.mark.parametrize(
    "found, use",
    [
        (figures(noop=24, allreduce=1539, fp16=773, bf16=756, r1=46, r2=59, r4=76), "powerSGD rank 1"),
        (figures(noop=37, allreduce=156, fp16=95, bf16=94, r1=41, r2=42, r4=53), "powerSGD rank 2"),
        (figures(noop=25, allreduce=45, fp16=47, bf16=43, r1=40, r2=40, r4=47), "allreduce"),
        (figures(noop=192, allreduce=1093, fp16=592, bf16=590, r1=277, r4=297), "powerSGD rank 4"),
        # A fast network: nothing could be won, whatever a lucky candidate shows.
        (figures(noop=95, allreduce=100, fp16=70, bf16=99, r1=60), "allreduce"),
        # Half the bytes are about as good: the gradients stay what they are.
        (figures(noop=50, allreduce=100, fp16=60, bf16=62, r1=58), "bf16"),
        (figures(noop=50, allreduce=100, fp16=60, bf16=90, r1=58), "fp16"),
        # Faster in the middle, and not to be told from chance.
        (figures(noop=50, allreduce=(60, 90, 100, 110, 120), r1=(20, 30, 70, 95, 100)), "allreduce"),
        (figures(noop=50, allreduce=(98, 99, 100, 110, 120), r1=(20, 30, 70, 75, 79)), "powerSGD rank 1"),
        (figures(noop=50, allreduce=100, r1=84), "allreduce"),
        (figures(noop=50, allreduce=100, r1=82), "powerSGD rank 1"),
        (figures(noop=50, allreduce=100), "allreduce"),
    ],
)
def test_advice(found: dict[str, Measured], use: str) -> None:
    told = advice(found)
    assert told.use == use and told.compress == (use != "allreduce")
    assert told.reason.startswith(f"Use {use}. " if told.compress else "Do not compress. ")
    assert told.headroom == pytest.approx(found["allreduce"].median_ms / found["noop"].median_ms)
    assert told.speedup == pytest.approx(found["allreduce"].median_ms / found[use].median_ms)
    assert (told.hook is not None) == told.compress
    if "powerSGD" in use:
        assert told.hook_options == {"matrix_approximation_rank": int(use[-1])}
        assert any("compare the accuracy" in note for note in told.notes)
    assert any("GradScaler" in note for note in told.notes) == (use == "fp16")


def test_advice_says_why_not_and_what_is_uncertain() -> None:
    assert "no hook could make it faster by more than 5 %" in advice(figures(noop=95, allreduce=100)).reason
    assert "the fastest, powerSGD rank 1, takes 90 ms" in advice(figures(noop=50, allreduce=100, r1=90)).reason
    steady = advice(figures(noop=50, allreduce=100, r1=60))
    assert not any("vary a lot" in note or "fewer than 5" in note for note in steady.notes)
    busy = figures(noop=24, allreduce=156, r1=45)
    busy["powerSGD rank 1"].codec_ms = [15.0] * 5
    assert any("the option fused=True is faster" in note for note in advice(busy).notes)
    busy["powerSGD rank 1"].candidate.options["fused"] = True  # type: ignore[index]
    assert not any("fused" in note for note in advice(busy).notes + steady.notes)
    shaky = advice(figures(noop=(20, 50, 90), allreduce=(100, 100, 100)))
    assert [note[:25] for note in shaky.notes] == ["The steps of noop vary a ", "Some figures come from fe"]


def test_estimates_meet_the_measured_point_and_fall_with_bandwidth() -> None:
    found, link = figures(noop=50, allreduce=450, fp16=250, r1=60), Link(2000, 0.2)
    grid = [10**i for i in range(8)]
    for each in found.values():
        assert estimate_ms(each, found["noop"], link, 2000, 2) == pytest.approx(each.median_ms)
        curve = [estimate_ms(each, found["noop"], link, mbit_per_s, 2) for mbit_per_s in grid]
        assert curve == sorted(curve, reverse=True) and curve[-1] == pytest.approx(50, abs=0.2)
    plain = found["allreduce"]
    assert estimate_ms(plain, found["noop"], link, 200, 2) == pytest.approx(50 + 4000, rel=0.01)
    # What is hidden here is not hidden on a slower link: 100 MB at 100 Mbit/s are 8 s.
    hidden = figures(noop=500, allreduce=500)
    assert estimate_ms(hidden["allreduce"], hidden["noop"], link, 100, 2) == pytest.approx(500 + 8000 - 400)
    # On a faster one its bytes are gone from the step before all of their time is: half of these 400 ms are hidden.
    half = figures(noop=500, allreduce=700)
    assert estimate_ms(half["allreduce"], half["noop"], link, 4000, 2) == pytest.approx(500.1)
    assert wire_s(100e6, 1000, 2) == pytest.approx(0.8) and wire_s(100e6, 1000, 4) == pytest.approx(1.2)
    # The codec of 10 ms pays until the network's share is about 1.2 times the gain.
    below = pays_below(found, link, 2)
    assert below is not None and below > 2000
    assert advice(found, 2000).pays_below_mbit_per_s == below
    assert pays_below(figures(noop=50, allreduce=50), link, 2) is None


def test_noise_does_not_let_more_bytes_win_on_a_slow_link() -> None:
    # Measured with other things going on: rank 1 and plain all-reduce came out far too slow.
    found, link = figures(noop=50, allreduce=900, fp16=250, r1=100, r4=55), Link(2000, 0.2)
    for mbit_per_s in (1, 10, 30):
        curves = {label: estimate_ms(each, found["noop"], link, mbit_per_s, 2) for label, each in found.items()}
        assert sorted(curves, key=curves.__getitem__) == sorted(curves, key=lambda label: found[label].bytes_sent)
    # Half a megabyte at 10 Mbit/s: what took long for another reason here does not take 200 times as long there.
    assert estimate_ms(found["powerSGD rank 1"], found["noop"], link, 10, 2) == pytest.approx(100 + 400 - 2)
    # Nor does it make a hook look worthwhile where there is nothing to win.
    assert estimate_ms(found["allreduce"], found["noop"], link, 1e7, 2) == pytest.approx(50, abs=0.3)
    below = pays_below(found, link, 2)
    assert below is not None and below < 200_000


def test_quartiles_and_bandwidths() -> None:
    assert quartiles([3.0]) == (3, 3) and quartiles([1, 2, 3, 4, 5]) == (2, 4)
    assert [bandwidth(x) for x in (94.3, 956, 999, 9600, 1.2e5)] == [
        "94 Mbit/s", "960 Mbit/s", "1 Gbit/s", "9.6 Gbit/s", "120 Gbit/s",
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------- table and picture


def report_of(found: dict[str, Measured], mbit_per_s: float = 1000) -> DoctorReport:
    found["allreduce"].bytes_uncompressed = 100_000_000
    return DoctorReport(found, Link(mbit_per_s, 0.2), advice(found, mbit_per_s), 2, "gloo")


def test_the_table() -> None:
    text = str(report_of(figures(noop=192, allreduce=1093, fp16=592, r1=277)))
    assert max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines()]
    assert ["allreduce", "1093.0", "(1093.0", "..", "1093.0)", "1.00", "100.000", "0.1", "-"] in rows
    assert ["powerSGD", "rank", "1", "<-", "277.0", "(277.0", "..", "277.0)", "3.95", "0.500", "0.1", "-"] in rows
    assert "commhooks.attach(ddp_model, 'powerSGD', hook_options={'matrix_approximation_rank': 1})" in text
    assert "Estimate: compression is worth it on links of up to about " in text
    text = str(report_of(figures(noop=100, allreduce=101, r1=130), 100_000))
    assert "attach(" not in text and "allreduce <-" in text and "Do not compress." in text


def test_the_picture(tmp_path: Path) -> None:
    report = report_of(figures(noop=192, allreduce=1093, fp16=592, r1=277))
    report.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    report.plot(tmp_path / "a.svg")  # text as paths, with the words in comments
    drawing = (tmp_path / "a.svg").read_text()
    for words in ("powerSGD rank 1 (estimate)", "allreduce (estimate)", "measured (median, quartiles)"):
        assert f"<!-- {words} -->" in drawing
    with pytest.raises(DoctorError, match="the plot cannot be written"):
        report.plot(tmp_path / "a.docx")


def test_what_cannot_be_written_is_said_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output(None, None)
    check_output(tmp_path / "a.json", tmp_path / "a.png")
    with pytest.raises(DoctorError, match="there is no folder .*nowhere"):
        check_output(tmp_path / "nowhere" / "a.json", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DoctorError, match=r'the plot needs matplotlib .*pip install matplotlib, or .* "plot" extra'):
        doctor_command.run(_arguments("a:b", "--plot", str(tmp_path / "a.png")))


# -------------------------------------------------------------------------------------------------------------- errors


def _wrong(case: str) -> None:
    ddp = wrap(mlp())
    backward(ddp, 0)
    before = [p.grad.clone() for p in ddp.parameters()]
    inputs = batch(1)

    def raises(model: nn.Module) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise KeyError("no such column")
        return model(inputs).mean()

    other = nn.Linear(24, 1)
    functions: dict[str, Any] = {
        "no argument": lambda: model_free(inputs),
        "dict": lambda model: {"loss": model(inputs).mean()},
        "shape": lambda model: model(inputs),
        "detached": lambda model: model(inputs).mean().detach(),
        "original": lambda model: ddp(inputs).mean(),
        "module": lambda model: ddp.module(inputs).mean(),
        "other model": lambda model: other(inputs).mean(),
        "raises": raises,
    }
    try:
        commhooks.doctor(ddp, functions[case], steps=1)
    finally:
        assert all(torch.equal(b, p.grad) for b, p in zip(before, ddp.parameters(), strict=True))
        backward(ddp, 1)  # goes on
        descend(ddp)


def model_free(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.mean()


@pytest.mark.parametrize(
    "case, sentence",
    [
        ("no argument", "batch_fn cannot be called with one argument (too many positional arguments)"),
        ("dict", "batch_fn returned a dict. batch_fn(model) makes a batch, calls the model that it is given"),
        ("shape", "batch_fn returned a tensor of shape (8, 24)"),
        ("detached", "batch_fn returned a tensor without a gradient"),
        ("original", "batch_fn called your own model instead of the copy"),
        ("module", "batch_fn called your own model instead of the copy"),
        ("other model", "does not depend on the parameters of the model that it was given"),
    ],
)
def test_a_batch_fn_that_does_not_work(case: str, sentence: str, run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_wrong, case)
    assert sorted(failed.value.errors) == [0, 1]
    for error in failed.value.errors.values():
        assert error.type_name == "DoctorError" and sentence in error.message


def test_where_it_fails_on_one_rank_all_of_them_end(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_wrong, "raises", timeout_s=20)
    texts = {rank: error.message for rank, error in failed.value.errors.items()}
    assert "raised KeyError: 'no such column' (" in texts[1] and "test_doctor.py, line " in texts[1]
    assert texts[0].startswith("rank 1 cannot go on: batch_fn or the backward pass")


def test_what_cannot_be_measured() -> None:
    with process_group_of_one():
        ddp = wrap(mlp())
        with pytest.raises(DoctorError, match="one rank only: there is nothing to exchange"):
            commhooks.doctor(ddp, loss_of)
        with pytest.raises(
            DoctorError, match="expected a torch.nn.parallel.DistributedDataParallel model, got a torch"
        ):
            commhooks.doctor(mlp(), loss_of)  # type: ignore[arg-type]
    with pytest.raises(DoctorError, match="no process group: the doctor measures on the ranks"):
        commhooks.doctor(ddp, loss_of)


def _bad_arguments() -> None:
    ddp = wrap(mlp())
    for arguments, error, text in (
        ({"steps": 0}, DoctorError, "steps=0; expected a number of steps, 1 or more"),
        ({"steps": True}, DoctorError, "steps=True"),
        ({"seconds": 0}, DoctorError, "seconds=0; expected a positive number"),
        ({"powersgd_ranks": [0]}, commhooks.HookConfigError, "matrix_approximation_rank=0; expected at least 1"),
        ({"powersgd_options": {"fusd": True}}, commhooks.HookConfigError, "did you mean 'fused'"),
        ({"powersgd_options": {"start_powerSGD_iter": 3}}, DoctorError, "is the doctor's own"),
    ):
        with pytest.raises(error) as raised:
            commhooks.doctor(ddp, loss_of, **arguments)  # type: ignore[arg-type]
        assert text in str(raised.value)
    half = DistributedDataParallel(mlp())
    half.mixed_precision = object()  # type: ignore[assignment]
    with pytest.raises(DoctorError, match="occupies the communication hook"):
        commhooks.doctor(half, loss_of)
    frozen = wrap(mlp())
    frozen.module.requires_grad_(False)
    with pytest.raises(DoctorError, match="every parameter of this model is frozen"):
        commhooks.doctor(frozen, loss_of)
    locked = wrap(mlp())
    locked.module.lock = open(os.devnull)  # noqa: SIM115
    with pytest.raises(DoctorError, match="the model cannot be copied.*TypeError"):
        commhooks.doctor(locked, loss_of)
    locked.module.lock.close()


def test_bad_arguments(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_bad_arguments)


# ---------------------------------------------------------------------------------------------------------- the command


def _arguments(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    doctor_command.add_arguments(parser)
    return parser.parse_args(words)


def frozen() -> Any:
    return mlp().requires_grad_(False), loss_of


@pytest.mark.parametrize(
    "build, sentence",
    [
        (lambda: mlp(), "build returned a Sequential; expected (model, batch_fn)"),
        (lambda: (loss_of, mlp()), "build returned (a function, ...); expected an nn.Module"),
        (lambda: (mlp(), None), "build returned (model, a NoneType); expected a function: batch_fn(model) makes"),
        (frozen, "the model has no parameter that requires a gradient"),
        (lambda: (nn.Sequential(), loss_of), "the model has no parameter that requires a gradient"),
    ],
)
def test_what_build_returns(build: Callable[[], Any], sentence: str) -> None:
    with process_group_of_one(), pytest.raises(DoctorError) as raised:
        doctor_command.build_model(build)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("test_doctor.frozen", "expected 'package.module:function' with the full name of the module"),
        ("no_such_module:build", "cannot import 'no_such_module': No module named 'no_such_module'; start where"),
        ("test_doctor:frozn", "'test_doctor' has no 'frozn' (did you mean 'frozen'?)"),
        ("test_doctor:REPOSITORY", "is a PosixPath; expected a function"),
    ],
)
def test_a_build_function_that_is_not_there(path: str, sentence: str) -> None:
    with pytest.raises(DoctorError) as raised:
        doctor_command.import_build(path)
    assert sentence in str(raised.value)


def test_options_on_the_command_line() -> None:
    assert doctor_command.parse_options([]) == {}
    assert doctor_command.parse_options(["fused=true", "exclude=['*embed*']"]) == {
        "fused": True,
        "exclude": ["*embed*"],
    }
    with pytest.raises(DoctorError, match="--options fused: expected NAME=VALUE"):
        doctor_command.parse_options(["fused"])


def test_without_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "test_doctor:frozen"]) == 1
    assert "commhooks doctor: no process group" in capsys.readouterr().err
    with process_group_of_one():
        assert main(["doctor", "test_doctor:frozen"]) == 1
    assert "commhooks doctor: one rank only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "batch_fn(model)" in capsys.readouterr().out


def test_under_torchrun(tmp_path: Path) -> None:
    """The example, started as its first lines say, on its way for some seconds."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "commhooks",
    ]
    command += ["doctor", "examples.doctor_transformer:build", "--steps", "2", "--powersgd-ranks", "2"]
    command += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"it did not end\n{output}\n{errors}")
    assert process.returncode == 0, errors
    assert output.count("powerSGD rank 2") >= 1 and output.count("2 ranks, gloo, 2.639 MB of gradients") == 1
    assert errors.count("commhooks doctor: round 1 of 2: noop") == 1
    assert "commhooks: powerSGD" not in errors  # that line is for trainings
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["advice"]["reason"] in " ".join(output.split())
    assert content["candidates"]["powerSGD rank 2"]["compressed_steps"] == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------------------------------------------------- CUDA


def _on_a_gpu() -> Any:
    ddp = wrap(Net().cuda())
    loss_of_cuda = lambda model: model(torch.randn(8, 24, device="cuda")).square().mean()  # noqa: E731
    loss_of_cuda(ddp).backward()
    torch.cuda.synchronize()
    before = [torch.get_rng_state(), torch.cuda.get_rng_state(), *(p.grad.clone() for p in ddp.parameters())]
    memory = torch.cuda.memory_allocated()
    report = commhooks.doctor(ddp, loss_of_cuda, steps=3)
    after = [torch.get_rng_state(), torch.cuda.get_rng_state(), *(p.grad for p in ddp.parameters())]
    return _equal(before, after), torch.cuda.memory_allocated() - memory, report.as_dict(), str(report)


@pytest.mark.cuda
def test_on_a_gpu(run_ranks: Callable[..., list[Any]]) -> None:
    before = 4 * sum(p.numel() for p in Net().parameters())
    ranks = run_ranks(_on_a_gpu)
    assert ranks[0][2:] == ranks[1][2:]
    for same, grown, report, _ in ranks:
        assert same
        assert grown <= 2 * before  # the copies of the gradients that the test itself holds, rounded up
        each = report["candidates"]["powerSGD rank 1"]
        assert each["compressed_steps"] == 3 and each["codec_ms"] is None and each["waiting_ms"] is None

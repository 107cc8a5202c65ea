"""`commhooks plan`: the same as the attached hook will say and do, before there is a process group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compilers import needs_compiler
from ddp_steps import backward, mlp, process_group_of_one, wrap
from inside import session_of
from torch import nn

import commhooks
from commhooks import HookConfigError
from commhooks.compressors.plan import ParameterInfo
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.workspace import Workspace
from commhooks.gradients.bucket_estimate import Reduced, estimate_buckets
from commhooks.hook.plan import ModelPlan
from commhooks.hook.plan_model import plan_model
from commhooks.hook.request import HookRequest
from commhooks.tools import codec_time
from commhooks.tools.cli import main
from commhooks.tools.named_model import from_checkpoint, from_module, named_model


class Net(nn.Module):
    """Tied, frozen, sparse, complex and 16-bit parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.sparse = nn.Embedding(40, 16, sparse=True)
        self.conv = nn.Conv2d(8, 16, 3)
        self.half = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.imaginary = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5, dtype=torch.int64))


def build_mlp() -> nn.Module:
    return mlp()


def build_for_the_doctor() -> tuple[nn.Module, Any]:
    return mlp(), print


def needs_an_argument(width: int) -> nn.Module:
    return nn.Linear(width, width)


def no_model() -> int:
    return 3


not_callable = 3


def plan_of(module: nn.Module, hook: Any, wrapper: str | None = None, **arguments: Any) -> ModelPlan:
    model = from_module("here", module)
    spec = HookRequest.parse(hook, wrapper=wrapper)
    return plan_model(model.parameters, spec, all_names=model.all_names, sparse=model.sparse, **arguments)


HOOKS: dict[str, Any] = {
    "rank 2": commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0),
    "exclude": commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["2.*", "embed*"]),
    "alternate": commhooks.PowerSGD(start_powerSGD_iter=0, alternate=True, matrix_approximation_rank=3),
    "no error feedback": commhooks.PowerSGD(start_powerSGD_iter=0, use_error_feedback=False),
    "batched": commhooks.BatchedPowerSGD(start_powerSGD_iter=0, matrix_approximation_rank=2),
    "fp16": commhooks.FP16Compress(),
    "allreduce": commhooks.AllReduce(),
    "noop": commhooks.Noop(),
}


# ----------------------------------------------------------------------------------- as the attached hook says and does


@pytest.mark.parametrize("wrapper", [None, "bf16"])
@pytest.mark.parametrize("name", HOOKS)
def test_the_same_as_the_attached_hook(name: str, wrapper: str | None) -> None:
    cap = 0.003
    early = plan_of(mlp(), HOOKS[name], wrapper, bucket_cap_mb=cap)
    with process_group_of_one():
        ddp = wrap(mlp(), bucket_cap_mb=cap)
        hook = commhooks.attach(ddp, HOOKS[name], wrapper=wrapper)
        sent = 0.0
        for step in range(4):
            backward(ddp, step)
            sent += hook.stats()["bytes_sent_last_pass"] / 2 if step >= 2 else 0  # P and Q in turn
        late = hook.plan()
    assert early.parameters == late.parameters
    for one in ("bytes_before", "bytes_after", "flag_bytes", "start_step", "wire_dtype", "selective", "sends"):
        assert getattr(early, one) == getattr(late, one), one
    assert early.summary() == late.summary()
    assert sent == pytest.approx(early.bytes_after + early.flag_bytes, abs=2 * len(early.parameters))
    if name not in ("batched", "fp16", "allreduce", "noop"):
        assert [set(b.parameters) for b in early.buckets] == [set(b.parameters) for b in late.buckets]
        assert len(late.buckets) > 2 and early.memory == late.memory
        assert sum(b.bytes_after for b in late.buckets) == late.bytes_after
        assert sum(b.bytes_before for b in late.buckets) == late.bytes_before
        assert "Buckets, as in the latest backward pass" in str(late)
    if name == "noop":
        assert early.bytes_after == 0 and "0.000 MB per step" in early.summary()


def test_a_hook_of_the_users_own_is_not_known() -> None:
    with process_group_of_one():
        plan = commhooks.attach(wrap(mlp()), lambda state, bucket: commhooks.allreduce_hook(None, bucket)).plan()
    assert plan.as_dict()["bytes_after"] is None and "?" in str(plan)
    assert plan.summary().endswith("MB -> what the hook sends per step and rank")
    with pytest.raises(HookConfigError, match="only its own code knows"):
        plan_model(dict(mlp().named_parameters()), HookRequest.parse(needs_an_argument))


def _size(tensors: Any) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize(
    "options, dtype, wrapper",
    [
        ({}, torch.float32, None),
        ({"matrix_approximation_rank": 2, "alternate": True}, torch.float32, "fp16"),
        ({"use_error_feedback": False}, torch.float64, None),
        ({"matrix_approximation_rank": 2}, torch.bfloat16, None),
        ({"exclude": ["0.*"]}, torch.float32, "bf16"),
        ({"batched": True}, torch.float32, None),
    ],
)
def test_the_memory_that_is_planned_is_taken(options: dict[str, Any], dtype: torch.dtype, wrapper: str | None) -> None:
    batched = options.get("batched", False)
    config = commhooks.BatchedPowerSGD if batched else commhooks.PowerSGD
    options = {key: value for key, value in options.items() if key != "batched"} | {"start_powerSGD_iter": 0}
    options |= {"fused": False}  # the native kernel needs less: it does not pad factors of rank 1
    with process_group_of_one():
        ddp = wrap(mlp(dtype=dtype))
        hook = commhooks.attach(ddp, config(**options), wrapper=wrapper)
        for step in range(4):
            backward(ddp, step)
        session, state = session_of(hook), session_of(hook).state
        works: list[Workspace] = [known.work for known in session._buckets if known.work]
        planned = hook.plan().memory

    assert planned.residual == _size(state["residual"].values())
    # Of two factors that alternate the older one is dropped: what is kept of each is planned.
    kept = _size([*state["q"].values(), *state["p"].values()])
    if options.get("alternate"):
        kept = sum(4 * p.rank * (p.n + p.m) for p in hook.plan().compressed)
    assert planned.factors == kept + sum(_size(s.p) + _size(s.q) for s in works)
    assert planned.copies == sum(_size(s.delta) for s in works)
    packed = sum(_size(p.buffer for p in s._messages.values()) for s in works)
    if batched:  # a bucket that is not compressed is counted with them: an upper bound
        assert packed <= planned.packed < 2 * packed
    else:
        assert planned.packed == packed
    assert planned.total == planned.residual + planned.factors + planned.copies + planned.packed


@needs_compiler
def test_the_native_kernel_takes_no_more_than_is_planned() -> None:
    """It does not pad the factors of rank 1."""
    for rank in (1, 4):
        with process_group_of_one():
            ddp = wrap(mlp())
            hook = commhooks.attach(ddp, commhooks.PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0))
            for step in range(4):
                backward(ddp, step)
            assert hook.stats()["kernel"] == "native"
            session, state = session_of(hook), session_of(hook).state
            works: list[Any] = [known.work for known in session._buckets if known.work]
            planned = hook.plan().memory

        assert planned.residual == _size(state["residual"].values())
        taken = _size(state["q"].values()) + sum(_size(s.p) + _size(s.q) for s in works)
        assert planned.factors / 2 < taken <= planned.factors
        assert planned.packed == sum(_size(p.buffer for p in s._messages.values()) for s in works)


def test_kinds_of_parameters() -> None:
    plan = plan_of(Net(), commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["head*"]))
    reasons = {p.name: p.reason for p in plan.parameters}
    assert reasons["embed.weight"] == "excluded by 'head*'"  # by its second name
    assert reasons["sparse.weight"] == "sparse gradient" and reasons["imaginary"] == "complex numbers"
    assert not any(name.startswith(("frozen", "head", "mean")) for name in reasons)
    assert reasons["conv.weight"] == reasons["half.weight"] == ""
    # One bucket for each dtype, and one for the sparse gradient.
    assert {frozenset(names) for names in plan.bucket_names} == {
        frozenset({"sparse.weight"}), frozenset({"imaginary"}), frozenset({"half.weight", "half.bias"}),
        frozenset({"embed.weight", "conv.weight", "conv.bias"}),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("cap", [None, 0.003, 0.01, 1])
def test_buckets_are_those_of_ddp_after_the_first_step(cap: float | None) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))  # 2.9 MB: more than the first 1 MiB
    estimate = plan_of(model, commhooks.PowerSGD(), bucket_cap_mb=cap).bucket_names
    with process_group_of_one():
        ddp = wrap(model, bucket_cap_mb=cap)
        hook = commhooks.attach(ddp, "powerSGD")
        for _ in range(2):
            ddp(torch.randn(2, 300)).sum().backward()
        observed = hook.plan().bucket_names
    # Which of a layer's weight and bias is ready first is autograd's business.
    assert [len(names) for names in estimate] == [len(names) for names in observed]
    assert [{n.split(".")[0] for n in names} for names in estimate] == [
        {n.split(".")[0] for n in names} for names in observed
    ]
    assert len(estimate) > 1


def test_limits_of_buckets() -> None:
    def reduced(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Reduced]:
        return [Reduced(str(i), size, dtype, torch.device("cpu")) for i, size in enumerate(sizes)]

    mib = 2**20
    assert estimate_buckets(reduced(mib, mib, mib)) == (("2",), ("1", "0"))
    assert estimate_buckets(reduced(mib, mib - 1, 1), 1) == (("2", "1"), ("0",))
    assert estimate_buckets(reduced(mib, mib - 2, 1), 1) == (("2", "1", "0"),)
    assert estimate_buckets([]) == ()


# ------------------------------------------------------------------------------------------------- a model by its name


def test_from_functions() -> None:
    for function in ("build_mlp", "build_for_the_doctor"):
        found = named_model(f"test_plan_model:{function}")
        assert list(found.parameters) == [name for name, _ in mlp().named_parameters()]
    assert "2 frozen parameters" in named_model("test_plan_model:Net").note
    for target, text in {
        "test_plan_model": "is neither a file nor 'package.module:function'",
        "test_plan_model:": "expected 'package.module:function' with the full name",
        "no_such_module:build": "cannot import 'no_such_module': No module named 'no_such_module'; start where",
        "test_plan_model:build": "'test_plan_model' has no 'build' .did you mean 'build_mlp'",
        "test_plan_model:not_callable": "is a int, not a function that returns an nn.Module",
        "test_plan_model:needs_an_argument": "cannot be called without arguments",
        "test_plan_model:no_model": "returned a int, not an nn.Module",
        "torch.nn:Identity": "has no parameter that requires a gradient",
    }.items():
        with pytest.raises(HookConfigError, match=text):
            named_model(target)


def test_from_the_current_folder(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_model_of_this_test.py").write_text("from torch import nn\nbuild = lambda: nn.Linear(3, 3)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        assert len(named_model("my_model_of_this_test:build").parameters) == 2
    finally:
        sys.modules.pop("my_model_of_this_test", None)
    assert sys.path == before


@pytest.mark.parametrize("zipped", [True, False])
def test_from_checkpoints(tmp_path: Path, zipped: bool) -> None:
    path, net = tmp_path / "some.ckpt", Net()
    state = net.state_dict()
    for content in (
        state,
        {"epoch": 3, "state_dict": state, "optimizer_states": [{}]},
        {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
        {"model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}},
    ):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        found = from_checkpoint(path)
        assert {name: p.shape for name, p in found.parameters.items()} == {
            name: p.shape for name, p in net.named_parameters()
        }
        assert found.all_names[id(found.parameters["embed.weight"])] == ["embed.weight", "head.weight"]  # tied
        assert "does not tell buffers" in found.note
    torch.save({"epoch": 3, "weights": [1]}, path)
    with pytest.raises(HookConfigError, match="holds no state dict of a model: .* it has 'epoch', 'weights'"):
        named_model(str(path))
    with pytest.raises(HookConfigError, match="is a folder"):
        named_model(str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- the command


def run_json(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "test_plan_model:build_mlp", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_and_what_it_adds_up_to(capsys: Any) -> None:
    found = run_json(
        capsys, "--options", "matrix_approximation_rank=2", "start_powerSGD_iter=0.1", "--total-steps", "50",
        "--exclude", "4.*", "--wrapper", "bf16", "--world-size", "4", "--codec-ms", "2", "--bucket-cap-mb", "0.003",
    )  # fmt: skip
    assert (found["hook"], found["start_step"], found["wire_dtype"]) == ("powerSGD", 5, "bfloat16")
    rows = {row["name"]: row for row in found["parameters"]}
    assert rows["0.weight"]["matrix"] == [32, 24] and rows["0.weight"]["rank"] == 2
    assert rows["0.weight"]["bytes_after"] == 2 * (32 + 24) * 2 and rows["0.weight"]["bytes_before"] == 4 * 32 * 24
    assert rows["4.weight"]["reason"] == "excluded by '4.*'" and rows["4.weight"]["matrix"] is None
    for total in ("bytes_before", "bytes_after"):
        assert sum(row[total] for row in rows.values()) == found[total] == sum(b[total] for b in found["buckets"])
    estimate, memory = found["estimate"], found["memory_bytes"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")
    # Each of four ranks sends 2 * 3 / 4 times what it hands to a ring all-reduce.
    assert estimate["wire_bytes_before"] == 1.5 * found["bytes_before"]
    saved = 1.5 * (found["bytes_before"] - found["bytes_after"] - found["flag_bytes"])
    assert estimate["break_even_gbit_s"] == pytest.approx(8 * saved / 0.002 / 1e9)
    speed = estimate["at_gbit_s"]["1.0"]
    assert speed["without_s"] == pytest.approx(12 * found["bytes_before"] / 1e9)
    assert 0 < speed["with_s"] - 0.002 < speed["without_s"]
    assert "ring all-reduce" in estimate["assumed"] and "doctor" in estimate["assumed"]
    assert estimate["codec_kernel"] is None  # not measured
    assert found["note"] == "" and found["buckets_from"].startswith("estimated")


def test_the_break_even_is_where_both_are_as_fast() -> None:
    plan = plan_of(mlp(), commhooks.PowerSGD(start_powerSGD_iter=0))
    gbit_s = plan.break_even_gbit_s(0.001, world_size=2)
    bits = 8e-9 / gbit_s
    assert bits * plan.bytes_before == pytest.approx(bits * (plan.bytes_after + plan.flag_bytes) + 0.001)
    assert plan.break_even_gbit_s(0.001, world_size=8) == pytest.approx(1.75 * gbit_s)
    assert plan_of(mlp(), commhooks.AllReduce()).break_even_gbit_s(0.001) is None


def test_the_codec_is_timed(capsys: Any) -> None:
    found = run_json(capsys, "--options", "fused=false")["estimate"]
    assert found["codec_s"] > 0 and found["codec_measured_on"] == "cpu" and found["codec_sample_share"] == 1
    assert found["codec_kernel"] == "torch"


@needs_compiler
def test_the_codec_is_timed_with_the_kernel_that_a_training_would_use(capsys: Any) -> None:
    assert run_json(capsys)["estimate"]["codec_kernel"] == "native"
    assert main(["plan", "test_plan_model:build_mlp"]) == 0
    assert "native kernel)" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_what_would_make_the_codec_faster(capsys: Any, tmp_path: Path) -> None:
    fused_codec.load.cache_clear()
    with mock.patch.dict(os.environ, {"CC": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}):
        found = run_json(capsys)
    fused_codec.load.cache_clear()
    assert found["estimate"]["codec_kernel"] == "torch"
    assert found["note"].startswith("Computed with torch: the native kernel cannot be compiled: /bin/false ")


@pytest.mark.parametrize(
    "rows, share", [((512, 64), 1), ((2048, 1024, 64, 64), 1088 / 3200), ((8192,), 1 / 4)], ids=str
)
def test_of_large_models_a_sample_is_timed(rows: tuple[int, ...], share: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(codec_time, "SAMPLE_NUMEL", 2**20)
    options = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0)
    compressor = PowerSGDCompressor(options)
    plans = compressor.plan([ParameterInfo(str(n), torch.empty(n, 512, device="meta")) for n in rows])
    timed = codec_time.measure_codec(compressor, plans, torch.device("cpu"))
    assert timed.share == pytest.approx(share) and 0 < timed.seconds < 10


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD", "fp16", "allreduce", "noop"])
def test_text(hook: str, capsys: Any) -> None:
    assert main(["plan", "test_plan_model:build_mlp", "--hook", hook, "--codec-ms", "0.01"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "On the wire each of 2 ranks sends 0.011 MB per step without and" in text
    assert ("Memory per rank: " in text) == (hook not in ("allreduce", "noop"))
    assert ("Below about " in text) == (hook not in ("allreduce", "noop"))
    assert ("it is faster at no bandwidth" in text) == (hook == "allreduce")
    assert ("Assumed: a ring all-reduce" in text) == (hook != "noop")
    assert hook == "batched_powerSGD" or "Buckets, estimated: how DDP cuts them after the first step" in text


def test_a_pattern_without_a_match_is_told(capsys: Any) -> None:
    assert main(["plan", "test_plan_model:build_mlp", "--exclude", "0.wieght", "--codec-ms", "1"]) == 0
    assert "matches '0.wieght' (the closest name is '0.weight')" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--hook", "powerSDG"], "unknown hook 'powerSDG' (did you mean 'powerSGD'?)"),
        (["--options", "rank=4"], "no option 'rank' (did you mean 'matrix_approximation_rank'?)"),
        (["--options", "rank"], "--options rank: expected NAME=VALUE"),
        (["--options", "exclude=[*a*]"], "--options exclude=[*a*]: while scanning an alias"),
        (["--options", "exclude=['a']", "--exclude", "b"], "give the patterns in one of them"),
        (["--hook", "batched_powerSGD", "--exclude", "b"], "whole buckets are compressed here; use PowerSGD"),
        (["--options", "start_powerSGD_iter=0.5"], "is a fraction of the run, whose length is unknown"),
        (["--hook", "test_plan_model:no_model"], "only its own code knows what it sends"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb 0.0: expected a number above 0"),
        (["--world-size", "1"], "--world-size 1: expected a number from 2"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], text: str, capsys: Any) -> None:
    assert main(["plan", "test_plan_model:build_mlp", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("commhooks plan: ") and text in err and err.count("\n") == 1

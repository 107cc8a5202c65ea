"""Each benchmark runs, in its shortest form, and writes the figures that it promises. No figure is judged here, except
those that do not depend on the machine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import warm
from tests.support.repository import REPOSITORY

MACHINE = {"cpu", "cores", "gpu", "system", "python", "torch", "date"}


def _can_limit_a_link() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        return False
    # A container's root may not be allowed to.
    name = f"commhooks-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@pytest.fixture
def namespaces_are_removed() -> Iterator[None]:
    def namespaces() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines() if line.startswith("commhooks-")}

    before = namespaces()
    yield
    assert namespaces() <= before


def _run(name: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of `benchmarks/name.py --quick`."""
    file = tmp_path / "figures.json"
    python = warm.python("matplotlib.figure", "sklearn.datasets")
    command = [python, f"benchmarks/{name}.py", "--quick", "--json", str(file), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["benchmark"] == name and content["machine"].keys() >= MACHINE
    assert content["arguments"]["quick"] is True
    assert content["machine"]["torch"] in done.stdout  # under the table, so that nobody quotes figures without it
    return content["rows"]


@pytest.mark.skipif(not _can_limit_a_link(), reason="needs Linux, root, ip and tc")
def test_replicas(tmp_path):
    (row,) = _run("replicas", tmp_path, "--hooks", "allreduce", "--width", "512")
    assert row["planned"] <= row["sent"] < 1.1 * row["planned"] and row["peak"] > 0


def test_codec(tmp_path):
    rows = _run("codec", tmp_path, "--ranks", "4", "--threads", "1", "2", "--rounds", "2")
    ours = {"commhooks", "fused", "alternate", "fused alternate"}
    quantised = {"int8", "int4", "fused int8", "fused int4"}
    measured = ours | {"torch", "torch same", "copy", "add"}
    assert {row["hook"] for row in rows if row["rank"] is None} == quantised | {"copy", "add", "noop backward"}
    assert {row["hook"] for row in rows if row["rank"] is not None} == measured | {"epfml", "noop backward"}
    assert {(row["rank"], row["threads"]) for row in rows} == {(rank, n) for rank in (None, 4) for n in (1, 2)}
    for row in rows:
        assert row["limit_ms"] > 0
        if row["hook"] in measured | quantised:
            assert row["threads"] == 1 or row["times_one"] is not None
            assert row.keys() >= {"median_ms", "q1_ms", "q3_ms", "times_limit", "gradient_mb", "model"}
            assert (row["rank"] is None) == ("times_torch" not in row)
        elif row["hook"] == "epfml" and row["median_ms"] is None:
            assert row["note"]


def test_memory(tmp_path):
    rows = {row["hook"]: row for row in _run("memory", tmp_path)}
    assert rows.keys() == {"noop", "powersgd-4", "powersgd-4 from 0"}
    for name, steps in (("powersgd-4", 4), ("powersgd-4 from 0", 6)):
        row = rows[name]
        assert row["compressed_steps"] == steps
        assert row["peak_bytes"] >= row["held_bytes"] and row["peak_bytes"] >= row["peak_rebuild_bytes"]
        assert row["allocations_last_step"] >= 0 and row["allocated_bytes_last_step"] >= 0
        # The residual is nearly all of it: less would mean that releases are counted that were none.
        assert 0.9 < row["held_over_formula"] < 1.1


def test_metrics(tmp_path):
    rows = _run("metrics", tmp_path)
    kinds = ["without", "clocks", "reading", "layers", "sampled"]
    assert [(row["hook"], row["kind"]) for row in rows] == [(h, k) for h in ("powersgd-1", "fp16") for k in kinds]
    assert all(row["median_us"] > 0 for row in rows if row["kind"] == "without")
    assert all("percent" in row for row in rows if row["kind"] != "without")


def test_checkpoint(tmp_path):
    rows = {row["state"]: row for row in _run("checkpoint", tmp_path)}
    assert list(rows) == ["model", "mean", "per_rank", "drop"]
    for row in rows.values():
        assert row["median_save_s"] > 0 and row["median_load_s"] > 0
    gradient = rows["model"]["gradient_bytes"]
    assert rows["mean"]["bytes"] > 0.9 * gradient and rows["per_rank"]["bytes"] > 0.9 * gradient
    assert rows["drop"]["bytes"] < 0.2 * gradient


def test_paper(tmp_path):
    rows = _run("paper", tmp_path)  # it compares with the paper itself: its exit status is looked at
    assert [(row["model"], row["wrapper"], round(row["ratio_less_flags"], 1)) for row in rows] == [
        ("resnet18_cifar", "", 243.3),
        ("resnet18_cifar", "int8", 913.0),
        ("resnet18_cifar", "int4", 1723.2),
        ("lstm", "", 309.7),
        ("lstm", "int8", 1155.8),
        ("lstm", "int4", 2182.8),
    ]
    assert all(row["stats_agree"] and row["recorded_bytes"] < row["gradient_bytes"] for row in rows)


def test_convergence(tmp_path):
    picture = tmp_path / "figures.png"
    rows = {row["hook"]: row for row in _run("convergence", tmp_path, "--plot", str(picture))}
    assert rows.keys() == {"allreduce", "powersgd-2"}
    assert all(len(row["losses"]) == len(row["accuracies"]) == 2 for row in rows.values())
    assert rows["powersgd-2"]["compressed_steps"] > 30 and rows["powersgd-2"]["fewer_bytes"] > 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_energies(tmp_path):
    rows = _run("energies", tmp_path)
    assert [row["step"] for row in rows] == [2, 3]
    for row in rows:
        kept = [row[f"median_{rank}"] for rank in (1, 2, 4, 8, 16)]
        assert 0 < kept[0] and kept == sorted(kept) and kept[-1] <= 1 and row["lowest_1"] <= kept[0]


def test_local_steps(tmp_path):
    exact, local = _run("local_steps", tmp_path)
    assert exact["setting"] == "all-reduce" and exact["share"] == 100 and exact["more"] == 0
    assert 3 < local["share"] < 15 and 0 < abs(local["more"]) < 5  # int4, in 3 of 12 steps the gradients


def test_language_model(tmp_path):
    picture = tmp_path / "figures.png"
    rows = {row["hook"]: row for row in _run("language_model", tmp_path, "--plot", str(picture), "--steps", "12")}
    assert rows.keys() == {"allreduce", "powersgd-4+int8/per-layer"}
    assert all(row["loss"] < 5 and row["seeds"] == 1 for row in rows.values())
    both = rows["powersgd-4+int8/per-layer"]
    assert 100 < both["fewer"] < 130 and both["difference"] != 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_launches(tmp_path):
    """Bounds a little above today's counts: a change that adds operators per matrix or per rank shows."""
    rows = _run("launches", tmp_path, "--models", "resnet50", "--ranks", "1", "16")
    for hook, more in (("powerSGD", 1.0), ("fp16 wire", 1.09), ("same shape", 1.0), ("one bucket", 0.65)):
        low, high = [row for row in rows if row["hook"] == hook]
        assert low["rank"] == 1 and low["operators"] <= more * 790 and low["views"] <= 1100, low
        assert high["operators"] <= low["operators"] and high["views"] <= low["views"], hook


def test_size(tmp_path):
    """Bounds a little above today's counts: a change that makes a step enter more files or functions shows."""
    rows = {row["hook"]: row for row in _run("size", tmp_path, "--hooks", "powerSGD", "int8", "bf16")}
    for hook, (files, functions) in {"powerSGD": (39, 175), "int8": (42, 158), "bf16": (18, 58)}.items():
        assert 10 < rows[hook]["files"] <= files and 20 < rows[hook]["functions"] <= functions, rows[hook]


def test_gpu_rehearsed_on_the_cpu(tmp_path):
    rows = _run("gpu", tmp_path, "--device", "cpu", "--models", "tiny", "--ranks", "1", "--markdown")
    setups = {(row["model"], row["buckets"], row["batch"]) for row in rows}
    assert len(setups) == 4 and len(rows) == 4 * len(setups)
    for row in rows:
        assert row["hook"] in ("commhooks", "commhooks same", "torch", "torch same")
        assert row["kernels"] > 0 or row["hook"].startswith("torch")  # which computes in threads, where nobody counts
        assert row["waits"] == 0 < row["limit_ms"]
        assert row.keys() >= {"median_ms", "times_torch", "median_host_ms", "synchronize_calls", "share_of_limit"}


def _alone(name: str) -> Any:
    """A module of benchmarks/ that imports none of the others: some have the names of modules in tests/support."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "annotation", "counts"),
    [
        ("void at::native::vectorized_elementwise_kernel<4>", False, True),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False, True),
        ("nccl:all_reduce", False, False),
        ("nccl:all_reduce", None, False),
        ("DistributedDataParallel.forward", None, False),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", None, False),
        ("a range of the user's", True, False),
        ("Memcpy DtoD (Device -> Device)", False, False),
        ("Memset (Device)", False, False),
    ],
)
def test_what_counts_as_a_kernel(name, annotation, counts):
    assert _alone("on_device").is_kernel(types.SimpleNamespace(name=name, is_user_annotation=annotation)) is counts


def test_what_counts_as_a_wait():
    """The first text is what `set_sync_debug_mode` itself warns of."""
    texts = ["Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"]
    count_waits = _alone("on_device").count_waits
    assert count_waits(texts) == 0
    assert count_waits([*texts, "called a synchronizing CUDA operation (Triggered internally at x)"]) == 1


def test_gpt2_has_the_size_of_gpt2():
    models = _alone("models")
    with torch.device("meta"):
        made, _ = models.make("gpt2")
    assert models.numel(made) == 124_439_808


@pytest.mark.skipif(not _can_limit_a_link(), reason="needs root, ip and tc")
def test_link(namespaces_are_removed, tmp_path):
    picture = tmp_path / "figures.png"
    rows = {row["hook"]: row for row in _run("link", tmp_path, "--plot", str(picture))}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert rows.keys() == {"noop", "ddp", "powersgd-1"}
    # What travelled: each of two ranks sends the gradients once, compressed or not.
    gradient = 1e6 * rows["ddp"]["gradient_mb"]
    assert rows["noop"]["bytes_per_step"] < 5_000
    assert gradient < rows["ddp"]["bytes_per_step"] < 1.3 * gradient
    assert rows["powersgd-1"]["bytes_per_step"] < 0.1 * gradient
    # And the link is as slow as was asked for: 100 Mbit, of which the bucket gives one millisecond away.
    assert rows["ddp"]["median_ms"] > 1000 * (8 * gradient / 100e6) - 5
    # The scale on which hooks are compared. Where powersgd-1 is on it is a matter of speed.
    assert (rows["noop"]["cost_removed"], rows["ddp"]["cost_removed"]) == (1, 0)
    assert isinstance(rows["powersgd-1"]["cost_removed"], float)


@pytest.mark.skipif(not (_can_limit_a_link() and os.path.exists("/dev/net/tun")), reason="needs root, ip and TUN")
def test_a_wide_area_link(namespaces_are_removed, tmp_path):
    arguments = ["--hooks", "ddp", "diloco-5", "--rtt", "40", "--loss", "0.001", "--steps", "1"]
    rows = {row["hook"]: row for row in _run("link", tmp_path, *arguments)}
    sent_ms = 1000 * 8 * 1e6 * rows["ddp"]["gradient_mb"] / 100e6
    assert rows["ddp"]["median_ms"] > 40 + 0.8 * sent_ms  # there and back, at least once
    assert rows["diloco-5"]["bytes_per_step"] < 0.1 * rows["ddp"]["bytes_per_step"]
    assert {row["rtt_ms"] for row in rows.values()} == {40.0}


@pytest.mark.skipif(not (_can_limit_a_link() and os.path.exists("/dev/net/tun")), reason="needs root, ip and TUN")
def test_training_over_a_wide_area_link(namespaces_are_removed, tmp_path):
    """It ends with the weights of a clean link, also after a break in which nothing arrives."""
    rows = _run("wide_area_training", tmp_path)
    assert [row["section"] for row in rows[::3]] == ["clean", "40 ms", "40 ms, 1 s of silence"]
    assert all(row["weights"] == "equal" for row in rows) and len({tuple(row["hashes"]) for row in rows}) == 3
    assert all(row["replicas_equal"] == (row["hook"] != "noop") for row in rows)
    of = {(row["section"], row["hook"]): row for row in rows}
    assert of["40 ms", "ddp"]["step_ms"] > 40
    assert of["40 ms, 1 s of silence", "ddp"]["longest_s"] > 0.5
    clean, far = (of[section, "powersgd-1"]["collectives"] for section in ("clean", "40 ms"))
    assert far <= 4 and clean >= 2 * far  # messages of all buckets together


def test_link_draws_what_was_measured_before(tmp_path):
    """Without the right to limit a link."""
    times = {"ddp": (100_000, 1000), "fused-1": (500, 200), "torch-1": (520, 300), "int8": (25_000, None)}
    common = {"model": "transformer", "compute": "light", "nodes": 2, "ranks_per_node": 1, "batch": 64}
    rows = [
        {**common, "hook": hook, "rate": rate, "median_ms": time, "q1_ms": time, "q3_ms": time, "gradient_mb": 118.0}
        for hook, both in times.items()
        for rate, time in zip(("10mbit", "1gbit"), both, strict=True)
        if time is not None
    ]
    at = dict.fromkeys(MACHINE, "x") | {"torch": "2.13.0"}
    earlier, picture = tmp_path / "earlier.json", tmp_path / "figures.png"
    earlier.write_text(json.dumps({"benchmark": "link", "machine": at, "arguments": {}, "rows": rows}))
    assert _run("link", tmp_path, "--from", str(earlier), "--plot", str(picture)) == rows
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not _can_limit_a_link(), reason="needs root, ip and tc")
def test_time_to_loss(tmp_path):
    picture = tmp_path / "figures.png"
    rows = _run("time_to_loss", tmp_path, "--plot", str(picture))
    plain, compressed = rows
    assert picture.read_bytes().startswith(b"\x89PNG")
    for row in rows:
        (curve,) = row["curves"]
        assert [point[0] for point in curve] == [10, 20, 30]
        assert [row["seconds"], row["megabytes"], row["loss"]] == curve[-1][1:]
        assert curve[0][1] < curve[1][1] < curve[2][1] and curve[0][3] > curve[2][3]
    (first, *_), (other, *_) = plain["curves"][0], compressed["curves"][0]
    assert first[3] > 2.2 and other[3] > 2.2  # of ten digits, at the begin: ln 10 is 2.30
    assert compressed["megabytes"] < 0.5 * plain["megabytes"]
    assert plain["sooner"] == 1


@pytest.mark.skipif(not _can_limit_a_link(), reason="needs root, ip and tc")
def test_time_to_loss_from_some_timed_steps(tmp_path):
    rows = _run("time_to_loss", tmp_path, "--hooks", "ddp", "diloco-5@2", "--steps", "15", "--timed", "10")
    for row in rows:
        (curve,) = row["curves"]
        assert [point[0] for point in curve] == [5, 10, 15]
        assert curve[2][1] == pytest.approx(3 * curve[0][1]) and curve[0][3] > curve[2][3]
    assert 0 < rows[1]["megabytes"] < 0.1 * rows[0]["megabytes"]


def test_when_a_curve_reaches_a_loss():
    reached_after = _alone("loss_curves").reached_after
    curve = [[1, 10.0, 0, 3.0], [2, 20.0, 0, 2.0], [3, 30.0, 0, 2.5], [4, 40.0, 0, 1.0]]
    assert reached_after(curve, 3.0) == 10 and reached_after(curve, 2.25) == 17.5 and reached_after(curve, 1.0) == 40
    assert reached_after(curve, 0.9) is None


def test_the_figure_of_times_has_plain_names_and_units():
    def row(hook, seconds, chosen=""):
        curve = [[1, seconds / 2, 0, 3.0], [2, seconds, 0, 1.0]]
        of_task = {"section": "language 100mbit", "task": "language", "rate": "100mbit"}
        return {**of_task, "hook": hook, "chosen": chosen, "curves": [curve]}

    rows = [row("ddp", 1200.0), row("fused-int4", 240.0), row("torch-4", 300.0), row("auto", 600.0, "int8")]
    figure = _alone("loss_curves").draw(rows, 0.0)
    (axis,) = figure.axes
    texts = [text.get_text() for text in [*figure.texts, *axis.texts, *axis.get_xticklabels()]]
    assert {"20 min\nplain DDP", "4 min\nint4", "10 min\nauto\n(chose int8)", "15 min"} <= {*texts}
    assert axis.get_legend() is None and "fused" not in str(texts) and "torch" not in str(texts)
    assert "after 10 minutes instead of 20" in figure.get_suptitle()


def test_names_of_lines_do_not_touch():
    places = _alone("link_figure").spread_out({"a": 0.5, "b": 0.52, "c": 0.53, "far": 100})
    assert places["b"] > 1.2 * places["a"] and places["c"] > 1.2 * places["b"] and places["far"] == pytest.approx(100)
    assert places["a"] < 0.5 < places["c"]  # on both sides of their lines

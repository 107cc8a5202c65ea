"""`commhooks plan`: show what a hook would compress in a model, without a training."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.comm.link import Network
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import Compressor
from commhooks.compressors.dotted_path import current_folder_first
from commhooks.compressors.kernel import TORCH
from commhooks.errors import HookConfigError
from commhooks.gradients.exclude import unmatched_sentence
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.plan_model import plan_model
from commhooks.hook.request import HookRequest
from commhooks.tools.cluster import ASSUMED as ASSUMED_ON_NODES
from commhooks.tools.cluster import CANDIDATES, Cluster, cluster_table, predict
from commhooks.tools.codec_time import CodecTime, measure_codec
from commhooks.tools.named_model import NamedModel, named_model
from commhooks.tools.options import parse_options

FOR_ONE_HOOK: dict[str, Any] = {
    "hook": "powerSGD",
    "options": [],
    "exclude": None,
    "wrapper": None,
    "world_size": 2,
    "device": None,
    "codec_ms": None,
}
"""Flags of the plan of one hook, which --nodes ignores, with their defaults."""
ON_NODES = {"ranks_per_node": 8, "bandwidth": 25.0, "inside": 400.0, "latency_us": 30.0, "backend": "nccl"}
"""Flags that only --nodes needs, with their defaults."""
GBIT_S = (0.1, 1.0, 10.0, 100.0)
ASSUMED = (
    "Assumed: a ring all-reduce at the full bandwidth, no latency, nothing overlaps with the backward pass. Where the "
    "backward pass hides all of plain all-reduce, nothing is won at any bandwidth. `commhooks doctor` measures it."
)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or with --nodes a table of all hooks."""
    settle_flags(arguments)
    if arguments.nodes is not None:
        return run_cluster(arguments)
    plan, note, codec = make_plan(arguments)
    estimate = None if codec is None else estimated(plan, codec, arguments.world_size)
    if arguments.json:
        print(json.dumps(plan.as_dict() | {"model": arguments.model, "note": note, "estimate": estimate}, indent=2))
        return 0
    print(plan)
    print("\n".join(part for part in (note, network_text(plan, estimate) if estimate else "") if part))
    return 0


def settle_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that would be ignored, and give the others their defaults."""
    many = arguments.nodes is not None
    for name, default in (FOR_ONE_HOOK | ON_NODES).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif many and name in FOR_ONE_HOOK:
            raise HookConfigError(
                f"{_flag(name)} with --nodes, which compares all hooks on many nodes: leave out one of the two"
            )
        elif not many and name in ON_NODES:
            raise HookConfigError(f"{_flag(name)} is for the table of many nodes: add --nodes N, or leave it out")
    if arguments.device is not None and arguments.codec_ms is not None:
        raise HookConfigError("--device says where the codec is timed, and --codec-ms how long it takes: give one")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def make_plan(arguments: argparse.Namespace) -> tuple[ModelPlan, str, CodecTime | None]:
    """The plan, a remark about the model, and the codec's time; None if only a training decides what to compute."""
    _check_numbers(arguments, {"world_size": 2, "total_steps": 1}, above_0=("bucket_cap_mb", "codec_ms"))
    options = parse_options(arguments.options)
    if arguments.exclude:
        if "exclude" in options:
            raise HookConfigError("--exclude and --options exclude=...: give the patterns in one of them")
        options["exclude"] = arguments.exclude
    with current_folder_first():  # the hook may be a path 'package.module:Class'
        request = HookRequest.parse(arguments.hook, hook_options=options, wrapper=arguments.wrapper)
    model = named_model(arguments.model)
    plan, compressor = _planned(model, request, arguments.bucket_cap_mb, arguments.total_steps)
    config = compressor.config
    unmatched = [
        unmatched_sentence(config.excluded_globs, model.every_name),
        unmatched_sentence(config.option_globs, model.every_name, config.glob_option),
    ]
    note = " ".join([*([model.note] if model.note else []), *(f"{each}." for each in unmatched if each)])
    if isinstance(compressor, AdaptiveCompressor):
        undecided = (
            f"{compressor.name} decides during the training, from what it measures there. This is how it begins, with "
            f"{compressor.chosen}; the plan of what it may choose: --hook powerSGD, --hook int8 and so on."
        )
        return plan, " ".join(part for part in (note, undecided) if part), None
    if arguments.codec_ms is not None:
        return plan, note, CodecTime(arguments.codec_ms / 1e3, "", 0, 1.0)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HookConfigError("--device cuda: this machine has none that torch can use")
    codec = measure_codec(compressor, plan.parameters, device)
    missing = f"Computed with {codec.kernel}: {codec.missing}." if codec.missing else ""
    return plan, " ".join(part for part in (note, missing) if part), codec


def run_cluster(arguments: argparse.Namespace) -> int:
    """Print the predictions for all hooks on many nodes."""
    least = {"nodes": 2, "ranks_per_node": 1, "latency_us": 0, "total_steps": 1}
    _check_numbers(arguments, least, above_0=("bandwidth", "inside", "bucket_cap_mb"))
    cluster = Cluster(
        arguments.nodes,
        arguments.ranks_per_node,
        1e9 * arguments.bandwidth,
        1e9 * arguments.inside,
        1e-6 * arguments.latency_us,
        arguments.backend,
    )
    model = named_model(arguments.model)
    predictions = []
    for each in CANDIDATES:
        request = HookRequest.parse(each.hook, hook_options=each.options or None, wrapper=each.wrapper)
        plan, compressor = _planned(model, request, arguments.bucket_cap_mb, arguments.total_steps)
        predictions += predict(plan, compressor, len(plan.bucket_names), cluster)
    if arguments.json:
        rows = [dataclasses.asdict(each) for each in predictions]
        described = dataclasses.asdict(cluster) | {"model": arguments.model, "assumed": ASSUMED_ON_NODES}
        print(json.dumps({"cluster": described, "predictions": rows}, indent=2))
    else:
        print(cluster_table(predictions, cluster))
    return 0


def _check_numbers(arguments: argparse.Namespace, least: Mapping[str, int], above_0: Sequence[str]) -> None:
    """Raise HookConfigError for a number below its `least` value, or not above 0. None is none."""
    for name in (*least, *above_0):
        value = getattr(arguments, name)
        if value is None or (value > 0 if name in above_0 else value >= least[name]):
            continue
        limit = "above 0" if name in above_0 else f"from {least[name]}"
        raise HookConfigError(f"{_flag(name)} {value}: expected a number {limit}")


def _planned(
    model: NamedModel, request: HookRequest, bucket_cap_mb: float | None, total_steps: int | None
) -> tuple[ModelPlan, Compressor[Any]]:
    """The plan of a model, and the compressor that made it."""
    plan = plan_model(
        model.parameters,
        request,
        all_names=model.all_names,
        sparse=model.sparse,
        bucket_cap_mb=bucket_cap_mb,
        total_steps=total_steps,
    )
    compressor = request.new_compressor(total_steps)
    assert compressor is not None  # `plan_model` has raised for a user's hook
    return plan, compressor


def estimated(plan: ModelPlan, codec: CodecTime, world_size: int) -> dict[str, Any]:
    """Estimates for JSON and text: times in seconds, bandwidths in Gbit/s per rank."""
    before, after = plan.bytes_before, plan.bytes_after + plan.flag_bytes
    networks = {speed: Network(world_size, 1e9 * speed) for speed in GBIT_S}
    return {
        "world_size": world_size,
        "wire_bytes_before": int(Network(world_size, 1.0).leaving(before)),
        "wire_bytes_after": int(Network(world_size, 1.0).leaving(after)),
        "codec_s": codec.seconds,
        "codec_measured_on": codec.device or None,
        "codec_threads": codec.threads or None,
        "codec_kernel": codec.kernel or None,
        "codec_sample_share": codec.share,
        "break_even_gbit_s": plan.break_even_gbit_s(codec.seconds, world_size),
        "at_gbit_s": {
            str(speed): {"without_s": network.seconds(before), "with_s": network.seconds(after) + codec.seconds}
            for speed, network in networks.items()
        },
        "assumed": ASSUMED,
    }


def network_text(plan: ModelPlan, estimate: dict[str, Any]) -> str:
    """The estimates as text."""
    before, after = plan.unit.text(estimate["wire_bytes_before"]), plan.unit.text(estimate["wire_bytes_after"])
    lines = [
        f"On the wire each of {estimate['world_size']} ranks sends {before} per step without and {after} with the hook "
        "(ring all-reduce)."
    ]
    if plan.sends is False:
        return lines[0]
    codec = f"{_ms(estimate['codec_s'])} ms"
    if estimate["codec_measured_on"] is not None:
        where = estimate["codec_measured_on"]
        where = f"{where}, {estimate['codec_threads']} threads" if where == "cpu" else where
        part = "" if estimate["codec_sample_share"] > 0.999 else ", on a sample of the matrices"
        kernel = "" if estimate["codec_kernel"] in (None, TORCH.name) else f", {estimate['codec_kernel']} kernel"
        codec = f"{codec}, measured here: {where}{kernel}{part}"
    limit = estimate["break_even_gbit_s"]
    if estimate["wire_bytes_after"] >= estimate["wire_bytes_before"]:
        lines.append("Break-even: none, the hook saves no bytes.")
    elif limit is None:
        lines.append(f"Break-even: none (codec {codec}).")
    else:
        lines.append(f"Break-even: {limit:.2g} Gbit/s per rank (codec {codec}). Below that the hook sends faster.")
    lines.append(_bandwidths(estimate["at_gbit_s"]))
    lines.append(ASSUMED)
    return "\n".join(lines)


def _bandwidths(at_gbit_s: dict[str, dict[str, float]]) -> str:
    """A table: codec and sending at some bandwidths."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for heading in ("Gbit/s", "without, ms", "with the hook, ms"):
        table.add_column(heading, justify="right")
    for speed, times in at_gbit_s.items():
        table.add_row(speed, _ms(times["without_s"]), _ms(times["with_s"]))
    console = Console(width=120, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds < 10 else f"{1e3 * seconds:.0f}"

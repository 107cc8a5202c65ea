"""`commhooks plan`: show what a hook would compress in a model, without a training."""

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

import torch

from commhooks.comm.link import Network
from commhooks.compressors.adaptive import AdaptiveCompressor
from commhooks.compressors.base import Compressor
from commhooks.compressors.dotted_path import current_folder_first
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.local_steps.options import LocalSteps, passes_per_exchange
from commhooks.errors import HookConfigError
from commhooks.gradients.exclude import unmatched_sentence
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.plan_table import new_table, text_of
from commhooks.hook.request import HookRequest
from commhooks.tools.cluster import ASSUMED as ASSUMED_ON_NODES
from commhooks.tools.cluster import CANDIDATES, Cluster, cluster_table, predict
from commhooks.tools.codec_time import CodecTime, measure_codec
from commhooks.tools.long_link import exchange_s, sentences
from commhooks.tools.named_model import named_model
from commhooks.tools.options import parse_options

FOR_ONE_HOOK: dict[str, Any] = {"hook": "powerSGD", "options": [], "world_size": 2, "rtt_ms": 0.0}
FOR_ONE_HOOK |= dict.fromkeys(("exclude", "wrapper", "device", "codec_ms", "step_ms"))
"""Flags of the plan of one hook, which --nodes ignores, with their defaults."""
ON_NODES = {"ranks_per_node": 8, "bandwidth": 25.0, "inside": 400.0, "latency_us": 30.0, "backend": "nccl"}
"""Flags that only --nodes needs, with their defaults."""
GBIT_S = (0.1, 1.0, 10.0, 100.0)
SMALL_SHARE = 0.05
"""Of the time of a round, for the outer step: what the suggested `sync_every` comes to."""
ASSUMED = (
    "Assumed: a ring all-reduce at the full bandwidth, {}, nothing overlaps with the backward pass. Where the "
    "backward pass hides all of plain all-reduce, nothing is won at any bandwidth. `commhooks doctor` measures it."
)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or with --nodes a table of all hooks."""
    _settle_flags(arguments)
    if arguments.nodes is None:
        _run_one_hook(arguments)
    else:
        _run_on_nodes(arguments)
    return 0


def _settle_flags(arguments: argparse.Namespace) -> None:
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


def _check_numbers(arguments: argparse.Namespace, **least: int | None) -> None:
    """Raise HookConfigError for a number below its least value; None: it has to be above 0."""
    for name, limit in least.items():
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and (value > 0 if limit is None else value >= limit)):
            expected = "above 0" if limit is None else f"from {limit}"
            raise HookConfigError(f"{_flag(name)} {value}: expected a number {expected}")


def _run_on_nodes(arguments: argparse.Namespace) -> None:
    """Print the predictions for all hooks on many nodes."""
    _check_numbers(
        arguments, nodes=2, ranks_per_node=1, latency_us=0, total_steps=1,
        bandwidth=None, inside=None, bucket_cap_mb=None,
    )  # fmt: skip
    between, inside, latency = 1e9 * arguments.bandwidth, 1e9 * arguments.inside, 1e-6 * arguments.latency_us
    cluster = Cluster(arguments.nodes, arguments.ranks_per_node, between, inside, latency, arguments.backend)
    model = named_model(arguments.model)
    limits = {"bucket_cap_mb": arguments.bucket_cap_mb, "total_steps": arguments.total_steps}
    predictions = [each for candidate in CANDIDATES for each in predict(candidate, model, cluster, **limits)]
    if arguments.json:
        described = asdict(cluster) | {"model": arguments.model, "assumed": ASSUMED_ON_NODES}
        print(json.dumps({"cluster": described, "predictions": [asdict(each) for each in predictions]}, indent=2))
    else:
        print(cluster_table(predictions, cluster))


def _run_one_hook(arguments: argparse.Namespace) -> None:
    """Print the plan of one hook."""
    _check_numbers(arguments, world_size=2, rtt_ms=0, total_steps=1, bucket_cap_mb=None, codec_ms=None, step_ms=None)
    options = parse_options(arguments.options)
    if arguments.exclude:
        if "exclude" in options:
            raise HookConfigError("--exclude and --options exclude=...: give the patterns in one of them")
        options["exclude"] = arguments.exclude
    with current_folder_first():  # the hook may be a path 'package.module:Class'
        request = HookRequest.parse(arguments.hook, hook_options=options, wrapper=arguments.wrapper)
    model = named_model(arguments.model)
    plan, compressor = model.planned(request, bucket_cap_mb=arguments.bucket_cap_mb, total_steps=arguments.total_steps)
    if arguments.step_ms is not None and not isinstance(compressor.config, LocalSteps):
        raise HookConfigError(f"--step-ms is for hooks with rounds, such as diloco: {compressor.name} has none")
    remarks, config = [model.note], compressor.config
    for sentence in (
        unmatched_sentence(config.excluded_globs, model.every_name),
        unmatched_sentence(config.option_globs, model.every_name, config.glob_option),
    ):
        remarks += [] if sentence is None else [f"{sentence}."]
    estimate = None
    if isinstance(compressor, AdaptiveCompressor):
        remarks.append(
            f"{compressor.name} decides during the training, from what it measures there. This is how it begins, with "
            f"{compressor.chosen}; the plan of what it may choose: --hook powerSGD, --hook int8 and so on."
        )
    else:
        codec = _codec_time(arguments, compressor, plan)
        remarks += [f"Computed with {codec.kernel}: {codec.missing}."] if codec.missing else []
        estimate = _estimated(plan, compressor, codec, arguments.world_size, arguments.rtt_ms / 1e3)
        if getattr(config, "coalesce", False) is None and set(compressor.collectives) == {"sum"}:
            remarks += sentences(arguments.world_size, 0, arguments.rtt_ms / 1e3)
        if isinstance(compressor.config, LocalSteps):
            _add_rounds(estimate, passes_per_exchange(config), arguments.step_ms)
            if arguments.step_ms is None:
                remarks.append("With --step-ms MS (a step without a network): the sync_every that it needs.")
    note = " ".join(filter(None, remarks))
    if arguments.json:
        print(json.dumps(plan.as_dict() | {"model": arguments.model, "note": note, "estimate": estimate}, indent=2))
    else:
        print(plan)
        print("\n".join(filter(None, (note, _estimate_text(plan, estimate) if estimate else ""))))


def _codec_time(arguments: argparse.Namespace, compressor: Compressor[Any], plan: ModelPlan) -> CodecTime:
    """Per step on average: measured here, unless that of one exchange is given."""
    if arguments.codec_ms is not None:
        return CodecTime(arguments.codec_ms / 1e3 / passes_per_exchange(compressor.config))
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HookConfigError("--device cuda: this machine has none that torch can use")
    return measure_codec(compressor, plan.parameters, device)


def _estimated(
    plan: ModelPlan, compressor: Compressor[Any], codec: CodecTime, world_size: int, round_trip_s: float
) -> dict[str, Any]:
    """Estimates for JSON and text: times in seconds, bandwidths in Gbit/s per rank."""
    before, after, buckets = plan.bytes_before, plan.bytes_after + plan.flag_bytes, max(1, len(plan.bucket_names))
    endless, *networks = (
        Network(world_size, 1e9 * speed, round_trip_s / 2, backend="gloo") for speed in (math.inf, *GBIT_S)
    )

    def without_s(network: Network) -> float:
        return network.seconds(before, buckets=buckets)

    def with_s(network: Network) -> float:
        return 0.0 if plan.sends is False else exchange_s(compressor, network, after, buckets)

    later_s = with_s(endless) - without_s(endless)
    return {
        "world_size": world_size,
        "round_trip_s": round_trip_s,
        "wire_bytes_before": int(endless.leaving(before)),
        "wire_bytes_after": int(endless.leaving(after)),
        "codec_s": codec.seconds,
        "codec_measured_on": codec.device or None,
        "codec_threads": codec.threads or None,
        "codec_kernel": codec.kernel or None,
        "codec_sample_share": codec.share,
        "break_even_gbit_s": plan.break_even_gbit_s(codec.seconds + later_s, world_size),
        "at_gbit_s": {
            str(speed): {"without_s": without_s(network), "with_s": with_s(network) + codec.seconds}
            for speed, network in zip(GBIT_S, networks, strict=True)
        },
        "assumed": ASSUMED.format(f"a round trip of {1e3 * round_trip_s:g} ms" if round_trip_s else "no latency"),
    }


def _add_rounds(estimate: dict[str, Any], every: int, step_ms: float | None) -> None:
    """Add the seconds of an outer step, and, for steps of `step_ms` without a network, the least steps of a round in
    which it takes a small share of the time."""
    estimate["steps_of_a_round"] = every
    for times in estimate["at_gbit_s"].values():
        times["outer_step_s"] = every * times["with_s"]
        if step_ms is not None:
            others = times["outer_step_s"] * (1 / SMALL_SHARE - 1)
            times["sync_every"] = max(1, math.ceil(others / (step_ms / 1e3)))


def _estimate_text(plan: ModelPlan, estimate: dict[str, Any]) -> str:
    """The estimates as text: what is sent, the break-even, and a table of codec and sending at some bandwidths."""
    before, after = plan.unit.text(estimate["wire_bytes_before"]), plan.unit.text(estimate["wire_bytes_after"])
    lines = [
        f"On the wire each of {estimate['world_size']} ranks sends {before} per step without and {after} with the hook "
        "(ring all-reduce)."
    ]
    if plan.sends is False:
        return lines[0]
    if (every := estimate.get("steps_of_a_round", 1)) > 1:
        outer = plan.unit.text(every * estimate["wire_bytes_after"])
        lines.append(
            f"That is the average over a round of {every} steps: {outer} in its outer step, and nothing before."
        )
    codec, where = f"{_ms(estimate['codec_s'])} ms", estimate["codec_measured_on"]
    if where is not None:
        where += f", {estimate['codec_threads']} threads" if where == "cpu" else ""
        part = "" if estimate["codec_sample_share"] > 0.999 else ", on a sample of the matrices"
        kernel = "" if estimate["codec_kernel"] in (None, TORCH.name) else f", {estimate['codec_kernel']} kernel"
        codec = f"{codec}, measured here: {where}{kernel}{part}"
    limit = estimate["break_even_gbit_s"]
    if estimate["wire_bytes_after"] >= estimate["wire_bytes_before"]:
        lines.append("Break-even: none, the hook saves no bytes.")
    elif limit is None and estimate["round_trip_s"] and estimate["codec_s"]:
        lines.append(f"Break-even: none, the hook sends faster at any bandwidth, in fewer round trips (codec {codec}).")
    elif limit is None:
        lines.append(f"Break-even: none (codec {codec}).")
    else:
        lines.append(f"Break-even: {limit:.2g} Gbit/s per rank (codec {codec}). Below that the hook sends faster.")
    columns = {"without_s": "without, ms", "with_s": "with the hook, ms", "outer_step_s": "an outer step, ms"}
    columns["sync_every"] = f"sync_every for {100 * SMALL_SHARE:g} % of the time"
    table, rows = new_table(), estimate["at_gbit_s"]
    table.add_column("Gbit/s", justify="right")
    shown = [name for name in columns if name in rows[str(GBIT_S[0])]]
    for name in shown:
        table.add_column(columns[name], justify="right")
    for speed, times in rows.items():
        table.add_row(speed, *(_ms(times[name]) if name.endswith("_s") else str(times[name]) for name in shown))
    lines += [line.rstrip() for line in text_of(table).strip("\n").splitlines()]
    return "\n".join([*lines, estimate["assumed"]])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds < 10 else f"{1e3 * seconds:.0f}"

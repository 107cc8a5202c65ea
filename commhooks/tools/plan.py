"""`commhooks plan`: print a hook's plan of a model before training."""

import argparse
import json
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookConfigError
from commhooks.gradients.names import warn_if_unmatched
from commhooks.plan import ModelPlan, plan_model
from commhooks.request import HookRequest
from commhooks.tools.common import call, parse_options, user_code


def run(arguments: argparse.Namespace) -> None:
    options = parse_options(arguments.options)
    if arguments.exclude and "exclude" in options:
        raise HookConfigError(
            "--exclude and --options exclude=...: give the patterns in one of them"
        )
    if arguments.exclude:
        options["exclude"] = arguments.exclude
    planned = _of_shards if arguments.shards else _of_hook
    plan, summary = planned(arguments, options)
    print(json.dumps(plan.as_dict(), indent=2) if arguments.json else f"{plan}{summary}")


def _of_hook(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[ModelPlan, str]:
    given = {"--ranks": arguments.ranks, "--ranks-per-node": arguments.ranks_per_node}
    for flag, value in given.items():
        if value is not None:
            raise HookConfigError(f"{flag} without --shards: the plan of a hook is for each rank")
    hook = arguments.hook or "powerSGD"
    with user_code(hook):  # it may be a path 'package.module:Class'
        request = HookRequest.parse(hook, hook_options=options, wrapper=arguments.wrapper)
    model = _model(arguments.model)
    plan = plan_model(model, request, arguments.total_steps)
    warn_if_unmatched(options.get("exclude", ()), model)
    return plan, ""


def _of_shards(arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[ModelPlan, str]:
    from commhooks.hook.shards_plan import plan_unsharded

    given = {
        "--hook": arguments.hook,
        "--wrapper": arguments.wrapper,
        "--total-steps": arguments.total_steps,
    }
    for flag, value in given.items():
        if value is not None:
            raise HookConfigError(
                f"{flag} with --shards, which plans FSDP2's own collectives without a hook between"
                " replicas: print(hook.plan()) of an attached hook shows both"
            )
    if arguments.ranks is None:
        raise HookConfigError("--shards without --ranks: expected the number of ranks of the run")
    model = _model(arguments.model)
    ranks_per_node = 1 if arguments.ranks_per_node is None else arguments.ranks_per_node
    plan, summary = plan_unsharded(
        model, arguments.shards, options, arguments.ranks, ranks_per_node
    )
    warn_if_unmatched(options.get("exclude", ()), model)
    return plan, f"\n{summary}"


def _model(path: str) -> torch.nn.Module:
    model = call(path)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(f"{path!r} returned a {type(model).__name__}, not an nn.Module")
    return model

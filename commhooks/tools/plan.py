"""`commhooks plan`: print a hook's plan of a model before training."""

import argparse
import json

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookConfigError
from commhooks.gradients.names import warn_if_unmatched
from commhooks.plan import plan_model
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
    with user_code(arguments.hook):  # it may be a path 'package.module:Class'
        request = HookRequest.parse(arguments.hook, hook_options=options, wrapper=arguments.wrapper)
    model = call(arguments.model)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(
            f"{arguments.model!r} returned a {type(model).__name__}, not an nn.Module"
        )
    plan = plan_model(model, request, arguments.total_steps)
    warn_if_unmatched(options.get("exclude", ()), model)
    print(json.dumps(plan.as_dict(), indent=2) if arguments.json else plan)

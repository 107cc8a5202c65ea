"""`commhooks plan`: print what `hook.plan()` will say of a model, before there is a training."""

import argparse
import json

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookConfigError
from commhooks.gradients.names import warn_if_unmatched
from commhooks.plan import plan_model
from commhooks.request import HookRequest
from commhooks.tools.options import parse_options
from commhooks.tools.user_code import call, user_code


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    options = parse_options(arguments.options)
    if arguments.exclude:
        if "exclude" in options:
            raise HookConfigError("--exclude and --options exclude=...: give the patterns in one of them")
        options["exclude"] = arguments.exclude
    with user_code(arguments.hook):  # it may be a path 'package.module:Class'
        request = HookRequest.parse(arguments.hook, hook_options=options, wrapper=arguments.wrapper)
    model = _built(arguments.model)
    plan = plan_model(model, request, arguments.total_steps)
    warn_if_unmatched(options.get("exclude", ()), model)
    print(json.dumps(plan.as_dict(), indent=2) if arguments.json else plan)
    return 0


def _built(path: str) -> torch.nn.Module:
    found = call(path)
    if isinstance(found, tuple) and found:  # (model, batch_fn), as for `commhooks doctor`
        found = found[0]
    if isinstance(found, DistributedDataParallel):
        found = found.module
    if not isinstance(found, torch.nn.Module):
        raise HookConfigError(f"{path!r} returned a {type(found).__name__}, not an nn.Module")
    return found

"""The flags of `accelerate-commhooks config`, one per setting, and where settings are found. Nothing here needs
torch or Accelerate."""

import argparse
from typing import Any

from commhooks.hook.vocabulary import ARGUMENTS, Argument

SECTION = "comm_hook_config"
"""The key of the section in Accelerate's configuration file."""
VARIABLE = "ACCELERATE_COMM_HOOK_CONFIG"
"""The environment variable that names a file of settings, or holds them."""
YES_NO = ("true", "false")


def _choices(argument: Argument) -> tuple[str, ...]:
    """The default first."""
    choices = [each for each in argument.choices if each is not None]
    return tuple(sorted(choices, key=lambda each: each != argument.default))


FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    name: (each.help, YES_NO if each.kind is bool else _choices(each)) for name, each in ARGUMENTS.items()
} | {
    "dim": ("DDP: the dimension along which inputs are divided (0)", ()),
    "broadcast_buffers": ("DDP: copy the buffers of rank 0 to all ranks before each forward pass (true)", YES_NO),
    "bucket_cap_mb": ("DDP: size of a bucket of gradients, MiB (25)", ()),
    "find_unused_parameters": ("DDP: look for parameters without a gradient in each step (false)", YES_NO),
    "check_reduction": ("DDP: deprecated by torch (false)", YES_NO),
    "gradient_as_bucket_view": ("DDP: gradients are views of the buckets, which saves memory (false)", YES_NO),
    "static_graph": ("DDP: every step uses the same parameters in the same way (false)", YES_NO),
}
"""Setting -> what it means, with the default, and its choices. A test compares them with the settings themselves."""
_METAVARS = {"hook": "NAME", "hook_options": "NAME=VALUE", "hook_state": "MODULE:NAME", "ranks_per_node": "N|auto"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, each with "_" and with "-" in its name."""
    for name, (text, choices) in FLAGS.items():
        more: dict[str, Any] = {"choices": choices} if choices else {"metavar": _METAVARS.get(name, "N")}
        if choices == YES_NO:
            more["type"] = str.lower
        if name == "hook_options":
            more["nargs"] = "+"
        names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        flag: Any = parser.add_argument(*names, dest=name, help=text, required=name == "hook", **more)
        if name == "hook":
            flag.completer = _hook_names


def _hook_names(**_: object) -> list[str]:
    from commhooks import available_hooks

    return list(available_hooks())

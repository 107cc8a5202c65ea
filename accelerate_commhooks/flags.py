"""The flags of `accelerate-commhooks config`, one per setting. Nothing here needs torch or Accelerate."""

import argparse
from typing import Any

SECTION = "comm_hook_config"
"""The key of the section in Accelerate's configuration file."""
YES_NO = ("true", "false")
FLAGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hook": ("which hook, e.g. powerSGD: `commhooks hooks` lists them; none is DDP without a hook", ()),
    "hook_options": ("options of the hook, e.g. matrix_approximation_rank=4", ()),
    "hook_state": ("state of a function of yours, as package.module:name (none)", ()),
    "wrapper": ("what is made of the numbers that are sent (nothing)", ("fp16", "bf16", "int8", "int4")),
    "save_residual": (
        "which residuals save_state writes: of each rank, their mean, or none (per_rank)",
        ("per_rank", "mean", "drop"),
    ),
    "strict": ("whether loading the state of another hook or model is an error (true)", YES_NO),
    "total_steps": ("synchronised backward passes in the whole run, for a start that is a fraction of it", ()),
    "check_every": ("compare the weights of all ranks before every so many backward passes (never)", ()),
    "ranks_per_node": (
        "average exactly inside a node of so many ranks, or `auto`; compress between nodes (no)",
        (),
    ),
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

"""Marks for tests that need a feature which some supported versions lack. docs/versions.md lists
them.

`torch.__version__` is only checked if a missing feature shows as a wrong result or an obscure
error.
"""

import importlib.metadata
import importlib.util
import re

import pytest
import torch
from torch.distributed.fsdp import FSDPModule


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "0"


TORCH = _numbers(torch.__version__)[:2]


def _needs(feature: str, here: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not here, reason=f"needs {feature}")


switches_per_library = _needs(
    "a precision switch per library", hasattr(torch.backends.mkldnn, "matmul")
)

complex_on_gloo = _needs("DDP with complex parameters on gloo", TORCH > (2, 8))

fully_shard_on_gloo = _needs(
    "a fully_shard that averages float32 on gloo (torch 2.8 adds up)", TORCH > (2, 8)
)

limit_of_a_group = _needs(
    "a gloo group whose time-out can be changed (torch 2.8 keeps the first one)", TORCH > (2, 8)
)

reset_iter_state = _needs("FSDPModule.reset_iter_state", hasattr(FSDPModule, "reset_iter_state"))

reduce_scatter_unused_params = _needs(
    "FSDPModule.set_reduce_scatter_unused_params",
    hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
)

custom_collectives = _needs(
    "FSDPModule.set_custom_all_gather and set_custom_reduce_scatter",
    hasattr(FSDPModule, "set_custom_all_gather")
    and hasattr(FSDPModule, "set_custom_reduce_scatter"),
)

replicate_with_fsdp = _needs(
    "torch.distributed._composable.replicate_with_fsdp",
    importlib.util.find_spec("torch.distributed._composable.replicate_with_fsdp") is not None,
)

delayed_in_small_buckets = _needs(
    "delay_all_reduce_named_params that takes a fraction as bucket_cap_mb (torch 2.8 and 2.11 do"
    " not)",
    TORCH > (2, 11),
)

mixed_precision_of_ddp = _needs(
    "DDP's mixed_precision, which a torch for CUDA refuses without a driver",
    torch.version.cuda is None or torch.cuda.is_available(),
)

# jsonargparse takes the annotation `int | float | None` of a config for Lightning's own `float |
# int | None`.
whole_numbers_in_config_classes = _needs(
    "a LightningCLI that leaves whole numbers whole in config objects (Lightning 2.6.0 and 2.6.1"
    " make them floats)",
    _numbers(_installed("lightning")) > (2, 6, 1),
)

ddp_models_stay_as_they_are = _needs(
    "an Accelerator.prepare that returns DDP models as they are (Accelerate 1.10 and 1.13 wrap them"
    " again)",
    _numbers(_installed("accelerate"))[:2] > (1, 13),
)

trainer_resumes_on_cpu = _needs(
    "a Trainer that resumes on several CPU ranks (transformers 5.3 and 5.5 load to 'cpu:0', which"
    " torch cannot)",
    _numbers(_installed("transformers"))[:2] > (5, 5),
)

keeps_denormals = _needs(
    "a Triton that divides denormals (3.4, which torch 2.8 installs, takes them for zero)",
    _numbers(_installed("triton"))[:2] != (3, 4),
)

"""The operators that PowerSGD dispatches per step on an accelerator, counted on tensors without memory.

    python benchmarks/launches.py [--models resnet50 gpt2 gpt-1.3b] [--ranks 1 4 16]

On an accelerator the host issues every operator of a step, one or more kernels each. For models of many small matrices
this takes longer than the arithmetic. The device "meta" runs the code for accelerators on shapes alone, so counting
needs neither a GPU nor the memory of the model. Buckets are DDP's default ones, estimated. Not counted: the
collectives, and a few operators per step with which the engine joins the verdicts.

  operators   compute or copy: one or more kernels each
  views       only describe memory: no kernel, but time on the host
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common import Row, number, parse, parser, report
from machine import machine
from models import TASKS
from torch.utils._python_dispatch import TorchDispatchMode  # the only way to see what is dispatched; torch 2.13

from commhooks.engine.local_driver import LocalDriver
from commhooks.gradients.bucket_estimate import Reduced, estimate_buckets
from commhooks.hook.request import HookRequest

Shapes = Sequence[tuple[int, ...]]
META = torch.device("meta")


def transformer_shapes(width: int, layers: int, words: int = 50_257, context: int = 1024) -> Shapes:
    """The parameters of a GPT-2: embeddings, and per block two layer norms and four linear layers."""
    norm = [(width,), (width,)]
    linear = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (context, width), *([*norm, *linear, *norm, *feed_forward] * layers), *norm]


def resnet50_shapes() -> Shapes:
    with META:
        return [tuple(parameter.shape) for parameter in TASKS["resnet50"].make().parameters()]


MODELS: Mapping[str, Any] = {
    "resnet50": resnet50_shapes,
    "gpt2": lambda: transformer_shapes(768, 12),
    "gpt-1.3b": lambda: transformer_shapes(2048, 24, context=2048),
    "tiny": lambda: transformer_shapes(64, 2, 256, 32),
}
VARIANTS: Mapping[str, tuple[str | None, dict[str, Any], float | None]] = {
    "powerSGD": (None, {}, None),
    "fp16 wire": ("fp16", {}, None),
    "same shape": (None, {"batch_tensors_with_same_shape": True}, None),
    "one bucket": (None, {}, 1e6),
}
"""Wrapper, options, and DDP's bucket_cap_mb."""


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            self.views += 1
        else:
            self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count(shapes: Shapes, wrapper: str | None, options: Mapping[str, Any], cap_mb: float | None) -> Row:
    """Count one warm step of PowerSGD."""
    parameters = {str(i): torch.empty(shape, device=META) for i, shape in enumerate(shapes)}
    sizes = [Reduced(name, 4 * p.numel(), p.dtype, p.device) for name, p in parameters.items()]
    buckets = [{name: parameters[name] for name in names} for names in estimate_buckets(sizes, cap_mb)]
    given = {"start_powerSGD_iter": 0, **options}
    compressor = HookRequest.parse("powerSGD", hook_options=given, wrapper=wrapper).new_compressor(None)
    assert compressor is not None
    loopback = LocalDriver(compressor, buckets, META)
    loopback.step()
    loopback.step()
    with Dispatched() as dispatched:
        loopback.step()
    operators = sum(dispatched.operators.values())
    return {"buckets": len(buckets), "operators": operators, "views": dispatched.views}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet50", "gpt2", "gpt-1.3b"])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16], help="of the factors")
    args = parse(arguments, models=["tiny"], ranks=[1, 4])
    at = machine()
    rows: list[Row] = []
    for model in args.models:
        shapes = MODELS[model]()
        common = {"section": model, "model": model, "matrices": sum(len(shape) > 1 for shape in shapes)}
        for variant, (wrapper, options, cap_mb) in VARIANTS.items():
            for rank in args.ranks:
                given = {"matrix_approximation_rank": rank, **options}
                rows.append({**common, "hook": variant, "rank": rank, **count(shapes, wrapper, given, cap_mb)})
    columns = {name: number(name) for name in ("model", "matrices", "hook", "rank", "buckets", "operators", "views")}
    report("launches", "launches: operators per step on an accelerator", args, at, rows, columns)


if __name__ == "__main__":
    main()

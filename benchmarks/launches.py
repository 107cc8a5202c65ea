"""The operators that PowerSGD, int8 and int4 dispatch per step on an accelerator, and shards per
collective of FSDP2, counted on tensors without memory.

    python benchmarks/launches.py [--models resnet50 gpt2 gpt-1.3b] [--ranks 1 4 16]

On an accelerator the host issues every operator of a step, one or more kernels each. For models
with many small matrices this takes longer than the arithmetic. The device "meta" runs the code for
accelerators on shapes alone, so counting needs neither a GPU nor the memory of the model. Buckets
are estimated, with DDP's default sizes. Collectives, and a few operators per step that combine the
verdicts, are not counted. A unit of FSDP2 is a block of the model; FSDP2's own copies into and out
of its buffers, three operators per unit and step, are the same with and without shards.

  operators   compute or copy: one or more kernels each
  views       only describe memory: no kernel, but time on the host
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Row, machine, number, parse, parser, report
from models import GPT2, TASKS, GPTBlock

from commhooks.request import HookRequest
from commhooks.sharded.gather import Finishing, GatherWeights
from commhooks.sharded.layout import UnitParameter
from commhooks.sharded.options import Shards
from commhooks.sharded.passes import Passes
from commhooks.sharded.routes import Direct
from commhooks.sharded.scatter import ScatterGradients
from commhooks.sharded.traffic import Traffic
from commhooks.sharded.unit_codecs import UnitCodecs
from commhooks.sharded.units import UnitLayout
from tests.support.dispatched import Dispatched
from tests.support.local_driver import LocalDriver

Shapes = Sequence[tuple[int, ...]]
META = torch.device("meta")


MODELS: Mapping[str, Callable[[], torch.nn.Module]] = {
    "resnet50": TASKS["resnet50"].make,
    "gpt2": GPT2,
    "gpt-1.3b": lambda: GPT2(context=2048, width=2048, blocks=24, heads=16),
    "tiny": lambda: GPT2(256, 32, 64, 2, 4),
}
VARIANTS: Mapping[str, tuple[str | None, dict[str, Any], float | None]] = {
    "powerSGD": (None, {}, None),
    "fp16 wire": ("fp16", {}, None),
    "same shape": (None, {"batch_tensors_with_same_shape": True}, None),
    "one bucket": (None, {}, 1e6),
}
"""Of PowerSGD: wrapper, options, and DDP's bucket_cap_mb. The world size changes nothing."""
QUANTISED: Mapping[str, float | None] = {"int8": None, "int4": None, "int8, one bucket": 1e6}
"""DDP's bucket_cap_mb."""


def cut(
    parameters: Mapping[str, torch.Tensor], cap_mb: float | None
) -> list[dict[str, torch.Tensor]]:
    """Cut the parameters into buckets like DDP's: from the last parameter on, by default 1 MiB and
    then 25 MiB each.
    """
    caps = [2**20, 25 * 2**20] if cap_mb is None else [cap_mb * 2**20]
    buckets: list[dict[str, torch.Tensor]] = [{}]
    for name, parameter in reversed(parameters.items()):
        if (
            sum(parameter.nbytes for parameter in buckets[-1].values())
            >= caps[min(len(buckets), len(caps)) - 1]
        ):
            buckets.append({})
        buckets[-1][name] = parameter
    return buckets


def count(
    shapes: Shapes,
    hook: str,
    wrapper: str | None,
    options: Mapping[str, Any],
    cap_mb: float | None,
    world_size: int = 1,
) -> Row:
    """Count one warm step."""
    parameters = {str(i): torch.empty(shape, device=META) for i, shape in enumerate(shapes)}
    buckets = cut(parameters, cap_mb)
    compressor = HookRequest.parse(
        hook, hook_options=dict(options), wrapper=wrapper
    ).new_compressor(None)
    assert compressor is not None
    loopback = LocalDriver(compressor, buckets, META, world_size)
    loopback.step()
    loopback.step()
    with Dispatched() as dispatched:
        loopback.step()
    operators = sum(dispatched.operators.values())
    return {"buckets": len(buckets), "operators": operators, "views": dispatched.views}


@dataclass(frozen=True)
class Ranks:
    """Stands for a process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.ranks // 2


class Unsent(Direct):
    """A route on which nothing travels."""

    def gather(self, messages: torch.Tensor, group: Any, what: str) -> Callable[[], object]:
        return lambda: None

    def exchange(self, sent: torch.Tensor, arriving: torch.Tensor, group: Any, what: str) -> Any:
        return Finishing(lambda: None)


def count_shards(shapes: Shapes, form: str, ranks: int) -> dict[str, Row]:
    """Count one gather and one scatter of a unit with parameters of these shapes."""
    real = torch.float32
    parameters = [
        UnitParameter((str(i),), shape, real, real, real, -(-math.prod(shape) // ranks))
        for i, shape in enumerate(shapes)
    ]
    codecs = UnitCodecs(
        Shards(weights=form, gradients=form),
        [UnitLayout("unit", tuple(parameters), gathers=1)],
        META,
        ranks=ranks,
        nodes=ranks,
        native=False,
    )
    ((for_weights, for_gradients),) = codecs.codecs
    assert for_weights is not None
    traffic = Traffic()
    route: Any = Unsent(ranks, ranks // 2, traffic)
    gather = GatherWeights("unit", ranks, for_weights, route, codecs.gathered, traffic)
    scatter = ScatterGradients(
        "unit", for_gradients, route, codecs.scattered, Passes(), traffic, logs=False
    )
    whole = torch.empty(ranks * for_weights.layout.numel, device=META)
    row = whole.view(ranks, -1)[ranks // 2]
    group: Any = Ranks(ranks)
    counted = {}
    for name, run in {
        "gather": lambda: gather(whole, row, group),
        "scatter": lambda: scatter(torch.empty_like(row), whole, group, dist.ReduceOp.AVG),
    }.items():
        run()
        with Dispatched() as dispatched:
            run()
        operators = sum(dispatched.operators.values())
        counted[name] = {"operators": operators, "views": dispatched.views}
    return counted


def shards_rows(model: torch.nn.Module, common: Row, world_sizes: Sequence[int]) -> list[Row]:
    """Count the first transformer block of `model`; [] if it has none."""
    block = next((part for part in model.modules() if isinstance(part, GPTBlock)), None)
    if block is None:
        return []
    shapes = [tuple(parameter.shape) for parameter in block.parameters()]
    common = {**common, "matrices": sum(len(shape) > 1 for shape in shapes), "buckets": 1}
    return [
        {**common, "hook": f"shards {form}, a {name}", "world size": ranks, **counted}
        for form in ("int8", "bf16")
        for ranks in world_sizes
        for name, counted in count_shards(shapes, form, ranks).items()
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=["resnet50", "gpt2", "gpt-1.3b"]
    )
    arguments.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 4, 16], help="of the factors"
    )
    arguments.add_argument(
        "--world-sizes", type=int, nargs="+", default=[2, 16, 64], help="for int8, int4 and shards"
    )
    args = parse(arguments, models=["tiny"], ranks=[1, 4])
    at = machine()
    rows: list[Row] = []
    for model in args.models:
        with META:
            made = MODELS[model]()
        shapes = [tuple(parameter.shape) for parameter in made.parameters()]
        common = {
            "section": model,
            "model": model,
            "matrices": sum(len(shape) > 1 for shape in shapes),
        }
        for variant, (wrapper, options, cap_mb) in VARIANTS.items():
            for rank in args.ranks:
                given = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 0, **options}
                counted = count(shapes, "powerSGD", wrapper, given, cap_mb)
                rows.append({**common, "hook": variant, "rank": rank, **counted})
        for hook, cap_mb in QUANTISED.items():
            for world_size in args.world_sizes:
                counted = count(shapes, hook[:4], None, {}, cap_mb, world_size)
                rows.append({**common, "hook": hook, "world size": world_size, **counted})
        rows += shards_rows(made, common, args.world_sizes)
    names = ("model", "matrices", "hook", "rank", "world size", "buckets", "operators", "views")
    columns = {name: number(name) for name in names}
    report("launches", "launches: operators per step on an accelerator", args, at, rows, columns)


if __name__ == "__main__":
    main()

"""Random trainings with compressed shards, compared with `shards_oracle.py` after every step."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import commhooks
from tests.sharded.shards_oracle import (
    Weigh,
    decoded,
    form_of,
    padded_shard,
    real_dtype,
    reduced,
    whole_of,
)

Shape = tuple[int, ...]
DTYPES = {
    "float32": (torch.float32, None, None),
    "float64": (torch.float64, None, None),
    "bf16": (torch.float32, torch.bfloat16, None),
    "bf16, float32 sums": (torch.float32, torch.bfloat16, torch.float32),
    "fp16": (torch.float32, torch.float16, None),
    "all bf16": (torch.bfloat16, None, None),
}
"""The dtype of the shards, `param_dtype` and `reduce_dtype`."""


@dataclass(frozen=True)
class Case:
    """Attributes:
    units: the shapes of the parameters of each unit; the last one is the root's.
    frozen, columns: places (unit, parameter) of frozen parameters, and of those split by columns.
    accumulated: backward passes without communication before each step.
    nonfinite: the rank, unit and parameter with an inf in the last step.
    """

    seed: int
    ranks: int
    units: tuple[tuple[Shape, ...], ...]
    dtypes: str = "float32"
    weights: str | None = "int8"
    gradients: str | None = "int8"
    block: int = 32
    nodes_of: int | None = None
    reshard: Any = None
    frozen: tuple[tuple[int, int], ...] = ()
    columns: tuple[tuple[int, int], ...] = ()
    accumulated: int = 0
    divide: float | None = None
    force_sum: bool = False
    nonfinite: tuple[int, int, int] | None = None
    steps: int = 2


class Unit(nn.Module):
    """Its gradients are what `forward` is given, and it keeps the weights that it has seen."""

    def __init__(self, shapes: tuple[Shape, ...], dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(f"p{number}", nn.Parameter(value.to(dtype)))
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        parameters = dict(self.named_parameters(recurse=False))
        self.seen = {name: p.detach().clone() for name, p in parameters.items()}
        for name, parameter in parameters.items():
            x = x + (parameter * gradients[name].to(parameter.dtype)).sum().to(x.dtype)
        return x * 1.0


class Model(Unit):
    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__(case.units[-1], dtype, case.seed)
        for number, shapes in enumerate(case.units[:-1]):
            self.add_module(f"u{number}", Unit(shapes, dtype, case.seed + 1 + number))

    def units(self) -> dict[str, Unit]:
        return {name: unit for name, unit in self.named_children()} | {"": self}

    def forward(self, x: torch.Tensor, gradients: Any) -> torch.Tensor:  # type: ignore[override]
        for name, unit in self.named_children():
            x = unit(x, gradients[name])
        return super().forward(x, gradients[""])


class Training:
    """A case on this rank, beside what the oracle says of it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype, self.param_dtype, self.reduce_dtype = DTYPES[case.dtypes]
        self.gathered = self.param_dtype or self.dtype
        self.reduced = self.reduce_dtype or self.gathered
        self.model = Model(case, self.dtype)
        names = [*self.model.units()]
        self.columns = {(names[unit], f"p{number}") for unit, number in case.columns}
        for unit, number in case.frozen:
            getattr(self.model.units()[names[unit]], f"p{number}").requires_grad_(False)
        policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        by_columns = {id(getattr(self.model.units()[unit], name)) for unit, name in self.columns}
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (case.ranks,)),
            "mp_policy": policy,
            "shard_placement_fn": lambda p: Shard(1) if id(p) in by_columns else None,
            "reshard_after_forward": case.reshard,
        }
        for unit in self.model.units().values():
            fully_shard(unit, **options)
            if case.divide is not None:
                unit.set_gradient_divide_factor(case.divide)  # type: ignore[attr-defined]
            unit.set_force_sum_reduction_for_comms(case.force_sum)  # type: ignore[attr-defined]
        shards = commhooks.Shards(
            weights=case.weights,
            gradients=case.gradients,
            block_size=case.block,
            ranks_per_node=case.nodes_of,
        )
        self.hook = commhooks.attach(self.model, None, shards=shards)
        self.hook.quiet()
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1, momentum=0.5
        )

    def trained_units(self) -> int:
        """Count the units with a trained parameter; a frozen unit has nothing to scatter."""
        return sum(
            any(p.requires_grad for p in unit.parameters(recurse=False))
            for unit in self.model.units().values()
        )

    def dim(self, unit: str, name: str) -> int:
        return int((unit, name) in self.columns)

    def gradients(self, step: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the gradients of one backward pass, in the dtype in which autograd computes."""
        generator = torch.Generator().manual_seed(1000 * self.case.seed + 10 * step + rank)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for place, (unit_name, unit) in enumerate(self.model.units().items()):
            found[unit_name] = {}
            for number, (name, parameter) in enumerate(unit.named_parameters(recurse=False)):
                size = 10.0 ** float(torch.randint(-3, 2, (), generator=generator))
                gradient = size * torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
                last = step == self.case.steps * (self.case.accumulated + 1) - 1
                if last and self.case.nonfinite == (rank, place, number):
                    gradient.view(-1)[-1] = float("inf")
                found[unit_name][name] = gradient.to(self.gathered)
        return found

    def wholes(self) -> dict[str, dict[str, torch.Tensor]]:
        found: dict[str, dict[str, torch.Tensor]] = {}
        for unit_name, unit in self.model.units().items():
            unit.reshard()  # type: ignore[attr-defined]
            found[unit_name] = {}
            for name, parameter in unit.named_parameters(recurse=False):
                assert isinstance(parameter, DTensor)
                found[unit_name][name] = parameter.full_tensor().detach().clone()
        return found

    def step(self, number: int) -> list[str]:
        """Train one step, and return what differs from the oracle."""
        before, passes = self.wholes(), self.case.accumulated + 1
        self.optimizer.zero_grad()
        for place in range(passes):
            self.model.set_requires_gradient_sync(place == passes - 1)  # type: ignore[operator]
            gradients = self.gradients(number * passes + place, dist.get_rank())
            self.model(torch.zeros((), dtype=torch.float64), gradients).backward()
        problems = []
        for unit_name, unit in self.model.units().items():
            for name, whole in before[unit_name].items():
                expected = self.expected_weight(whole, self.dim(unit_name, name))
                problems += _differences(f"weight {unit_name}.{name}", unit.seen[name], expected)
        unit_problems = [
            self.compare_gradients(unit_name, number) for unit_name in self.model.units()
        ]
        self.optimizer.step()
        return problems + [problem for found in unit_problems for problem in found]

    def form(self, shape: Shape, numel: int, dtype: torch.dtype, form: str | None) -> str:
        return form_of(shape, numel, dtype, form, self.case.block)

    def expected_weight(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        ranks, whole = self.case.ranks, whole.to(self.gathered)
        shards = [padded_shard(whole, rank, ranks, dim) for rank in range(ranks)]
        form = self.form(whole.shape, shards[0].numel(), self.gathered, self.case.weights)
        return whole_of(
            [decoded(shard, form, self.case.block) for shard in shards], whole.shape, dim
        )

    def compare_gradients(self, unit_name: str, number: int) -> list[str]:
        unit, ranks, me = self.model.units()[unit_name], self.case.ranks, dist.get_rank()
        trained = {n: p for n, p in unit.named_parameters(recurse=False) if p.requires_grad}
        sums = [self.accumulated_gradients(unit_name, number, rank) for rank in range(ranks)]
        if not self.compresses_gradients(trained, unit_name):
            return []  # FSDP2's own reduce-scatter, which may add in any order
        spoilt = [any(not of[name].isfinite().all() for name in trained) for of in sums]
        problems = []
        for name, parameter in trained.items():
            assert isinstance(parameter.grad, DTensor)
            dim, got = self.dim(unit_name, name), parameter.grad.to_local()
            pieces = [padded_shard(of_rank[name], me, ranks, dim) for of_rank in sums]
            expected = self.expected_piece(pieces, parameter.shape, spoilt)
            expected = padded_local(expected, parameter, me, ranks, dim).view(got.shape)
            problems += _differences(f"gradient {unit_name}.{name}", got, expected)
            if any(spoilt) and got.numel() and got.isfinite().all():
                problems.append(f"gradient {unit_name}.{name} is finite on rank {me}")
        return problems

    def accumulated_gradients(
        self, unit_name: str, number: int, rank: int
    ) -> dict[str, torch.Tensor]:
        passes = self.case.accumulated + 1
        total: dict[str, torch.Tensor] = {}
        for place in range(passes):
            for name, gradient in self.gradients(number * passes + place, rank)[unit_name].items():
                added = gradient.to(self.reduced)
                total[name] = total[name] + added if name in total else added
        return total

    def expected_piece(
        self, pieces: list[torch.Tensor], shape: torch.Size, spoilt: list[bool]
    ) -> torch.Tensor:
        case, me, before, weigh, after = self.case, dist.get_rank(), *self.factors()
        pieces = [piece / before if before != 1 else piece.clone() for piece in pieces]
        form = self.form(shape, pieces[0].numel(), self.reduced, case.gradients)
        for piece, is_spoilt in zip(pieces, spoilt, strict=True):
            piece[: int(is_spoilt)] = float("nan")
        if case.nodes_of is not None:
            size = case.nodes_of
            pieces = [
                sum(pieces[first + 1 : first + size], pieces[first])
                for first in range(0, case.ranks, size)
            ]
            me //= size
        total = reduced(pieces, me, form, case.block, weigh)
        return (total / after if after != 1 else total).to(self.dtype)

    def compresses_gradients(self, trained: dict[str, Any], unit_name: str) -> bool:
        forms = []
        for name, parameter in trained.items():
            whole = torch.empty(parameter.shape)
            numel = padded_shard(whole, 0, self.case.ranks, self.dim(unit_name, name)).numel()
            forms.append(self.form(whole.shape, numel, self.reduced, self.case.gradients))
        return set(forms) > {"exact"} or bool(forms) and "exact" not in forms

    def factors(self) -> tuple[float, Weigh, float]:
        """Return by what FSDP2 divides before, what the reduction does, and the division after."""
        ranks, given = self.case.ranks, self.case.divide
        narrow = self.reduced not in (torch.float32, torch.bfloat16)
        real = real_dtype(self.reduced)
        if not narrow and not self.case.force_sum:
            if given is None or given == ranks:
                return 1.0, lambda t: t / torch.tensor(float(ranks), dtype=real), 1.0
            return 1.0, lambda t: t * (1 / given), 1.0
        factor, before = given or float(ranks), 1.0
        while narrow and factor % before == 0 and factor / before > before:
            before *= 2
        return before, lambda t: t, factor / before


def padded_local(
    flat: torch.Tensor, parameter: torch.Tensor, rank: int, ranks: int, dim: int
) -> torch.Tensor:
    """Return the part of a padded shard that belongs to the parameter."""
    shape = list(parameter.shape)
    each = -(-shape[dim] // ranks)
    here = min(each, max(0, shape[dim] - rank * each))
    return flat.view([each if i == dim else n for i, n in enumerate(shape)]).narrow(dim, 0, here)


def _differences(what: str, got: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if got.dtype != expected.dtype:
        return [f"{what}: {got.dtype}, expected {expected.dtype}"]
    same = (got == expected) | (got.isnan() & expected.isnan())
    if bool(same.all()):
        return []
    place = int((~same).flatten().nonzero()[0])
    pair = got.flatten()[place].item(), expected.flatten()[place].item()
    return [f"{what}: {int((~same).sum())} of {got.numel()} differ, first {pair} at {place}"]


def compared(cases: list[Case]) -> list[str]:
    """Train each case on this rank, and return what differs from the oracle."""
    problems = []
    for case in cases:
        training = Training(case)
        found = [problem for number in range(case.steps) for problem in training.step(number)]
        traffic = training.hook.stats()["shards"]
        saves = traffic["bytes_sent"] < traffic["bytes_uncompressed"]
        if saves != bool(training.hook.plan().compressed):
            found.append(f"{traffic} saves nothing")
        if traffic["scatters"] != case.steps * training.trained_units():
            found.append(f"{traffic} has scattered other units than the trained ones")
        training.hook.detach()
        if found:
            problems.append(f"{case}:\n    " + "\n    ".join(found[:6]))
    return problems


def random_case(seed: int, ranks: int) -> Case:
    draw = random.Random(seed)

    def shape() -> Shape:
        kind = draw.choice(["matrix", "matrix", "matrix", "vector", "cube", "tiny"])
        sizes = {
            "matrix": (draw.randint(1, 40), draw.randint(1, 40)),
            "vector": (draw.randint(1, 50),),
            "cube": (draw.randint(1, 9), draw.randint(1, 6), draw.randint(1, 9)),
            "tiny": (1, draw.randint(1, 12)),
        }
        return sizes[kind]

    units = [[shape() for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 4))]
    units[0].append((4 * ranks, 8 * ranks))  # something is compressed, and has columns
    places = [(u, n) for u, unit in enumerate(units) for n in range(len(unit))]
    by_columns = [(u, n) for u, n in places if len(units[u][n]) > 1 and units[u][n][1] % ranks == 0]
    case = Case(
        seed,
        ranks,
        tuple(map(tuple, units)),
        dtypes=draw.choice([*DTYPES]),
        weights=draw.choice(["int8", "int8", "bf16", None]),
        gradients=draw.choice(["int8", "int8", "bf16", None]),
        block=draw.choice([16, 32, 128]),
        nodes_of=2 if ranks == 4 and draw.random() < 0.5 else None,
        reshard=draw.choice([None, True, False]),
        frozen=tuple(p for p in places if p != (0, len(units[0]) - 1) and draw.random() < 0.15),
        columns=tuple(p for p in by_columns if draw.random() < 0.4),
        accumulated=draw.choice([0, 0, 1, 2]),
        divide=draw.choice([None, None, None, 3.0]),
        force_sum=draw.random() < 0.2,
    )
    if case.divide is not None:  # gloo multiplies nothing, and some units are not compressed
        case = dataclasses.replace(case, force_sum=True)
    if case.weights is None and case.gradients is None:
        case = dataclasses.replace(case, weights="int8")
    if draw.random() < 0.25:
        trained = [p for p in places if p not in case.frozen]
        case = dataclasses.replace(case, nonfinite=(draw.randrange(ranks), *draw.choice(trained)))
    return case

"""The plan of a model: what is compressed and what is not, the bytes sent, and the memory needed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.wire import dtype_name
from commhooks.compressors.unit_plan import MemoryPlan, Unit, UnitPlan


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of DDP: its parameters in their order in the buffer, and its bytes per step."""

    parameters: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a whole model. `print(plan)` shows a table with one line per parameter."""

    hook: str
    parameters: tuple[UnitPlan, ...]
    wire_dtype: torch.dtype | None = None
    """The dtype to which the hook or its wrapper casts the numbers that it sends; None: it does not."""
    start_step: int = 0
    """Compression begins after this many steps."""
    selective: bool = True
    """Whether the hook decides for each parameter whether to compress it."""
    memory: MemoryPlan = MemoryPlan()
    """Bytes that the hook needs on each rank; with `ranks_per_node` on this rank, which keeps a share of the residuals.
    `packed` and `copies` are upper bounds if the buckets are unknown."""
    arrangement: str = ""
    """With `ranks_per_node`, between which ranks the bytes of this plan travel; a node sends them as one rank."""
    bucket_names: tuple[tuple[str, ...], ...] = ()
    """The parameters of each bucket; empty if they are unknown or if the rows of the plan are buckets."""
    bytes_per_save: int = 0
    """Bytes that a joint save sends of an optimizer that keeps two numbers per weight, such as Adam, where each rank
    trains for itself."""
    sends: bool | None = True
    """False for a hook that sends nothing; None for a user's hook, whose traffic is unknown."""

    @property
    def bytes_before(self) -> int:
        """Bytes of gradient per rank and step without the hook."""
        return sum(p.size_bytes() for p in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes that the hook passes to collectives per rank and step once it compresses, without flags."""
        return sum(self.sent_bytes(p) for p in self.parameters)

    @property
    def flag_bytes(self) -> int:
        """Further bytes sent per rank and step, such as a flag per matrix."""
        return sum(p.flags * p.wire_itemsize(self.wire_dtype) for p in self.compressed)

    @property
    def unit(self) -> Unit:
        """The unit of all sizes in texts about this plan."""
        return Unit.of(self.bytes_before)

    @property
    def compressed(self) -> tuple[UnitPlan, ...]:
        return tuple(p for p in self.parameters if p.compressed)

    @property
    def compressed_share(self) -> float:
        """Share of the gradient's bytes that is compressed, 0 to 1."""
        before = self.bytes_before
        return sum(p.size_bytes() for p in self.compressed) / before if before else 0.0

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Totals per bucket; empty if the buckets are unknown."""
        before = {p.name: p.size_bytes() for p in self.parameters}
        after = {p.name: self.sent_bytes(p) for p in self.parameters}
        return tuple(
            BucketPlan(names, sum(before[name] for name in names), sum(after[name] for name in names))
            for names in self.bucket_names
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain types, for JSON. Bytes are per rank and step."""
        sent = None if self.sends is None else self.bytes_after
        return {
            "hook": self.hook,
            "start_step": self.start_step if self.selective else None,
            "wire_dtype": dtype_name(self.wire_dtype) or None,
            "known": not self._unknown,
            "bytes_before": self.bytes_before,
            "bytes_after": sent,
            "flag_bytes": self.flag_bytes,
            "bytes_per_save": self.bytes_per_save,
            "compression_rate": self.bytes_before / sent if sent else None,
            "compressed_share": self.compressed_share,
            "memory_bytes": {
                name: getattr(self.memory, name) for name in ("residual", "factors", "packed", "copies", "total")
            },
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "compressed": p.compressed,
                    "reason": p.reason,
                    "matrix": None,  # every hook has the keys "matrix" and "rank"
                    "rank": None,
                    **p.details,
                    "bytes_before": p.size_bytes(),
                    "bytes_after": None if self.sends is None else self.sent_bytes(p),
                }
                for p in self.parameters
            ],
            "buckets": [dataclasses.asdict(each) | {"parameters": list(each.parameters)} for each in self.buckets],
        }

    @property
    def _unknown(self) -> bool:
        """There are no rows, so the plan is not known yet: every DDP model has parameters."""
        return self.selective and not self.parameters

    def sent_bytes(self, parameter: UnitPlan) -> int:
        """Bytes that are sent for one parameter per step; for a user's hook, whose traffic is unknown, the uncompressed
        size."""
        return 0 if self.sends is False else parameter.sent_bytes(self.wire_dtype)

    def summary(self) -> str:
        """One line: what is compressed, and what is sent per step and rank."""
        if self._unknown:
            return f"{self.hook}: the plan follows DDP's buckets; it is known after the first backward pass"
        unit = self.unit
        after = "what the hook sends" if self.sends is None else unit.text(self.bytes_after)
        sent = f"{unit.text(self.bytes_before)} -> {after} per step and rank"
        if self.bytes_per_save:
            sent += f" on average, and {unit.text(self.bytes_per_save)} per save with an optimizer such as Adam"
        if not self.selective:
            return f"{len(self.parameters)} parameters, {sent}"
        return (
            f"{len(self.compressed)} of {len(self.parameters)} parameters compressed "
            f"({100 * self.compressed_share:.1f} % of the bytes), {sent}"
        )

    def __str__(self) -> str:
        if self._unknown:
            return self.summary()
        from commhooks.hook.plan_table import plan_table

        return plan_table(self) + self.summary()

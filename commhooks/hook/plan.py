"""The plan of a model: what is compressed and what is not, with its bytes and the memory that it takes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.gradients.precision import compute_dtype

LATEST_PASS = "as in the latest backward pass"


@dataclass(frozen=True)
class ParameterPlan:
    """The fate of one parameter: `n x m` at `rank` if compressed, else `reason`."""

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    compressed: bool
    reason: str
    n: int = 0
    m: int = 0
    rank: int = 0
    alternate: bool = False
    """Only one of the two factors travels in a step, P and Q in turn."""

    @property
    def numel_sent(self) -> int:
        """Elements that travel per rank and step once compression has begun (the mean of two steps that alternate)."""
        sent = (self.n + self.m) * self.rank if self.compressed else self.numel
        return sent // 2 if self.compressed and self.alternate else sent


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory that a hook needs on each rank, once it compresses."""

    residual: int = 0
    factors: int = 0
    """P and Q: those that are kept, and those of the running step."""
    packed: int = 0
    """What travels, put together."""
    copies: int = 0
    """Gradients in float32 where the bucket is narrower, or a matrix that is padded."""

    @property
    def total(self) -> int:
        return self.residual + self.factors + self.packed + self.copies


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of DDP: its parameters in the order in which they lie there, and its bytes per step."""

    parameters: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a whole model. `print(plan)` shows a table with one line per parameter."""

    hook: str
    parameters: tuple[ParameterPlan, ...]
    wire_dtype: torch.dtype | None = None
    start_step: int = 0
    """Compression begins after this many steps."""
    low_rank: bool = True
    """Whether the hook compresses by low rank at all."""
    error_feedback: bool = True
    """Whether low-rank compression keeps residuals."""
    bucket_names: tuple[tuple[str, ...], ...] = ()
    """The parameters of each bucket; empty where that is not known, and where the rows of the plan are buckets."""
    buckets_from: str = ""
    """Where `bucket_names` comes from, as a sentence."""
    sends: bool | None = True
    """False for a hook that sends nothing; None for one that alone knows what."""

    @property
    def bytes_before(self) -> int:
        """Bytes of gradient per rank and step without the hook."""
        return sum(self.size_bytes(p) for p in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes that the hook hands to all-reduce per rank and step once it compresses, flags not counted."""
        return sum(self.sent_bytes(p) for p in self.parameters)

    @property
    def flag_bytes(self) -> int:
        """Bytes of the flags beside them: one number per matrix."""
        return sum(self._wire_itemsize(p) for p in self.compressed)

    @property
    def compressed(self) -> tuple[ParameterPlan, ...]:
        return tuple(p for p in self.parameters if p.compressed)

    @property
    def compressed_share(self) -> float:
        """Share of the gradient's bytes that is compressed, 0 to 1."""
        before = self.bytes_before
        return sum(self.size_bytes(p) for p in self.compressed) / before if before else 0.0

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Totals per bucket, if it is known what DDP puts into each."""
        plans = {p.name: p for p in self.parameters}
        found = []
        for names in self.bucket_names:
            rows = [plans[name] for name in names]
            before = sum(self.size_bytes(p) for p in rows)
            found.append(BucketPlan(names, before, sum(self.sent_bytes(p) for p in rows)))
        return tuple(found)

    @property
    def memory(self) -> MemoryPlan:
        """Bytes that the hook needs on each rank. `packed` is an upper bound where the buckets are not known."""
        if not self.low_rank:
            lowered = filter(self.is_lowered, self.parameters)
            return MemoryPlan(packed=sum(self.sent_bytes(p) for p in lowered))
        residual = factors = copies = 0
        for p in self.compressed:
            itemsize = compute_dtype(p.dtype).itemsize
            residual += p.numel * itemsize if self.error_feedback else 0
            kept = p.rank * (p.n + p.m if p.alternate else p.m)
            factors += (kept + max(p.rank, 2) * (p.n + p.m)) * itemsize
            if p.n * p.m != p.numel or _itemsize(p.dtype) != itemsize:
                copies += p.n * p.m * itemsize
        plans = {p.name: p for p in self.parameters}
        buckets = [[plans[name] for name in names] for names in self.bucket_names] or [list(self.parameters)]
        packed = sum(map(self._packed_bytes, buckets))
        return MemoryPlan(residual, factors, packed, copies)

    def _packed_bytes(self, rows: Sequence[ParameterPlan]) -> int:
        """Of the buffers in which a bucket travels."""
        matrices = [p for p in rows if p.compressed]
        if not matrices:
            return 0
        beside = sum(self.sent_bytes(p) for p in rows if not p.compressed and p.reason != "sparse gradient")
        beside += sum(map(self._wire_itemsize, matrices))  # the flags
        size_p = sum(p.rank * p.n * self._wire_itemsize(p) for p in matrices)
        size_q = sum(p.rank * p.m * self._wire_itemsize(p) for p in matrices)
        if not matrices[0].alternate:
            return size_p + size_q + beside
        # Each factor travels with all the rest, and in one buffer where both are alike.
        return size_p + beside + (size_q + beside if any(p.n != p.m for p in matrices) else 0)

    def break_even_gbit_s(self, codec_s: float, world_size: int = 2) -> float | None:
        """The bandwidth in Gbit/s per rank below which a step sends faster with the hook: where the bytes that are not
        sent would take as long as the codec does.

        Assumes a ring all-reduce at the full bandwidth, no latency, and that neither of the two overlaps with the
        backward pass. None where nothing is saved or it is not known what is sent.

        Args:
            codec_s: seconds that the hook computes per step.
        """
        saved = self.bytes_before - self.bytes_after - self.flag_bytes
        if self.sends is None or saved <= 0 or codec_s <= 0:
            return None
        return saved * ring_factor(world_size) * 8 / 1e9 / codec_s

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain types, for JSON. Bytes are per rank and step."""
        sent = None if self.sends is None else self.bytes_after
        return {
            "hook": self.hook,
            "start_step": self.start_step if self.low_rank else None,
            "wire_dtype": None if self.wire_dtype is None else str(self.wire_dtype).removeprefix("torch."),
            "known": not self._unknown,
            "bytes_before": self.bytes_before,
            "bytes_after": sent,
            "flag_bytes": self.flag_bytes,
            "compression_rate": self.bytes_before / sent if sent else None,
            "compressed_share": self.compressed_share,
            "memory_bytes": {**dataclasses.asdict(self.memory), "total": self.memory.total},
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "compressed": p.compressed,
                    "reason": p.reason,
                    "matrix": [p.n, p.m] if p.compressed else None,
                    "rank": p.rank if p.compressed else None,
                    "bytes_before": self.size_bytes(p),
                    "bytes_after": None if self.sends is None else self.sent_bytes(p),
                }
                for p in self.parameters
            ],
            "buckets": [
                dataclasses.asdict(bucket) | {"parameters": list(bucket.parameters)} for bucket in self.buckets
            ],
            "buckets_from": self.buckets_from,
        }

    @property
    def _unknown(self) -> bool:
        """A DDP model has parameters: there is no plan for them yet."""
        return self.low_rank and not self.parameters

    def is_lowered(self, parameter: ParameterPlan) -> bool:
        """Whether a parameter travels in a narrower dtype than its own."""
        return self._wire_itemsize(parameter) < _itemsize(parameter.dtype)

    def size_bytes(self, parameter: ParameterPlan) -> int:
        """Bytes of the gradient of one parameter."""
        return parameter.numel * _itemsize(parameter.dtype)

    def sent_bytes(self, parameter: ParameterPlan) -> int:
        """Bytes that are sent for one parameter per step (without the hook's help where only the hook knows)."""
        if self.sends is False:
            return 0
        return parameter.numel_sent * self._wire_itemsize(parameter)

    def _wire_itemsize(self, parameter: ParameterPlan) -> int:
        if self.wire_dtype is None or parameter.reason == "sparse gradient":
            return _itemsize(parameter.dtype)
        return min(_itemsize(parameter.dtype), self.wire_dtype.itemsize)

    def summary(self) -> str:
        """One line: what is compressed and how many MB travel per step and rank."""
        if self._unknown:
            return f"{self.hook}: the plan follows DDP's buckets; it is known after the first backward pass"
        after = "what the hook sends" if self.sends is None else f"{self.bytes_after / 1e6:.3f} MB"
        sent = f"{self.bytes_before / 1e6:.3f} MB -> {after} per step and rank"
        if not self.low_rank:
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


def ring_factor(world_size: int) -> float:
    """Bytes that a rank sends per byte handed to a ring all-reduce."""
    return 2 * (world_size - 1) / world_size


def _itemsize(dtype: torch.dtype) -> int:
    # A complex number counts as two real ones in `numel`.
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize

"""Define the hooks int8_compress and int4_compress: a quantised all-reduce with error feedback.

    delta = gradient + residual
    gradient = the quantised mean of delta over the ranks (`mean.py`)
    residual = the rounding error of this rank

The owner of a block adds the rounding error of the mean to its residual, as the server does in
DoubleSqueeze (Tang, Yu, Lian, Zhang, Liu: ICML 2019).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from commhooks.comm.packing import put_plain, scatter_into
from commhooks.compressors.base import (
    RESIDUAL,
    Compressor,
    Exchange,
    State,
    StateField,
    StepInfo,
    Verdict,
)
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.native import library
from commhooks.compressors.quantized.kernels import (
    BlockBuffers,
    NativeKernel,
    TorchKernel,
    results_of,
)
from commhooks.compressors.quantized.mean import (
    BlockCode,
    BlockKernel,
    ShareMessages,
    mean_over_ranks,
)
from commhooks.compressors.quantized.options import Int4Compress, Int8Compress, Quantized
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype

AnyQuantized = TypeVar("AnyQuantized", bound=Quantized)


def quantised_exchange(
    flat: torch.Tensor, work: "QuantizedWorkspace", state: State, step: StepInfo
) -> Exchange:
    """Average one bucket; see `Compressor.exchange`.

    On an accelerator the host never waits for the device. A block with a non-finite number becomes
    NaN on every rank. A parameter without a gradient on any rank keeps its residual, and its
    averaged gradient is zero.
    """
    kernel = work.kernel(step)
    messages = kernel.messages
    residuals = state["residual"]
    factor = step.residual_factor
    pieces = flat.split(work.sizes)
    plain = [pieces[place] for place in work.place_of_plain]
    kernel.load(flat, residuals, factor)  # delta = gradient + residual
    if step.unused:
        clear_flags_of_unused(work.slots, messages.flags, step)
    if plain:
        put_plain(plain, messages.plain, step.world_size)
    averaged = yield from mean_over_ranks(kernel)
    good = yield Verdict(averaged.finite)
    # residual = rounding error; gradient = mean
    kernel.store(averaged, flat, residuals, factor, good)
    if plain:
        scatter_into(averaged.plain, plain)
    return None


class QuantizedWorkspace:
    """Holds the compressed parameters of one bucket layout (`slots`), and their kernel.

    `wire_dtype`: for uncompressed elements. `natively`: compute with the native kernel: C on the
    CPU, Triton on CUDA.
    """

    def __init__(
        self,
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        code: BlockCode,
        wire_dtype: torch.dtype,
        *,
        error_feedback: bool,
        natively: bool = False,
    ) -> None:
        self.sizes = [slot.numel for slot in layout.slots]
        self.place_of_plain = [place for place, plan in enumerate(plans) if not plan.compressed]
        self.slots = [
            slot for slot, plan in zip(layout.slots, plans, strict=True) if plan.compressed
        ]
        self._layout = layout
        self._code = code
        self._wire_dtype = wire_dtype
        self._error_feedback = error_feedback
        self._triton = natively and runs_triton(layout.device)
        self._buffers: BlockBuffers | None = None
        if not (natively and precision.is_host_readable(layout.device)):
            dtype = compute_dtype(layout.dtype)
            self._buffers = BlockBuffers(
                code, self.slots, dtype, layout.device, error_feedback=error_feedback
            )
        self._kernel: BlockKernel | None = None

    def kernel(self, step: StepInfo) -> BlockKernel:
        """Return the kernel, made on the first call, because it depends on the number of ranks."""
        kernel = self._kernel
        ranks = (step.world_size, step.rank)
        if kernel is None or (kernel.messages.world_size, kernel.rank) != ranks:
            kernel = self._kernel = self._new_kernel(*ranks)
        return kernel

    def _new_kernel(self, world_size: int, rank: int) -> BlockKernel:
        code = self._code
        dtype = self._layout.dtype
        plain_numel = sum(self.sizes[place] for place in self.place_of_plain)
        messages = ShareMessages(
            code,
            [(slot.name, code.blocks_of(slot.numel)) for slot in self.slots],
            compute_dtype(dtype),
            world_size,
            self._layout.device,
            largest=torch.finfo(dtype).max,
            plain=(plain_numel, self._wire_dtype),
            flags=len(self.slots),
        )
        if self._buffers is None:
            return NativeKernel(
                messages, rank, self.slots, dtype, error_feedback=self._error_feedback
            )
        if self._triton:
            from commhooks.compressors.quantized.triton_kernel import TritonKernel

            return TritonKernel(self._buffers, messages, rank)
        return TorchKernel(self._buffers, messages, rank)


def native_build(device: torch.device, dtype: torch.dtype, code: BlockCode) -> str:
    if not runs_triton(device):
        return library.build(device, results_of)
    if library.is_switched_off():
        return ""
    try:
        from commhooks.compressors.quantized.triton_kernel import build
    except ImportError as error:
        raise HookConfigError(
            f"the native kernel for {device} needs Triton, which cannot be imported ({error}):"
            f" install it, or turn the kernel off by {library.SWITCH}=0"
        ) from error
    return build(device, dtype, code)


def runs_triton(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True)
class BlockPlan(UnitPlan):
    """Describes how a parameter is quantised.

    `numel_compressed` counts bytes: codes and scales, with the padding of the last block. A flag,
    one byte, marks a gradient that is not zero.
    """

    blocks: int = 0
    bits: int = 0
    block_size: int = 0
    on_host: bool = True

    columns: ClassVar[tuple[str, ...]] = ("bits", "blocks")

    @property
    def cells(self) -> tuple[str, ...]:
        return str(self.bits), f"{self.blocks} of {self.block_size}"

    @property
    def details(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) if self.compressed else None
            for name in ("bits", "blocks", "block_size")
        }


class QuantizedCompressor(Compressor[AnyQuantized]):
    collectives = ("all_to_all", "gather")
    computes_from_received = False  # the only operation on a received number is code * scale
    exchange = staticmethod(quantised_exchange)

    @property
    def code(self) -> BlockCode:
        return BlockCode(self.config.bits, self.config.block_size)

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return (RESIDUAL,) if self.config.use_error_feedback else ()

    @property
    def summary(self) -> str:
        return f"blocks of {self.config.block_size}"

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        return native_build(device, dtype, self.code)

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """Quantise a matrix if it then takes fewer bytes than in its wire dtype."""
        parameter = info.parameter
        code = self.code
        if parameter.dim() < 2:
            return BlockPlan.uncompressed(info, "scalar" if parameter.dim() == 0 else "vector")
        blocks = code.blocks_of(parameter.numel())
        sent = blocks * (code.block_bytes + compute_dtype(parameter.dtype).itemsize)
        if sent >= parameter.numel() * self.wire_dtype_for(parameter.dtype).itemsize:
            return BlockPlan.uncompressed(info, f"too small for a block of {code.block_size}")
        return dataclasses.replace(
            BlockPlan.uncompressed(info, ""),
            compressed=True,
            numel_compressed=sent,
            itemsize_sent=1,
            flags=1,
            blocks=blocks,
            bits=code.bits,
            block_size=code.block_size,
            on_host=precision.is_host_readable(parameter.device),
        )

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> QuantizedWorkspace:
        return QuantizedWorkspace(
            layout,
            plans,
            self.code,
            self.wire_dtype_for(layout.dtype),
            error_feedback=self.config.use_error_feedback,
            natively=self.native,
        )

    def allocate(self, work: QuantizedWorkspace, step: StepInfo) -> None:
        work.kernel(step)

    def memory_plan(
        self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        """Return the bytes needed per rank.

        With torch and Triton, `copies` counts delta in blocks, and padding. With the C kernel it
        counts delta if the gradients have 16 bits. `packed` counts codes and scales, sent and
        received in both collectives, and with torch their computed copies, without the padding of
        shares.
        """
        quantised = [plan for plan in plans if isinstance(plan, BlockPlan) and plan.compressed]
        residual = 0
        if self.config.use_error_feedback:
            residual = sum(RESIDUAL.size_bytes(plan) for plan in quantised)
        plain = sum(_plain_bytes(bucket, self.wire_dtype) for bucket in buckets)
        packed = (3 if self.native else 4) * sum(plan.numel_sent for plan in quantised) + 4 * plain
        if self.native and all(plan.on_host for plan in quantised):
            converted = [plan for plan in quantised if compute_dtype(plan.dtype) != plan.dtype]
            copies = sum(_delta_bytes(plan, plan.numel) for plan in converted)
        else:
            in_blocks = sum(_delta_bytes(plan, plan.blocks * plan.block_size) for plan in quantised)
            padding = in_blocks - sum(_delta_bytes(plan, plan.numel) for plan in quantised)
            copies = in_blocks + (2 * padding if self.config.use_error_feedback else padding)
        return MemoryPlan(residual, packed=packed, copies=copies)


def _plain_bytes(bucket: Sequence[UnitPlan], wire_dtype: torch.dtype | None) -> int:
    if not any(plan.compressed for plan in bucket):
        return 0
    plain = [plan for plan in bucket if not plan.compressed]
    return sum(plan.sent_bytes(wire_dtype) for plan in plain)


def _delta_bytes(plan: UnitPlan, numel: int) -> int:
    return numel * compute_dtype(plan.dtype).itemsize


class Int8Compressor(QuantizedCompressor[Int8Compress]):
    Config = Int8Compress
    title = "int8 compression"


class Int4Compressor(QuantizedCompressor[Int4Compress]):
    Config = Int4Compress
    title = "int4 compression"

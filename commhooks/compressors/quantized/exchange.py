"""One bucket as a quantised all-reduce with error feedback.

    delta = gradient + residual
    the mean of delta over the ranks, quantised on the way, is the averaged gradient (`mean.py`)
    what rounding lost on this rank is its new residual

The server's error feedback in the owner's residual is that of DoubleSqueeze (Tang, Yu, Lian, Zhang, Liu: ICML 2019).
"""

from collections.abc import Sequence

import torch

from commhooks.comm.wire import divide, put_flags, put_plain
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.mean import BlockKernel, mean_over_ranks
from commhooks.compressors.quantized.messages import ShareMessages
from commhooks.compressors.quantized.native_kernel import NativeKernel
from commhooks.compressors.quantized.torch_kernel import TorchKernel
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype


class Workspace:
    """The buffers for quantising the buckets of one layout.

    Args:
        plans: one per slot of the layout, in order.
        wire_dtype: in which uncompressed elements travel.
        natively: compute with the native kernel.

    Attributes:
        slots: the compressed parameters.
        sizes: elements of each parameter in the bucket.
        place_of_compressed, place_of_plain: which of them are compressed, and which are not.
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
        self.place_of_compressed = [place for place, plan in enumerate(plans) if plan.compressed]
        self.place_of_plain = [place for place, plan in enumerate(plans) if not plan.compressed]
        self.slots = [layout.slots[place] for place in self.place_of_compressed]
        self._layout, self._code, self._wire_dtype = layout, code, wire_dtype
        self._natively, self._error_feedback = natively, error_feedback
        self._kernel: BlockKernel | None = None

    def kernel(self, step: StepInfo) -> BlockKernel:
        """The kernel for the ranks of this step, which are the same in every step."""
        made = self._kernel
        if made is not None and (made.messages.world_size, made.rank) == (step.world_size, step.rank):
            return made
        code, device, dtype = self._code, self._layout.device, compute_dtype(self._layout.dtype)
        tensors = [(slot.name, code.blocks_of(slot.numel)) for slot in self.slots]
        plain = sum(self.sizes[place] for place in self.place_of_plain), self._wire_dtype
        messages = ShareMessages(
            code,
            tensors,
            dtype,
            step.world_size,
            device,
            largest=torch.finfo(self._layout.dtype).max,
            plain=plain,
            flags=len(self.slots),
        )
        kept = self._error_feedback
        if self._natively:
            self._kernel = NativeKernel(messages, step.rank, self.slots, self._layout.dtype, error_feedback=kept)
        else:
            self._kernel = TorchKernel(messages, step.rank, self.slots, error_feedback=kept)
        return self._kernel


def quantised_exchange(flat: torch.Tensor, work: Workspace, state: State, step: StepInfo) -> Exchange:
    """See `Compressor.exchange`. Works on any device; on an accelerator the host never waits for it.

    What is not finite arrives as NaN on every rank. A parameter without a gradient on any rank keeps its residual, and
    its averaged gradient is zero.

    Args:
        state: "residual" per parameter, flat in memory order.
    """
    kernel, residuals, factor = work.kernel(step), state["residual"], step.residual_factor
    messages, pieces = kernel.messages, flat.split(work.sizes)
    plain = [pieces[place] for place in work.place_of_plain]
    put_flags([pieces[place] for place in work.place_of_compressed], messages.flags)
    if step.unused:
        clear_flags_of_unused(work.slots, messages.flags, step)
    if plain:
        put_plain(plain, messages.plain, step.world_size)
    kernel.load(flat, residuals, factor)  # delta = gradient + residual
    averaged = yield from mean_over_ranks(kernel)
    good = yield Verdict(averaged.finite)
    kernel.store(averaged, flat, residuals, factor, good)  # residual = what is lost of delta; gradient = average
    if plain:
        divide(averaged.plain, plain)
    return None

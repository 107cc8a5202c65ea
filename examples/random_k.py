"""A compressor of your own, complete: random-k sparsification with error feedback.

    commhooks.attach(ddp_model, RandomK(share=0.05))                     # or by name, once this
    module is imported: commhooks.attach(ddp_model, "random_k", hook_options={"share": 0.05})
    commhooks.attach(ddp_model, "examples.random_k:RandomKCompressor")   # imports it by itself: for
    YAML and flags

In each step a random share of every gradient travels, the same elements on all ranks; the rest
stays in the residual. Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
"""

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import ClassVar, Union

import torch

import commhooks


@dataclass(frozen=True, kw_only=True)
class RandomK(commhooks.HookConfig):
    """A random share of each gradient, with error feedback.

    Args:
        share: of the elements of each parameter that travel in a step.
        start_iter: plain all-reduce for so many steps first (int), or for a fraction of the run
            (float).
    """

    hook_name: ClassVar[str] = "random_k"
    start_option: ClassVar[str | None] = "start_iter"

    share: float = 0.1
    start_iter: Union[int, float, None] = 0  # noqa: UP007  (OmegaConf does not read `int | float | None`)
    random_seed: int = 0
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.share < 1, "share", "a number between 0 and 1")


@commhooks.register_compressor
class RandomKCompressor(commhooks.Compressor[RandomK]):
    Config = RandomK
    title = "random-k"
    state_fields = (commhooks.RESIDUAL,)
    needs_exact_step = True  # the choice depends on it

    def plan_parameter(self, info):
        plan = commhooks.UnitPlan.uncompressed(info, "too small")
        k = int(self.config.share * info.numel)
        return (
            plan
            if k < 1
            else dataclasses.replace(plan, compressed=True, reason="", numel_compressed=k, flags=1)
        )

    def choice(self, plan, step_number):
        """Indices of the elements to send: equal on all ranks and for every bucket layout."""
        seed = zlib.crc32(f"{self.config.random_seed} {plan.name} {step_number}".encode())
        return torch.randperm(plan.numel, generator=torch.Generator().manual_seed(seed))[
            : plan.numel_compressed
        ]

    def exchange(self, flat, work, state, step):
        (layout, plans) = work
        wire = self.wire_dtype_for(flat.dtype)
        deltas = {}
        chosen = {}
        parts = []
        for slot, plan in zip(layout.slots, plans, strict=True):
            part = slot.of(flat)
            if plan.compressed:
                deltas[slot.name] = delta = commhooks.with_residual(slot, flat, state, step)
                chosen[slot.name] = index = self.choice(plan, step.number).to(flat.device)
                check = delta.abs().amax() * 0  # NaN where any element is not finite, sent or not
                part = torch.cat([delta[index], check.view(1)])
            parts.append((part / step.world_size).to(wire))
        kept = torch.cat(parts)
        sizes = [len(part) for part in parts]
        mean = yield commhooks.Send(kept.clone(), op="sum", last=True)
        good = yield commhooks.Verdict(mean.isfinite().all())
        for slot, sent, arrived in zip(
            layout.slots, kept.split(sizes), mean.split(sizes), strict=True
        ):
            if slot.name not in deltas:
                slot.of(flat).copy_(arrived)
                continue
            delta = deltas[slot.name]
            index = chosen[slot.name]
            slot.of(flat).zero_()[index] = (arrived[:-1] + arrived[-1]).to(flat.dtype)
            left = delta.index_add_(0, index, sent[:-1].to(delta.dtype), alpha=-step.world_size)
            commhooks.keep_residual(slot, left, good, state)

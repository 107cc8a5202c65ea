"""The options of `hook="auto"`."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Union

from commhooks.compressors.candidates import ALLREDUCE, BF16, INT4, INT8
from commhooks.compressors.hook_config import HookConfig

QUALITIES = {"same": (ALLREDUCE, BF16, INT8), "close": (ALLREDUCE, BF16, INT8, INT4)}
"""The candidates without ranks, the most exact first; "close" has PowerSGD beside them."""


@dataclass(frozen=True, kw_only=True)
class Auto(HookConfig):
    """Plain all-reduce first; then, from what was measured, the hook with the shortest step, or none.

    Args:
        quality: among which hooks it chooses. "same": all-reduce, bf16 and int8 with error feedback, whose training is
            that of all-reduce within its noise. "close": int4 and PowerSGD of rank 16 as well.
        target: of PowerSGD's ranks, with quality="close". A float strictly between 0 and 1: the share of each layer's
            gradient energy that its rank should keep. An int: bytes per step and rank that PowerSGD may send. None:
            rank 16, or the highest that halves the layer.
        measure_steps: steps of plain all-reduce that are measured before the first decision.
        check_again_every: steps after which it looks again at the time of a step, and measures anew if that has
            changed by a lot; more if measuring would take more than 1 % of the time. None: never.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case matters) that int8, int4 and PowerSGD leave
            uncompressed.
    """

    hook_name: ClassVar[str] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ("automatic",)

    quality: str = "same"
    target: Union[int, float, None] = None  # noqa: UP007  (OmegaConf 2.4 does not read `int | float | None`)
    measure_steps: int = 10
    check_again_every: int | None = 500
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.quality in QUALITIES, "quality", f"one of {', '.join(map(repr, QUALITIES))}")
        self._require(
            self.target is None or self.quality == "close",
            "target",
            'None, or quality="close" beside it: it is for PowerSGD\'s ranks',
        )
        if isinstance(self.target, int):
            self._require(self.target >= 1, "target", "a number of bytes, 1 or more, or a share as a float")
        elif self.target is not None:
            fits = math.isfinite(self.target) and 0 < self.target < 1
            self._require(fits, "target", "a share strictly between 0 and 1, or an int for a number of bytes")
        self._require(2 <= self.measure_steps <= 10_000, "measure_steps", "2 to 10000")
        again = self.check_again_every
        self._require(again is None or 10 <= again <= 2**31, "check_again_every", "10 or more, or None")
        self._require(all(self.exclude), "exclude", "patterns that are not empty")

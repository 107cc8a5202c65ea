"""The options of `hook="auto"`."""

from dataclasses import dataclass, field
from typing import ClassVar

from commhooks.compressors.candidates import ALLREDUCE, BF16, INT4, INT8, powersgd
from commhooks.options import HookConfig, check_choice

QUALITIES = {"same": (ALLREDUCE, BF16, INT8), "close": (ALLREDUCE, BF16, INT8, INT4, powersgd(16, {}))}
"""The candidates, plain all-reduce first. With PowerSGD of rank 4 and below the language model of
benchmarks/language_model.py ends at a loss that is 6 % and more above that of all-reduce."""


@dataclass(frozen=True, kw_only=True)
class Auto(HookConfig):
    """Plain all-reduce first; then, from what was measured, the hook with the shortest step, or none.

    Args:
        quality: among which hooks it chooses. "same": all-reduce, bf16 and int8 with error feedback, whose training is
            that of all-reduce within its noise. "close": int4 and PowerSGD of rank 16 as well.
        measure_steps: steps of plain all-reduce that are measured before the first decision.
        check_again_every: steps after which it looks again at the time of a step, and measures anew if that has
            changed by a lot; more if measuring would take more than 1 % of the time. None: never.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case matters) that int8, int4 and PowerSGD leave
            uncompressed.
    """

    hook_name: ClassVar[str] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ("automatic",)

    quality: str = "same"
    measure_steps: int = 10
    check_again_every: int | None = 500
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{type(self).__name__}: quality", self.quality, QUALITIES)
        self._require(2 <= self.measure_steps <= 10_000, "measure_steps", "2 to 10000")
        again = self.check_again_every
        self._require(again is None or 10 <= again <= 2**31, "check_again_every", "10 or more, or None")

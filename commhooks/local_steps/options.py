"""Define the options of `diloco` and `local_sgd`, which communicate once in several steps."""

from dataclasses import dataclass, field
from typing import ClassVar, Optional, Union

import torch

from commhooks.options import HookConfig, check_choice

__all__ = ["DiLoCo", "LocalSGD"]

WIRES = ("float32", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class LocalSteps(HookConfig):
    """Base of both options classes. Options of `DiLoCo` are constants here."""

    averages_weights: ClassVar[bool] = True
    kind: ClassVar[str] = "commhooks.hook.local_steps_hook"
    start_option: ClassVar[str | None] = "start_iter"

    sync_every: int = 5
    start_iter: Union[int, float, None] = 0  # noqa: UP007  (OmegaConf 2.4 does not read `int | float | None`)

    outer_lr: ClassVar[float] = 1.0
    outer_momentum: ClassVar[float] = 0.0
    lr_factor: ClassVar[float | None] = 1.0
    wire: ClassVar[str] = "float32"
    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0
    offload: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.sync_every >= 1, "sync_every", "a number of steps, 1 or more")

    def lr_factor_of(self, optimizer: torch.optim.Optimizer, ranks: float) -> float:
        """Return the factor for an optimizer's learning rate in local steps.

        Adam divides its step by the root mean square of the gradient, sqrt(s^2 + n^2) for a signal
        s and the noise n of one rank. The mean gradient of W `ranks` has the noise n / sqrt(W).
        Where noise dominates, a step on the mean gradient is sqrt(W) times as long as the mean of
        the ranks' steps, whose noise is equally small. Where ranks count with different weights w,
        W is the effective number of ranks, (sum of w)^2 / sum of w^2.
        """
        if self.lr_factor is not None:
            return self.lr_factor
        averages = self.outer_lr == 1.0 and self.outer_momentum == 0.0
        return ranks**0.5 if averages and isinstance(optimizer, torch.optim.Adam) else 1.0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalSteps):
    """Trains every rank on its own gradients, and averages the weights of all ranks every
    `sync_every` steps.

    The average is exact, in float32. With `start_iter` this is post-local SGD (Lin, Stich, Patel,
    Jaggi: ICLR 2020).

    Args:
        sync_every: steps (synchronised backward passes) between two averages.
        start_iter: number of steps in which gradients are averaged exactly before the first round
            (int), or a fraction of the run (float between 0 and 1, exclusive).
    """

    hook_name: ClassVar[str] = "local_sgd"


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSteps):
    """Trains every rank on its own gradients; every `sync_every` steps an outer optimizer moves the
    common weights.

    The outer gradient is the mean over the ranks of the distance that their weights have moved. The
    outer optimizer is SGD with Nesterov momentum (Douillard et al.: DiLoCo, 2023).

    Args:
        sync_every: H, steps (synchronised backward passes) between two outer steps.
        outer_lr: learning rate of the outer step. 1: the plain mean of the weights.
        outer_momentum: momentum of the outer step, 0 up to 1. Published values (0.9 with outer_lr
            0.7) are for long runs with H of a few hundred.
        lr_factor: multiplies the learning rate of each parameter group that holds weights of the
            model, during the optimizer's step, from `start_iter` on; between two steps param_groups
            hold the user's learning rate. None: the square root of the number of ranks that train
            apart for Adam and AdamW, which take shorter steps on noisier gradients, and 1 for other
            optimizers, or if outer_lr or outer_momentum is not the default.
        wire: dtype of the weight differences on the wire: "int4", "int8" (both with error feedback)
            or "float32".
        fragments: P, the number of fragments of the weights, which take turns within a round, so
            that less is sent at once. H must be divisible by P (Douillard et al.: Streaming DiLoCo,
            2025).
        delay: send a fragment this many steps before its turn, while the training continues, and
            apply it at its turn; less than H / P. The changes that training makes in between are
            kept. Among machines that come and go all that are there commit it at its turn; if
            something of it is missing, they send the same differences again, and wait for that.
        offload: keep the anchor and the momentum in pinned host memory, which saves 4 or 8 bytes
            per parameter on an accelerator; None: yes. On the CPU it has no effect.
        start_iter: number of steps in which gradients are averaged exactly before the first round
            (int), or a fraction of the run (float between 0 and 1, exclusive). None: 10 % of the
            run, at most 1000 steps; 100 steps if the length of the run is unknown.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case-sensitive) that are sent
            in float32.
    """

    hook_name: ClassVar[str] = "diloco"

    outer_lr: float = 1.0  # type: ignore[misc]  # an option here, fixed in the base
    outer_momentum: float = 0.0  # type: ignore[misc]
    lr_factor: float | None = None  # type: ignore[misc]
    wire: str = "int4"  # type: ignore[misc]
    fragments: int = 1  # type: ignore[misc]
    delay: int = 0  # type: ignore[misc]
    offload: Optional[bool] = None  # type: ignore[misc]  # noqa: UP045
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.outer_lr < float("inf"), "outer_lr", "a number above 0")
        self._require(
            0 <= self.outer_momentum < 1, "outer_momentum", "a number from 0 up to 1, without 1"
        )
        if self.lr_factor is not None:
            self._require(
                0 < self.lr_factor < float("inf"), "lr_factor", "a number above 0, or None"
            )
        check_choice(f"{type(self).__name__}: wire", self.wire, WIRES)
        self._require(self.fragments >= 1, "fragments", "a number of parts, 1 or more")
        self._require(
            self.sync_every % self.fragments == 0,
            "sync_every",
            f"a multiple of fragments={self.fragments}, whose turns are spread evenly over a round",
        )
        distance = self.sync_every // self.fragments
        self._require(
            0 <= self.delay < distance,
            "delay",
            f"0 up to {distance - 1}: the next turn comes {distance} steps later",
        )


COMPRESSOR_PATHS: dict[type[HookConfig], str] = {
    DiLoCo: "commhooks.local_steps.compressor:DiLoCoCompressor",
    LocalSGD: "commhooks.local_steps.compressor:LocalSGDCompressor",
}

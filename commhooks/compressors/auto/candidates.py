"""The compressors among which `hook="auto"` chooses, each made from its own config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.ranks import LARGEST
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduceCompressor, BF16Compressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.quantized.compressor import Int4Compressor, Int8Compressor
from commhooks.errors import HookConfigError

PLAIN = "allreduce"
POWERSGD = PowerSGDCompressor.Config.hook_name
_CLASSES: dict[str, type[Compressor[Any]]] = {
    each.Config.hook_name: each
    for each in (AllReduceCompressor, BF16Compressor, Int8Compressor, Int4Compressor, PowerSGDCompressor)
}
_BY_QUALITY = {
    "same": (AllReduceCompressor, BF16Compressor, Int8Compressor),
    "close": (AllReduceCompressor, BF16Compressor, Int8Compressor, Int4Compressor),
}


@dataclass(frozen=True)
class Candidate:
    """
    Attributes:
        label: its name in the log, in plans and in checkpoints.
        hook, options: the compressor. It compresses from its first step on.
        changes: how much it changes the gradients; see `Trial`.
    """

    label: str
    hook: str
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: float = 0.0

    def new(self) -> Compressor[Any]:
        """The compressor.

        Raises:
            HookConfigError: not one of those that are chosen from, or invalid options.
        """
        if self.hook not in _CLASSES:
            raise HookConfigError(f"{self.hook!r} is none of the hooks that 'auto' chooses from: {list(_CLASSES)}")
        made = _CLASSES[self.hook]
        start = {} if made.Config.start_option is None else {made.Config.start_option: 0}
        try:
            return made(made.Config(**{**self.options, **start}))
        except TypeError as error:
            raise HookConfigError(f"hook {self.hook!r}: {error}") from error


def simple(config: Auto) -> list[Candidate]:
    """The candidates without ranks, the most exact first."""
    found = []
    for each in _BY_QUALITY[config.quality]:
        (trial,) = each.trials((), {})
        exclude = {"exclude": list(config.exclude)} if each.Config.start_option is not None else {}
        found.append(Candidate(trial.label, each.Config.hook_name, exclude, trial.changes))
    return found


def powersgd(config: Auto, ranks: int | Mapping[str, int], label: str, changes: float = 3.0) -> Candidate:
    """PowerSGD with one rank, or with ranks by globs."""
    given = dict(ranks) if isinstance(ranks, Mapping) else ranks
    options = {"matrix_approximation_rank": given, "exclude": list(config.exclude)}
    return Candidate(label, POWERSGD, options, changes)


def excluding(candidate: Candidate, config: Auto) -> Candidate:
    """The candidate with what the config excludes now."""
    if "exclude" not in candidate.options:
        return candidate
    return replace(candidate, options={**candidate.options, "exclude": list(config.exclude)})


def target_label(target: int | float | None) -> str:
    """Of the PowerSGD candidate for the config's target; its ranks follow, in brackets."""
    if target is None:
        return "powerSGD"
    return f"powerSGD, {target} bytes" if isinstance(target, int) else f"powerSGD, {target:g} of energy"


def allowed(candidate: Candidate, config: Auto) -> bool:
    """Whether the config allows the candidate: by its quality, and PowerSGD if its ranks are for the config's target
    and for the layers that it does not exclude."""
    if candidate.hook != POWERSGD:
        return candidate.hook in [each.Config.hook_name for each in _BY_QUALITY[config.quality]]
    if config.quality != "close" or excluding(candidate, config) != candidate:
        return False
    return candidate.label.startswith(f"{target_label(config.target)} (")


def probes(config: Auto) -> list[Candidate]:
    """What is rehearsed to learn how long codecs take: the simple candidates, and PowerSGD at its extremes."""
    found = simple(config)
    if config.quality == "close":
        for rank in (1, LARGEST):
            probe = powersgd(config, rank, f"powerSGD rank {rank}")
            # Also the layers in which a candidate has a lower rank, because this one would not halve them.
            found.append(replace(probe, options={**probe.options, "min_compression_rate": 1.0}))
    return found


def spectrum(config: Auto) -> Compressor[Any]:
    """PowerSGD as `Energies` looks at it."""
    made = powersgd(config, LARGEST, "")
    options = {**made.options, "use_error_feedback": False, "min_compression_rate": 1.0, "fused": False}
    return Candidate("", POWERSGD, options).new()


def compressors(candidates: Sequence[Candidate]) -> dict[str, Compressor[Any]]:
    """By label."""
    return {each.label: each.new() for each in candidates}

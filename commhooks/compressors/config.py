"""Configuration: one frozen dataclass per hook. The same definition serves Python, YAML (each is an OmegaConf
structured config), `--help` and checkpoints. Fields are named as the arguments of torch's own hooks."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

from commhooks.checkpoint.checks import shown
from commhooks.errors import HookConfigError

DEFAULT_START_STEP = 1000
_LARGEST_STEP = 2**62  # what a checkpoint can hold
_YAML_BOOLS = ("true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """Base of the config classes."""

    hook_name: ClassVar[str]
    own_wire: ClassVar[str | None] = None
    """What the hook narrows gradients to by itself, as `wrapper` is called: "fp16" or "bf16"."""
    sends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # A plain dataclass takes any type; YAML does not. Be as strict in Python.
        hints = typing.get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value, hint = getattr(self, each.name), hints[each.name]
            if not _fits(value, hint):
                raise HookConfigError(
                    f"{type(self).__name__}: {each.name}={shown(value)} is a {type(value).__name__}; "
                    f"expected {_describe(hint)}"
                )
            if hint is float and isinstance(value, int):
                # As YAML gives it, so that the ranks' configurations compare equal wherever they come from.
                try:
                    object.__setattr__(self, each.name, float(value))
                except OverflowError:
                    raise HookConfigError(f"{type(self).__name__}: {each.name} is too large a number") from None
            if hint == list[str]:
                # The caller's own list may change later.
                object.__setattr__(self, each.name, list(value))


@dataclass(frozen=True, kw_only=True)
class AllReduce(HookConfig):
    """Plain averaging of gradients, as DDP does without a hook: the baseline, with statistics."""

    hook_name: ClassVar[str] = "allreduce"


@dataclass(frozen=True, kw_only=True)
class FP16Compress(HookConfig):
    """Gradients travel as float16: half the bytes. Values beyond 65504 become inf, as a GradScaler expects."""

    hook_name: ClassVar[str] = "fp16_compress"
    own_wire: ClassVar[str | None] = "fp16"


@dataclass(frozen=True, kw_only=True)
class BF16Compress(HookConfig):
    """Gradients travel as bfloat16: half the bytes, the range of float32, 8 bits of precision."""

    hook_name: ClassVar[str] = "bf16_compress"
    own_wire: ClassVar[str | None] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Noop(HookConfig):
    """No communication at all: shows how fast training would be without a network. Never train with it."""

    hook_name: ClassVar[str] = "noop"
    sends: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class PowerSGD(HookConfig):
    """Low-rank gradients with error feedback, per parameter.

    Args:
        matrix_approximation_rank: rank of the factors; 1 to 4 is usual, more is closer to all-reduce and sends more.
        start_powerSGD_iter: plain all-reduce for so many steps first. An int is a number of steps, a float strictly
            between 0 and 1 a fraction of the run; None is 10 % of the run, at most 1000 steps, and 1000 where the
            length of the run is unknown.
        min_compression_rate: parameters that would shrink by less than this factor are not compressed.
        use_error_feedback: add what compression lost to the next gradient. Leave it on.
        warm_start: start from the Q of the step before. Leave it on.
        orthogonalization_epsilon: accepted for compatibility with torch and not needed: no column is divided by zero.
        random_seed: of the first Q.
        compression_stats_logging_frequency: steps between two log lines with compression statistics.
        batch_tensors_with_same_shape: on an accelerator, work on all matrices of a bucket that have the same shape at
            once: fewer and larger kernels, for one more copy of their gradients in float32. Changes results by rounding
            only, and nothing on the CPU.
        alternate: one product and one all-reduce per step, P and Q in turn: half the bytes and less computation, and a
            subspace that follows the gradient half as fast. Not for batched PowerSGD.
        fused: compute on the CPU with a native kernel, compiled by the machine's C compiler when first used: several
            times faster, the same results to rounding. All ranks must have it on.
        exclude: globs on parameter names ("*embed*", "head.?.weight"; case matters) that are never compressed. Not for
            batched PowerSGD.
    """

    hook_name: ClassVar[str] = "powerSGD"

    matrix_approximation_rank: int = 1
    # Written the old way: OmegaConf 2.4 does not read `int | float | None`. And not as an Optional of a Union, which
    # typing takes from a cache: int would come last where somebody has written the types the other way round before.
    start_powerSGD_iter: Union[int, float, None] = None  # noqa: UP007
    min_compression_rate: float = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False
    alternate: bool = False
    fused: bool = False
    exclude: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.matrix_approximation_rank >= 1, "matrix_approximation_rank", "at least 1")
        start = self.start_powerSGD_iter
        if isinstance(start, int):
            self._require(start >= 0, "start_powerSGD_iter", "a number of steps, 0 or more")
            self._require(start <= _LARGEST_STEP, "start_powerSGD_iter", f"a number of steps, {_LARGEST_STEP} at most")
        elif start is not None:
            self._require(
                0 < start < 1,
                "start_powerSGD_iter",
                "a fraction of the run strictly between 0 and 1, or an int for a number of steps",
            )
        self._require(
            math.isfinite(self.min_compression_rate) and self.min_compression_rate > 0,
            "min_compression_rate",
            "a positive number",
        )
        self._require(
            math.isfinite(self.orthogonalization_epsilon) and self.orthogonalization_epsilon >= 0,
            "orthogonalization_epsilon",
            "0 or a small positive number",
        )
        self._require(self.warm_start or not self.alternate, "alternate", "False where warm_start is False")
        self._require(all(self.exclude), "exclude", "patterns that are not empty")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise HookConfigError(f"{type(self).__name__}: {name}={shown(getattr(self, name))}; expected {expected}")


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD on whole buckets: each is flattened and seen as one square matrix padded with zeros.

    Fewer and larger products than `PowerSGD` and usually a much lower accuracy; try `PowerSGD` first. The arguments are
    the same; `min_compression_rate` is not used, and `exclude` cannot be.
    """

    hook_name: ClassVar[str] = "batched_powerSGD"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(not self.alternate, "alternate", "False: it is for PowerSGD")
        self._require(not self.exclude, "exclude", "none: whole buckets are compressed here; use PowerSGD")


CONFIGS: dict[str, type[HookConfig]] = {
    config.hook_name: config for config in (AllReduce, FP16Compress, BF16Compress, PowerSGD, BatchedPowerSGD, Noop)
}


def resolve_start(config: PowerSGD, total_steps: int | None) -> PowerSGD:
    """Replace `start_powerSGD_iter` by a number of steps.

    Args:
        total_steps: synchronised backward passes in the whole run; None where unknown.

    Raises:
        HookConfigError: a fraction was asked for and the length of the run is unknown.
    """
    start = config.start_powerSGD_iter
    if start is None:
        start = DEFAULT_START_STEP if total_steps is None else min(DEFAULT_START_STEP, math.ceil(0.1 * total_steps))
    elif isinstance(start, float):
        if total_steps is None:
            raise HookConfigError(
                f"start_powerSGD_iter={start!r} is a fraction of the run, whose length is unknown here: "
                "pass total_steps=, or give start_powerSGD_iter as an int, a number of steps"
            )
        start = math.ceil(start * total_steps)
    return dataclasses.replace(config, start_powerSGD_iter=start)


def from_options(config: type[HookConfig], options: Mapping[str, Any]) -> HookConfig:
    """Make a config from `hook_options`: values as YAML gives them, checked by OmegaConf against the dataclass.

    Raises:
        HookConfigError: unknown name (the closest match is offered) or a value that does not fit.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            if not fields:
                raise HookConfigError(f"hook {config.hook_name!r} has no options, got {name!r}")
            raise HookConfigError(
                f"hook {config.hook_name!r} has no option {name!r}{closest(str(name), fields)}; "
                f"its options are {', '.join(fields)}"
            )
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values = checked_types(config, options, f"hook {config.hook_name!r}: option ")
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), values))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise HookConfigError(f"hook {config.hook_name!r}: option {error.full_key}: {reason}") from None
    assert isinstance(made, HookConfig)
    return made


def checked_types(config: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`options` for OmegaConf, whose conversions go too far in one direction (4 is True) and not far enough in another
    ("4", as an environment variable gives it, is no `int | float`). `where` begins the text of an error.

    Raises:
        HookConfigError: a bool that is none, a number that no float can be, or text where a list of it should be.
    """
    hints, values = typing.get_type_hints(config), dict(options)
    for name, value in options.items():
        hint = hints[name]
        if hint == list[str]:
            # Whatever it is, OmegaConf would make text of what stands in a list.
            if not _is_list_of_text(value):
                raise HookConfigError(
                    f"{where}{name}: Value {shown(value)} is not a list of text; write it as ['*embed*', 'head.weight']"
                )
            values[name] = list(value)
            continue
        if isinstance(value, str):
            values[name] = _number(value) if float in typing.get_args(hint) else value
            wrong = hint is bool and "${" not in value and value.strip().lower() not in _YAML_BOOLS
        else:
            wrong = hint is bool and isinstance(value, (int, float)) and not isinstance(value, bool)
        if wrong:
            raise HookConfigError(f"{where}{name}: Value {shown(value)} is not a valid bool; expected True or False")
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                values[name] = float(value)
            except OverflowError:
                raise HookConfigError(f"{where}{name}: Value is too large a number") from None
    return values


def _number(text: str) -> Any:
    """The int or float that `text` stands for, else `text`."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def closest(name: str, candidates: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if not matches and len(name) > 2:  # "rank" for "matrix_approximation_rank"
        matches = [candidate for candidate in by_lower if name.lower() in candidate][:1]
    return f" (did you mean {by_lower[matches[0]]!r}?)" if matches else ""


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint == list[str]:
        return _is_list_of_text(value)
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if hint == list[str]:
        return "a list of text"
    return "None" if hint is type(None) else hint.__name__


def _is_list_of_text(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(isinstance(item, str) for item in value)
    )

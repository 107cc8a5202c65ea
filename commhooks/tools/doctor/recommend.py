"""Decide from the doctor's measurements which hook to use, or none. Pure arithmetic, equal on every rank."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commhooks.comm.link import Link, Network
from commhooks.compressors.candidates import ALLREDUCE, MARGIN, NOOP, choose
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.native.choice import NativelyComputed
from commhooks.compressors.registry import COMPRESSORS
from commhooks.tools.doctor.measure import Measured

SLOW_CODEC = (
    "{} computes longer than it waits: on a CPU it is faster with the native kernel, which needs a C compiler such as "
    "gcc on every machine, and COMMHOOKS_NATIVE=0 not set."
)
_NOISY = 0.3
_GRID_MBIT = [10 ** (exponent / 20) for exponent in range(120, -1, -1)]  # 1 Tbit/s down to 1 Mbit/s


@dataclass(frozen=True)
class Advice:
    """The doctor's recommendation.

    Attributes:
        compress: whether to compress.
        use: label of the recommended candidate; `"allreduce"` means no hook.
        hook, hook_options: arguments for `commhooks.attach`; None and {} if no hook is recommended.
        reason: one or two sentences with the measurements.
        headroom: step time with plain all-reduce / that with noop: the largest possible speedup.
        speedup: step time with plain all-reduce / that with the recommended candidate.
        pays_below_mbit_per_s: estimated bandwidth up to which one of the candidates is worth using; None: at no
            bandwidth.
        notes: further remarks.
    """

    compress: bool
    use: str
    hook: str | None
    hook_options: Mapping[str, Any]
    reason: str
    headroom: float
    speedup: float
    pays_below_mbit_per_s: float | None
    notes: tuple[str, ...] = field(default=())


def recommend(measured: Mapping[str, Measured], link: Link, world_size: int) -> Advice:
    """Make the recommendation. `measured` holds noop, plain all-reduce and the candidates."""
    noop, plain = measured[NOOP.label], measured[ALLREDUCE.label]
    hooks = _hooks(measured)
    headroom = plain.median_ms / noop.median_ms
    figures = f"{plain.median_ms:.4g} ms with plain all-reduce and {noop.median_ms:.4g} ms without any exchange"
    # What may be as fast as plain all-reduce by chance is left out: its third quartile must lie below the first one of
    # plain all-reduce.
    clear = [plain, *(each for each in hooks if each.quartiles_ms[1] < plain.quartiles_ms[0])]
    chosen = plain
    if headroom >= MARGIN:
        known = {each.candidate.label: each.candidate for each in clear}
        times = {each.candidate.label: each.median_ms for each in clear}
        chosen = measured[choose(times, known, ALLREDUCE.label)]
    notes: list[str] = []
    if headroom < MARGIN:
        gain = max(0.0, 100 * (headroom - 1))
        reason = f"Do not compress. A step takes {figures}: no hook could make it faster by more than {gain:.0f} %."
    elif chosen is plain:
        much = f"{100 * (MARGIN - 1):.0f} %"
        reason = f"Do not compress. A step takes {figures}, but no hook that was tried is clearly faster, by {much}"
        if hooks:
            fastest = min(hooks, key=lambda each: each.median_ms)
            reason += f"; the fastest, {fastest.candidate.label}, takes {fastest.median_ms:.4g} ms"
        reason += "."
    else:
        reason = (
            f"Use {chosen.candidate.label}. A step takes {chosen.median_ms:.4g} ms with it, {figures}: "
            f"{plain.median_ms / chosen.median_ms:.2f} times faster."
        )
        if chosen.candidate.note:
            notes.append(chosen.candidate.note)
    slow_codec = [each for each in hooks if each.kernel == TORCH.name and _codec_rules(each, noop)]
    if slow_codec and headroom >= MARGIN:
        notes.append(SLOW_CODEC.format(slow_codec[0].candidate.label))
    for each in {id(each): each for each in (noop, plain, chosen)}.values():
        low, high = each.quartiles_ms
        if high - low > _NOISY * each.median_ms:
            notes.append(
                f"The steps of {each.candidate.label} vary a lot ({low:.4g} to {high:.4g} ms in the middle half): "
                "run it again with more steps, when nothing else uses the machines and the network."
            )
    if min(len(each.step_ms) for each in measured.values()) < 5:
        notes.append("Some figures come from fewer than 5 steps: more steps, or more seconds, make them firmer.")
    compress, used = chosen is not plain, chosen.candidate
    return Advice(
        compress=compress,
        use=used.label,
        hook=used.hook if compress else None,
        hook_options=dict(used.options) if compress else {},
        reason=reason,
        headroom=headroom,
        speedup=plain.median_ms / chosen.median_ms,
        pays_below_mbit_per_s=pays_below(measured, link, world_size),
        notes=tuple(notes),
    )


def _hooks(measured: Mapping[str, Measured]) -> list[Measured]:
    return [each for label, each in measured.items() if label not in (NOOP.label, ALLREDUCE.label)]


def _codec_rules(each: Measured, noop: Measured) -> bool:
    """Whether a codec that has a native kernel causes most of the time that the hook adds to the step, and a large part
    of the step."""
    if not each.codec_ms or not issubclass(COMPRESSORS[each.candidate.hook], NativelyComputed):
        return False
    codec_ms = statistics.median(each.codec_ms)
    return codec_ms > (each.median_ms - noop.median_ms) / 2 and codec_ms > (MARGIN - 1) * noop.median_ms


def estimate_ms(measured: Measured, noop: Measured, link: Link, mbit_per_s: float, world_size: int) -> float:
    """Estimate the step time in ms on a link of another bandwidth. The estimate equals the measured time at the
    measured bandwidth and falls with increasing bandwidth.

    Slower link: the step time grows by the additional time to send its bytes. The order of two hooks is therefore
    determined by their bytes, independent of the scatter of the measurements. The overlap with the backward pass is
    assumed constant in seconds; if more could overlap, the estimate is too long by at most one backward pass.

    Faster link: the step time falls by the time saved in sending its bytes, down to the step time without communication
    plus the codec time. The rest of the waiting time (latency, delays of other ranks, noise) is assumed to fall in
    proportion to the bandwidth, so that it cannot make a hook look worthwhile at every bandwidth.
    """
    here_ms = 1000 * Network(world_size, 1e6 * link.mbit_per_s).seconds(measured.bytes_sent)
    times_slower = link.mbit_per_s / mbit_per_s
    if times_slower >= 1:
        return measured.median_ms + (times_slower - 1) * here_ms
    if measured.codec_ms:
        codec_ms = statistics.median(measured.codec_ms)
    else:  # on an accelerator without clocks: the time that sending the bytes does not explain
        codec_ms = max(0.0, measured.median_ms - noop.median_ms - here_ms)
    floor_ms = min(measured.median_ms, noop.median_ms + codec_ms)
    network_ms = max(here_ms, measured.median_ms - floor_ms)
    return max(floor_ms, measured.median_ms - (1 - times_slower) * network_ms)


def pays_below(measured: Mapping[str, Measured], link: Link, world_size: int) -> float | None:
    """The largest bandwidth in Mbit/s at which a hook is worth using according to the estimates; None if there is
    none."""
    noop, plain = measured[NOOP.label], measured[ALLREDUCE.label]
    hooks = _hooks(measured)
    for mbit_per_s in _GRID_MBIT:
        limit_ms = estimate_ms(plain, noop, link, mbit_per_s, world_size) / MARGIN
        if any(estimate_ms(each, noop, link, mbit_per_s, world_size) <= limit_ms for each in hooks):
            return mbit_per_s
    return None

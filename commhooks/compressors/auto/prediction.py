"""Predict the step with each candidate, from what was measured with one of them. Pure arithmetic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commhooks.comm.collective import Op
from commhooks.comm.cost import Backend, Cost, collective_cost
from commhooks.comm.link import Link
from commhooks.compressors.auto.pipeline import BucketTimes, step_s


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        link: as measured.
        ranks: how many there are.
        together: how many of them share the network of one machine; 1 if all are on one machine.
    """

    link: Link
    ranks: int
    together: int = 1
    backend: Backend = "nccl"

    @property
    def makes_sense(self) -> bool:
        rate, latency = self.link.mbit_per_s, self.link.latency_ms
        return latency >= 0 and (rate > 0 or (rate == 0 and self.ranks == 1))

    def seconds(self, op: Op, counted_bytes: float) -> float:
        """The time of a collective."""
        latency_s = self.link.latency_ms / 1000 / max(1.0, self._cost("sum", 0).messages)
        return self._cost(op, counted_bytes).seconds(self.link.mbit_per_s * 1e6, latency_s)

    def _cost(self, op: Op, counted_bytes: float) -> Cost:
        return collective_cost(op, counted_bytes, self.ranks, self.together, self.backend)


@dataclass(frozen=True)
class Load:
    """What one candidate does in a step.

    Attributes:
        sent: per bucket its collectives, each with its counted bytes (see `Counters`).
        codec_s: seconds in the hook, all buckets together, on the slowest rank.
    """

    sent: tuple[tuple[tuple[Op, float], ...], ...]
    codec_s: float

    @property
    def counted_bytes(self) -> float:
        return sum(size for bucket in self.sent for _, size in bucket)


def predicted_s(
    loads: Mapping[str, Load],
    now: str,
    measured_s: float,
    computing_s: Sequence[float],
    network: Network,
    numels: Sequence[int],
) -> dict[str, float]:
    """Seconds of a step with each candidate: the measured time, plus how much longer the candidate's pipeline is than
    that of the candidate in force. What the model leaves out of both cancels out. Where the model is longer than what
    was measured, as when the link was busy in the moment of measuring it, the two pipelines count in proportion. NaN
    where something is missing.

    Args:
        loads: by label.
        now: the label of the candidate in force, with which `measured_s`, the time of a step, was measured.
        computing_s: per bucket; see `Seen`.
        numels: elements of each bucket, by which the codec's time is divided.
    """
    modelled = {label: _modelled_s(load, computing_s, network, numels) for label, load in loads.items()}
    in_force = modelled[now]
    if in_force > measured_s:
        return {label: measured_s * own / in_force for label, own in modelled.items()}
    return {label: measured_s + own - in_force for label, own in modelled.items()}


def _modelled_s(load: Load, computing_s: Sequence[float], network: Network, numels: Sequence[int]) -> float:
    if not (math.isfinite(load.codec_s) and network.makes_sense):
        return math.nan
    total = max(1, sum(numels))
    buckets = []
    for computing, sent, numel in zip(computing_s, load.sent, numels, strict=True):
        wire = [network.seconds(op, size) for op, size in sent]
        buckets.append(BucketTimes.even(computing, load.codec_s * numel / total, wire))
    return step_s(buckets)

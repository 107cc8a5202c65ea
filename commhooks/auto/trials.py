"""Decide what the hook auto measures, tries and chooses next.

Ranks with equal measurements decide equally.

phase       measured steps                                        next
measuring   the current candidate, at first plain all-reduce      the trials
trying      one candidate after another, in real training steps   another trial, or the choice
decided     nothing                                               measuring after a resume with
other ranks or options
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from commhooks.auto.options import ALLREDUCE, Auto, Candidate, choose
from commhooks.compressors.unit_plan import Unit
from commhooks.errors import HookConfigError, shown
from commhooks.options import LARGEST_STEP

WARM_UP = 2
"""Number of steps not measured after a change, because memory is allocated, and at first DDP
rebuilds its buckets.
"""
TRIAL_STEPS = 8
"""Number of steps measured per candidate, or more until they take `TRIAL_S`."""
TRIAL_S = 0.25
"""Minimum total time of the measured steps, in seconds."""
MOST_EXTENSIONS = 5
"""How many times in a row a phase may be extended because of too few valid measurements."""
NO_TIMES = "the measured times make no sense, so nothing changes"
SHORTEST_S = 1e-9
"""The shortest step, in seconds, that a saved decision may contain."""
LARGEST = 1e18
"""The largest number that a saved decision may contain."""
_PHASES = ("measuring", "trying", "decided")


@dataclass(frozen=True)
class Watch:
    """Names the steps to measure, from `begin` to before `end`. At `end` a decision follows."""

    begin: int
    end: int


@dataclass(frozen=True)
class Decision:
    """Holds the current candidate, and the state of the measurements.

    Attributes:
        watch: the steps of this phase to measure; None if it is decided.
        since: number of committed steps when the candidate became current; None before the first
            decision.
        extended: how many times in a row the phase was extended because of too few valid
            measurements.
        switches: how many times the current candidate has changed.
        why: the reason for the latest choice, a sentence without a full stop.
        tried_s: seconds per step in the latest trials, by label; NaN without a valid measurement.
            The first entry is the candidate that was current before the trials.
        counted_bytes: bytes per step, by label, without sparse gradients; see `Counters`.
    """

    candidate: Candidate
    watch: Watch | None
    others: tuple[Candidate, ...] = ()
    since: int | None = None
    phase: str = "measuring"
    extended: int = 0
    switches: int = 0
    why: str = ""
    tried_s: Mapping[str, float] = field(default_factory=dict)
    counted_bytes: Mapping[str, float] = field(default_factory=dict)
    ranks_per_node: int = 1

    @property
    def candidates(self) -> dict[str, Candidate]:
        """By label, the current one first."""
        return {candidate.label: candidate for candidate in (self.candidate, *self.others)}

    @property
    def summary(self) -> str:
        if self.phase == "trying":
            return f"trying {self.candidate.label} since step {self.since}"
        if self.since is not None:
            return f"{self.candidate.label} since step {self.since}: {self.why}"
        return ""

    @property
    def message(self) -> str:
        sent = self.counted_bytes.get(self.candidate.label)
        sender = "rank" if self.ranks_per_node == 1 else "node"
        size = "" if sent is None else f", {Unit.of(sent).text(sent)} per step and {sender}"
        return f"auto: {self.candidate.label} from step {self.since} on{size}: {self.why}"

    def to_plain(self) -> dict[str, Any]:
        return {
            "label": self.candidate.label,
            "candidates": [_plain(candidate) for candidate in self.candidates.values()],
            **({} if self.ranks_per_node == 1 else {"ranks_per_node": self.ranks_per_node}),
            "since": self.since,
            "phase": self.phase,
            "watch": None if self.watch is None else [self.watch.begin, self.watch.end],
            "extended": self.extended,
            "switches": self.switches,
            "why": self.why,
            "figures": {
                "tried_s": {
                    label: seconds if math.isfinite(seconds) else None
                    for label, seconds in self.tried_s.items()
                },
                "counted_bytes": dict(self.counted_bytes),
            },
        }

    @classmethod
    def from_plain(cls, saved: Any) -> "Decision":
        """Invert `to_plain`. The content may be hostile; raises HookConfigError for any other."""
        try:
            candidates = {
                entry["label"]: _candidate(entry) for entry in _a(list, saved["candidates"])
            }
            labels = set(candidates)
            watch = saved["watch"]
            since = saved["since"]
            phase = saved["phase"]
            if phase == "resting":  # of versions that measured again from time to time
                phase = "decided"
                watch = None
            if phase not in _PHASES:
                raise ValueError(f"phase {shown(phase)}")
            tried_s = _by_label(saved["figures"]["tried_s"])
            counted_bytes = _by_label(saved["figures"]["counted_bytes"])
            if any(seconds < SHORTEST_S for seconds in tried_s.values()):
                raise ValueError("a step that takes no time")
            if not tried_s.keys() <= labels or not counted_bytes.keys() <= labels:
                raise ValueError("it has figures for something that is not a candidate")
            if phase == "trying" and not (tried_s and counted_bytes.keys() == labels):
                raise ValueError("trials without figures")
            return cls(
                candidates.pop(_a(str, saved["label"])),
                None if watch is None else Watch(*map(_count, _a(list, watch))),
                tuple(candidates.values()),
                None if since is None else _count(since),
                phase,
                _count(saved["extended"]),
                _count(saved["switches"]),
                _a(str, saved["why"]),
                tried_s,
                counted_bytes,
                max(1, _count(saved.get("ranks_per_node", 1))),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise HookConfigError(
                f"'notes' does not hold a decision of hook 'auto' ({error})"
            ) from error


def begin(config: Auto, step: int, ranks_per_node: int = 1) -> Decision:
    now = Decision(config.candidates[0], None, ranks_per_node=ranks_per_node)
    return _measuring(now, config, step)


def longer(now: Decision, step: int, steps: int) -> Decision:
    assert now.watch is not None
    return replace(now, watch=Watch(now.watch.begin, step + steps))


def extended(now: Decision, step: int) -> Decision:
    """Extend the phase after too few valid measurements, or end it after `MOST_EXTENSIONS`."""
    if now.extended < MOST_EXTENSIONS:
        return replace(longer(now, step, TRIAL_STEPS), extended=now.extended + 1)
    if now.phase == "trying":
        return _ended(replace(now, tried_s={**now.tried_s, now.candidate.label: math.nan}), step)
    return _decided(replace(now, why=NO_TIMES, since=step if now.since is None else now.since))


def after_measuring(
    now: Decision,
    step: int,
    step_s: float,
    candidates: Sequence[Candidate],
    sent: Mapping[str, float],
) -> Decision:
    label = now.candidate.label
    others = tuple(candidate for candidate in candidates if candidate.label != label)
    return _next_trial(
        replace(now, others=others, tried_s={label: step_s}, counted_bytes=sent), step
    )


def after_trial(now: Decision, step: int, step_s: float) -> Decision:
    return _next_trial(replace(now, tried_s={**now.tried_s, now.candidate.label: step_s}), step)


def resumed(
    saved: Decision, config: Auto, step: int, *, same_ranks: bool, ranks_per_node: int = 1
) -> Decision:
    """Continue with a decision from a checkpoint, possibly in the middle of trials.

    If the ranks, the ranks per node or the candidates have changed, measure the current candidate
    again; replace it at once if it is no longer allowed.
    """
    allowed = config.candidates_with(ranks_per_node)
    same_ranks = same_ranks and saved.ranks_per_node == ranks_per_node
    excluding = {
        label: candidate.excluding(config.exclude) for label, candidate in saved.candidates.items()
    }
    usable = {label: candidate for label, candidate in excluding.items() if candidate in allowed}
    candidate = usable.get(saved.candidate.label)
    if candidate is None:
        return begin(config, step, ranks_per_node)
    now = replace(
        saved,
        ranks_per_node=ranks_per_node,
        candidate=candidate,
        others=_without(usable, candidate.label),
        tried_s=_of(usable, saved.tried_s),
        counted_bytes=_of(usable, saved.counted_bytes),
    )
    if not same_ranks:
        return replace(_measuring(now, config, step), tried_s={}, counted_bytes={})
    changed = now.candidates != saved.candidates or len(usable) < len(allowed)
    # If `others` is empty, no measurement was valid, and the choice stays.
    if now.phase != "measuring" and saved.others and changed:
        return _measuring(now, config, step)
    return now


def worth_trying(now: Decision) -> list[str]:
    """Return the labels of the candidates to try, ordered by the bytes they send.

    Those that send as much as all-reduce are left out, and those whose bytes alone would take
    longer than the best step so far.

    Time per byte is estimated from below: the time that an earlier trial saved, divided by the
    bytes it saved. The candidate that sends most computes least, so the true time per byte is at
    least that.
    """
    tried = [
        (now.counted_bytes[label], seconds)
        for label, seconds in now.tried_s.items()
        if math.isfinite(seconds)
    ]
    most, most_s = max(tried)
    saved_per_byte = [(most_s - seconds) / (most - sent) for sent, seconds in tried if sent < most]
    s_per_byte = max([0.0, *saved_per_byte])
    best_s = min(seconds for _, seconds in tried)
    untried = [
        label
        for label in now.candidates
        if label not in now.tried_s and not _sends_as_much(now, label)
    ]
    worth = [label for label in untried if now.counted_bytes[label] * s_per_byte <= best_s]
    return sorted(worth, key=lambda label: (now.counted_bytes[label], label))


def _sends_as_much(now: Decision, label: str) -> bool:
    sent = now.counted_bytes
    return (
        label != ALLREDUCE.label
        and ALLREDUCE.label in sent
        and sent[label] >= sent[ALLREDUCE.label]
    )


def _next_trial(now: Decision, step: int) -> Decision:
    label, *_ = [*worth_trying(now), ""]
    if not label:
        return _ended(now, step)
    watch = Watch(step + WARM_UP, step + WARM_UP + TRIAL_STEPS)
    return replace(_with(now, label, step), phase="trying", watch=watch, extended=0)


def _ended(now: Decision, step: int) -> Decision:
    label = choose(now.tried_s, now.candidates, _before(now))
    return _decided(replace(_with(now, label, step), why=_reason(now, label)))


def _decided(now: Decision) -> Decision:
    return replace(now, phase="decided", watch=None, extended=0)


def _measuring(now: Decision, config: Auto, step: int) -> Decision:
    """Measure the current candidate; during trials, the one that was current before them."""
    if now.phase == "trying":
        now = _with(now, _before(now), step)
        now = now if now.why else replace(now, since=None)
    watch = Watch(step + min(WARM_UP, config.measure_steps - 1), step + config.measure_steps)
    return replace(now, phase="measuring", watch=watch, extended=0)


def _before(now: Decision) -> str:
    return next(iter(now.tried_s), now.candidate.label)


def _with(now: Decision, label: str, step: int) -> Decision:
    if label == now.candidate.label and now.since is not None:
        return now
    switches = now.switches + (label != now.candidate.label)
    return replace(
        now,
        candidate=now.candidates[label],
        others=_without(now.candidates, label),
        since=step,
        switches=switches,
    )


def _without(candidates: Mapping[str, Candidate], label: str) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in candidates.values() if candidate.label != label)


def _of(labels: Mapping[str, Candidate], numbers: Mapping[str, float]) -> dict[str, float]:
    return {label: number for label, number in numbers.items() if label in labels}


def _reason(now: Decision, chosen: str) -> str:
    """Return why `chosen`, a label, is the current candidate, as a sentence without a full stop."""
    times = {
        label: f"{1000 * seconds:.4g} ms"
        for label, seconds in now.tried_s.items()
        if math.isfinite(seconds)
    }
    others = [f"{time} with {label}" for label, time in times.items() if label != chosen]
    parts = ["nothing helps here"] if chosen == ALLREDUCE.label else []
    parts.append(", ".join([f"a step takes {times.get(chosen, 'an unknown time')}", *others]))
    parts += [f"{label} could not be measured" for label in now.tried_s if label not in times]
    untried = [label for label in now.candidates if label not in now.tried_s]
    useless = [label for label in untried if _sends_as_much(now, label)]
    slower = [label for label in untried if label not in useless]
    if slower and len(times) > 1:
        parts.append(f"not tried, because their bytes alone would take longer: {', '.join(slower)}")
    if useless:
        parts.append(f"not tried, because they send no less of this model: {', '.join(useless)}")
    return "; ".join(parts)


# ---- checks of a saved decision, which may be damaged or hostile
# -----------------------------------------------------


def _plain(candidate: Candidate) -> dict[str, Any]:
    saved = {
        "label": candidate.label,
        "hook": candidate.hook,
        "options": dict(candidate.options),
        "changes": candidate.changes,
    }
    return saved | {"between_nodes": True} if candidate.between_nodes else saved


def _candidate(saved: Any) -> Candidate:
    return Candidate(
        _a(str, saved["label"]),
        _a(str, saved["hook"]),
        _a(dict, saved["options"]),
        _number(saved["changes"]),
        _a(bool, saved.get("between_nodes", False)),
    )


def _by_label(saved: Any) -> dict[str, float]:
    return {
        _a(str, label): math.nan if number is None else _number(number)
        for label, number in _a(dict, saved).items()
    }


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} is not a {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        raise TypeError(f"{shown(value)} is not a number from 0 to {LARGEST:g}")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_STEP:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to {LARGEST_STEP}")
    return value

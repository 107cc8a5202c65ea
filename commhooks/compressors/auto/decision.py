"""What `hook="auto"` has decided and why: learned state, as plain types in checkpoints."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from commhooks.compressors.auto.candidates import Candidate
from commhooks.compressors.observation import Watch
from commhooks.errors import HookConfigError, shown

Phase = Literal["measuring", "trying", "resting"]
_PHASES = ("measuring", "trying", "resting")
_LARGEST = 2**62


@dataclass(frozen=True)
class Figures:
    """What a decision rests on; equal on all ranks. Seconds of a step; see `report.combined`.

    Attributes:
        step_s, waiting_s: measured with the candidate in force.
        predicted_s: by label.
        tried_s: by label, where a candidate was in force since it was last measured.
        codec_s: by label, in the hook.
        counted_bytes: by label, of a step, without sparse gradients; see `Counters`.
        mbit_per_s, latency_ms: of the link.
        spent_s: what measuring has cost this time.
    """

    step_s: float = math.nan
    waiting_s: float = math.nan
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    tried_s: Mapping[str, float] = field(default_factory=dict)
    codec_s: Mapping[str, float] = field(default_factory=dict)
    counted_bytes: Mapping[str, float] = field(default_factory=dict)
    mbit_per_s: float = math.nan
    latency_ms: float = math.nan
    spent_s: float = 0.0

    def of(self, labels: Collection[str]) -> "Figures":
        """Those of some candidates only."""

        def chosen(by_label: Mapping[str, float]) -> dict[str, float]:
            return {label: each for label, each in by_label.items() if label in labels}

        return dataclasses.replace(
            self,
            predicted_s=chosen(self.predicted_s),
            tried_s=chosen(self.tried_s),
            codec_s=chosen(self.codec_s),
            counted_bytes=chosen(self.counted_bytes),
        )


@dataclass(frozen=True)
class Decision:
    """
    Attributes:
        candidate: the one in force.
        others: the other candidates of the latest decision.
        since: it is in force after so many committed steps; None: nothing was decided yet.
        phase: "measuring" before a decision, "trying" while a new choice is measured, "resting" after it.
        watch: the steps of this phase that are measured; None: it never looks again.
        extended: how many times in a row too few passes made sense.
        switches: how many times another candidate was chosen.
        why: the reason, a sentence without a full stop.
    """

    candidate: Candidate
    watch: Watch | None
    others: tuple[Candidate, ...] = ()
    since: int | None = None
    phase: Phase = "measuring"
    extended: int = 0
    switches: int = 0
    why: str = ""
    figures: Figures = field(default_factory=Figures)

    @classmethod
    def begin(cls, plain: Candidate, step: int, measure_steps: int) -> "Decision":
        """Nothing decided: plain all-reduce until it was measured."""
        return cls(plain, Watch(step, step + measure_steps))

    @property
    def known(self) -> dict[str, Candidate]:
        """All candidates by label."""
        return {each.label: each for each in (self.candidate, *self.others)}

    def to_plain(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        return {
            "label": self.candidate.label,
            "candidates": [_plain_candidate(each) for each in self.known.values()],
            "since": self.since,
            "phase": self.phase,
            "watch": None if self.watch is None else [self.watch.begin, self.watch.end],
            "extended": self.extended,
            "switches": self.switches,
            "why": self.why,
            "figures": {key: _plain_number(each) for key, each in dataclasses.asdict(self.figures).items()},
        }

    @classmethod
    def from_plain(cls, saved: Any) -> "Decision":
        """The inverse of `to_plain`, for content that may be damaged or hostile.

        Raises:
            HookConfigError: it is not what `to_plain` returns.
        """
        try:
            candidates = {each["label"]: _checked_candidate(each) for each in _a(list, saved["candidates"])}
            chosen = candidates.pop(_a(str, saved["label"]))
            watch, since, phase = saved["watch"], saved["since"], saved["phase"]
            if phase not in _PHASES:
                raise ValueError(f"phase {shown(phase)}")
            figures = _checked_figures(saved["figures"])
            if not figures.predicted_s.keys() <= {chosen.label, *candidates}:
                raise ValueError("it predicts times of what is no candidate")
            return cls(
                chosen,
                None if watch is None else Watch(*(_count(each) for each in _a(list, watch))),
                tuple(candidates.values()),
                None if since is None else _count(since),
                phase,
                _count(saved["extended"]),
                _count(saved["switches"]),
                _a(str, saved["why"]),
                figures,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise HookConfigError(f"'notes' does not hold a decision of hook 'auto' ({error})") from error


def _plain_number(value: Any) -> Any:
    """None for NaN, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: _plain_number(each) for key, each in value.items()}
    return value if math.isfinite(value) else None


def _plain_candidate(candidate: Candidate) -> dict[str, Any]:
    return {**dataclasses.asdict(candidate), "options": dict(candidate.options)}


def _checked_candidate(saved: Any) -> Candidate:
    made = Candidate(
        _a(str, saved["label"]), _a(str, saved["hook"]), _a(dict, saved["options"]), _number(saved["changes"])
    )
    made.new()  # raises for anything else than the candidates and their options
    return made


def _checked_figures(saved: Any) -> Figures:
    made: dict[str, Any] = {}
    for each in dataclasses.fields(Figures):
        value = saved[each.name]
        by_label = each.type in (Mapping[str, float], "Mapping[str, float]")
        made[each.name] = {_a(str, k): _number(v) for k, v in _a(dict, value).items()} if by_label else _number(value)
    return Figures(**made)


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} is not a {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise TypeError(f"{shown(value)} is not a number")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{shown(value)} is not a whole number from 0 to {_LARGEST}")
    return value

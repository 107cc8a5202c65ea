"""What `hook="auto"` has decided and why: learned state, as plain types in checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commhooks.compressors.adaptive import Watch
from commhooks.compressors.auto.candidates import new
from commhooks.compressors.candidates import Candidate
from commhooks.compressors.unit_plan import Unit
from commhooks.errors import HookConfigError, shown
from commhooks.options import LARGEST_STEP

SHORTEST_S = 1e-9
"""A step takes at least so many seconds."""
LARGEST = 1e18
"""Number in saved figures."""
_PHASES = ("measuring", "trying", "resting")


@dataclass(frozen=True)
class Decision:
    """
    Attributes:
        candidate: the one in force.
        watch: the steps of this phase that are measured; None: it never looks again.
        others: the other candidates.
        since: it is in force after so many committed steps; None: nothing was decided yet.
        phase: see `trials.py`.
        extended: how many times in a row too few passes made sense.
        switches: how many times another candidate came into force.
        why: the reason for the latest choice, a sentence without a full stop.
        tried_s: by label: seconds of a step in the latest trials; NaN where it could not be measured. The first is the
            one that was in force before.
        counted_bytes: by label: of a step, without sparse gradients; see `Counters`.
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

    @property
    def known(self) -> dict[str, Candidate]:
        """All candidates by label."""
        return {each.label: each for each in (self.candidate, *self.others)}

    @property
    def summary(self) -> str:
        """What was decided, for the summary at the first backward pass; "" if nothing was."""
        if self.phase == "trying":
            return f"trying {self.candidate.label} since step {self.since}"
        if self.since is not None:
            return f"{self.candidate.label} since step {self.since}: {self.why}"
        return ""

    @property
    def line(self) -> str:
        """What rank 0 says after a choice."""
        sent = self.counted_bytes.get(self.candidate.label)
        size = "" if sent is None else f", {Unit.of(sent).text(sent)} per step and rank"
        return f"auto: {self.candidate.label} from step {self.since} on{size}: {self.why}"

    def to_plain(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers; None for NaN, for which JSON has no number."""
        return {
            "label": self.candidate.label,
            "candidates": [
                {"label": each.label, "hook": each.hook, "options": dict(each.options), "changes": each.changes}
                for each in self.known.values()
            ],
            "since": self.since,
            "phase": self.phase,
            "watch": None if self.watch is None else [self.watch.begin, self.watch.end],
            "extended": self.extended,
            "switches": self.switches,
            "why": self.why,
            "figures": {
                "tried_s": {label: each if math.isfinite(each) else None for label, each in self.tried_s.items()},
                "counted_bytes": dict(self.counted_bytes),
            },
        }

    @classmethod
    def from_plain(cls, saved: Any) -> "Decision":
        """The inverse of `to_plain`, for content that may be damaged or hostile.

        Raises:
            HookConfigError: it is not what `to_plain` returns.
        """
        try:
            known = {each["label"]: _checked_candidate(each) for each in _a(list, saved["candidates"])}
            labels = set(known)
            watch, since, phase = saved["watch"], saved["since"], saved["phase"]
            if phase not in _PHASES:
                raise ValueError(f"phase {shown(phase)}")
            tried_s, counted_bytes = (_by_label(saved["figures"][key]) for key in ("tried_s", "counted_bytes"))
            if any(each < SHORTEST_S for each in tried_s.values()):
                raise ValueError("a step that takes no time")
            if not tried_s.keys() <= labels or not counted_bytes.keys() <= labels:
                raise ValueError("it has figures of what is no candidate")
            if phase == "trying" and not (tried_s and counted_bytes.keys() == labels):
                raise ValueError("trials without figures")
            return cls(
                known.pop(_a(str, saved["label"])),
                None if watch is None else Watch(*(_count(each) for each in _a(list, watch))),
                tuple(known.values()),
                None if since is None else _count(since),
                phase,
                _count(saved["extended"]),
                _count(saved["switches"]),
                _a(str, saved["why"]),
                tried_s,
                counted_bytes,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise HookConfigError(f"'notes' does not hold a decision of hook 'auto' ({error})") from error


def _checked_candidate(saved: Any) -> Candidate:
    label, hook, options = _a(str, saved["label"]), _a(str, saved["hook"]), _a(dict, saved["options"])
    made = Candidate(label, hook, options, _number(saved["changes"]))
    new(made)  # raises for anything else than the candidates and their options
    return made


def _by_label(saved: Any) -> dict[str, float]:
    return {_a(str, label): math.nan if each is None else _number(each) for label, each in _a(dict, saved).items()}


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

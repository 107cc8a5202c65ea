"""What follows a phase of `auto`: from a decision and the time of a step, the next decision. Pure, and equal on all
ranks that have the same numbers.

    measuring   the candidate in force, at first plain all-reduce      -> begin the trials
    trying      one candidate after another is in force, in real steps -> the next one, or choose
    resting     until the next look: has the time of a step changed?   -> rest on, or measure anew
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from commhooks.compressors.adaptive import Watch
from commhooks.compressors.auto.candidates import excluding, offered
from commhooks.compressors.auto.decision import Decision
from commhooks.compressors.auto.options import Auto
from commhooks.compressors.candidates import ALLREDUCE, Candidate, choose
from commhooks.options import LARGEST_STEP

WARM_UP = 2
"""Steps after a change that are not measured: they allocate memory, and at first DDP divides the model anew."""
TRIAL_STEPS = 8
"""Steps that are measured of each candidate, and at the end of a rest: so many, and more until `TRIAL_S`."""
TRIAL_S = 0.25
"""Seconds that the measured steps take together, at least."""
MOST_SHARE = 0.01
"""Share of the time that trials may take after the first decision."""
MOST_EXTENSIONS = 5
"""How many times in a row a phase is extended because too few steps could be measured."""
CHANGED = 0.25
"""Share of a step by which it has to become longer or shorter before it is measured anew."""
NO_TIMES = "the measured times make no sense, so nothing changes"


def begin(config: Auto, step: int) -> Decision:
    """Nothing decided: plain all-reduce until it was measured."""
    return _measuring(Decision(offered(config)[0], None), config, step)


def longer(now: Decision, step: int, steps: int) -> Decision:
    """Measure so many steps more in this phase."""
    assert now.watch is not None
    return replace(now, watch=Watch(now.watch.begin, step + steps))


def extended(now: Decision, config: Auto, step: int) -> Decision:
    """Too few steps made sense on some rank: measure longer, or give up. A trial without a time ends the trials."""
    if now.extended < MOST_EXTENSIONS:
        return replace(longer(now, step, TRIAL_STEPS), extended=now.extended + 1)
    if now.phase == "trying":
        return _ended(replace(now, tried_s={**now.tried_s, now.candidate.label: math.nan}), config, step)
    return resting(replace(now, why=NO_TIMES, since=step if now.since is None else now.since), config, step)


def after_measuring(
    now: Decision, config: Auto, step: int, step_s: float, candidates: Sequence[Candidate], sent: Mapping[str, float]
) -> Decision:
    """Begin the trials of `candidates`. `sent`: counted bytes of a step, by label; also of the one in force."""
    label = now.candidate.label
    others = tuple(each for each in candidates if each.label != label)
    return _next_trial(replace(now, others=others, tried_s={label: step_s}, counted_bytes=sent), config, step)


def after_trial(now: Decision, config: Auto, step: int, step_s: float) -> Decision:
    """Try the next candidate, or choose."""
    return _next_trial(replace(now, tried_s={**now.tried_s, now.candidate.label: step_s}), config, step)


def after_rest(now: Decision, config: Auto, step: int, step_s: float) -> Decision:
    """Rest on, or measure anew if a step takes much longer or shorter than when it was chosen, or that is not known."""
    then_s = now.tried_s.get(now.candidate.label, math.nan)
    if abs(step_s - then_s) <= CHANGED * then_s:
        return resting(now, config, step)
    return _measuring(now, config, step)


def resumed(saved: Decision, config: Auto, step: int, *, same_ranks: bool) -> Decision:
    """Go on with a decision from a checkpoint; in the middle of the trials with these. With another number of ranks, or
    other candidates, the choice stays in force and is measured anew. A choice that the options no longer allow is
    dropped at once."""
    allowed = offered(config)
    usable = {label: each for label, old in saved.known.items() if (each := excluding(old, config)) in allowed}
    candidate = usable.get(saved.candidate.label)
    if candidate is None:
        return begin(config, step)
    now = replace(
        saved,
        candidate=candidate,
        others=_without(usable, candidate.label),
        tried_s=_of(usable, saved.tried_s),
        counted_bytes=_of(usable, saved.counted_bytes),
    )
    if not same_ranks:
        return replace(_measuring(now, config, step), tried_s={}, counted_bytes={})
    if now.phase == "measuring":
        return now
    missing = {each.label for each in allowed} - usable.keys()
    # Without others nothing could be measured: the next look will try again.
    if saved.others and (missing or now.known != saved.known):
        return _measuring(now, config, step)
    anew = resting(now, config, step)
    if now.phase == "resting" and (now.watch is None or anew.watch is None or now.watch.end > anew.watch.end):
        return anew
    return now


def resting(now: Decision, config: Auto, step: int) -> Decision:
    """Rest until the next look: `check_again_every` steps, or as many as trials like the last ones may cost."""
    every = config.check_again_every
    if every is None:
        return replace(now, phase="resting", watch=None, extended=0)
    step_s, trials_s = now.tried_s.get(now.candidate.label, math.nan), list(now.tried_s.values())[1:]
    lost_s = sum(max(TRIAL_STEPS * each, TRIAL_S) * (1 - step_s / each) for each in trials_s if each > step_s)
    cost = lost_s / step_s / MOST_SHARE if lost_s else 0
    end = min(LARGEST_STEP, step + max(every, math.ceil(cost)))
    return replace(now, phase="resting", watch=Watch(end - TRIAL_STEPS, end), extended=0)


def worth_trying(now: Decision) -> list[str]:
    """The labels of the candidates that were not tried, those that send least first. One that sends no less than
    all-reduce is left out, and one whose bytes alone would take longer than the best step so far. A byte takes at least
    what was won for each one less that was sent: the candidate that sends most computes least."""
    tried = [(now.counted_bytes[label], each) for label, each in now.tried_s.items() if math.isfinite(each)]
    most, most_s = max(tried)
    s_per_byte = max([0.0, *((most_s - each) / (most - sent) for sent, each in tried if sent < most)])
    best_s = min(each for _, each in tried)
    untried = [label for label in now.known if label not in now.tried_s and not _sends_as_much(now, label)]
    worth = [label for label in untried if now.counted_bytes[label] * s_per_byte <= best_s]
    return sorted(worth, key=lambda label: (now.counted_bytes[label], label))


def _sends_as_much(now: Decision, label: str) -> bool:
    """As all-reduce: as bf16 for a model in bfloat16."""
    sent = now.counted_bytes
    return label != ALLREDUCE.label and ALLREDUCE.label in sent and sent[label] >= sent[ALLREDUCE.label]


def _next_trial(now: Decision, config: Auto, step: int) -> Decision:
    label, *_ = [*worth_trying(now), ""]
    if not label:
        return _ended(now, config, step)
    watch = Watch(step + WARM_UP, step + WARM_UP + TRIAL_STEPS)
    return replace(_with(now, label, step), phase="trying", watch=watch, extended=0)


def _ended(now: Decision, config: Auto, step: int) -> Decision:
    """Choose among what was tried."""
    label = choose(now.tried_s, now.known, _before(now))
    return resting(replace(_with(now, label, step), why=_reason(now, label)), config, step)


def _measuring(now: Decision, config: Auto, step: int) -> Decision:
    """Measure what is in force; what was only tried is taken back before. After the first trials nothing was chosen."""
    if now.phase == "trying":
        now = _with(now, _before(now), step)
        now = now if now.why else replace(now, since=None)
    watch = Watch(step + min(WARM_UP, config.measure_steps - 1), step + config.measure_steps)
    return replace(now, phase="measuring", watch=watch, extended=0)


def _before(now: Decision) -> str:
    """The label of the candidate that was in force before the trials."""
    return next(iter(now.tried_s), now.candidate.label)


def _with(now: Decision, label: str, step: int) -> Decision:
    """Another candidate, or the same one, comes into force."""
    if label == now.candidate.label and now.since is not None:
        return now
    switches = now.switches + (label != now.candidate.label)
    return replace(now, candidate=now.known[label], others=_without(now.known, label), since=step, switches=switches)


def _without(known: Mapping[str, Candidate], label: str) -> tuple[Candidate, ...]:
    return tuple(each for each in known.values() if each.label != label)


def _of(labels: Mapping[str, Candidate], numbers: Mapping[str, float]) -> dict[str, float]:
    return {label: each for label, each in numbers.items() if label in labels}


def _reason(now: Decision, label: str) -> str:
    """Why `label` was chosen."""
    said = {each: f"{1000 * seconds:.4g} ms" for each, seconds in now.tried_s.items() if math.isfinite(seconds)}
    others = [f"{time} with {each}" for each, time in said.items() if each != label]
    parts = ["nothing helps here"] if label == ALLREDUCE.label else []
    parts.append(", ".join([f"a step takes {said.get(label, 'an unknown time')}", *others]))
    parts += [f"{each} could not be measured" for each in now.tried_s if each not in said]
    untried = [each for each in now.known if each not in now.tried_s]
    useless = [each for each in untried if _sends_as_much(now, each)]
    slower = [each for each in untried if each not in useless]
    if slower and len(said) > 1:
        parts.append(f"not tried, because their bytes alone would take longer: {', '.join(slower)}")
    if useless:
        parts.append(f"not tried, because they send no less of this model: {', '.join(useless)}")
    return "; ".join(parts)

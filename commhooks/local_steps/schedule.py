"""Decide when the ranks of a model exchange weights. Nothing here knows torch: an event of the
training and a state go in, the next state and one action come out.

A round has `sync_every` passes and P fragments. Fragment k is due after (k + 1) * sync_every / P
passes of the round; with a delay it is sent so many passes earlier, and applied when it is due.
What is due waits for the optimizers, and runs at the first of these events: every parameter has
been stepped since the pass; the next forward pass begins; the next backward pass ends (for models
whose own forward is not called); this rank has skipped the step, and a save or a load follows.

All ranks get the same events, except that the passes of one optimizer step (LBFGS calls its
closure several times) may differ in number, and that a rank may see what is due at another of the
events above. Neither changes the order of the actions that communicate."""

import enum
from dataclasses import dataclass, replace


class Phase(enum.Enum):
    """What a rank does at the moment."""

    AVERAGING = "gradients are averaged: the first start_iter passes"
    TRAINING = "each rank trains its own weights"
    DUE = "an exchange waits until the optimizers have stepped"
    EXCHANGING = "an exchange runs"
    ENDING = "an exchange runs that ends the round before its last pass"
    LOADED = "a state was loaded, and the weights of the model may be others than the loaded anchor"


class Action(enum.Enum):
    """What the driver must do. It reports the end of each action by the event that is named
    here."""

    NOTHING = "go on with the training"
    CALL_BACK = "call back at the end of this backward pass: `LateBackwardEnds`, then `PassCounts`"
    ASK = "ask all ranks whether their optimizers will step after this pass: `Answered`"
    LOOK = "find out whether another replica has done its round: `Looked`"
    BEGIN = "choose between the weights of the model and the loaded anchor: `Begun`"
    SEND = "begin the exchange of fragment `State.turn` behind the training: `Sent`"
    APPLY = "finish the exchange that was sent: `Applied`"
    EXCHANGE = "exchange fragment `State.turn` at once: `Exchanged`"
    EXCHANGE_ALL = "exchange all fragments at once: `Exchanged`"
    SHARE = "the round has ended: copy what is not trained from rank 0: `Shared`"


class Share(enum.IntEnum):
    """What has been copied from rank 0 since the latest pass; each includes the value before."""

    NOTHING = 0
    UNTRAINED = 1
    """Buffers and frozen parameters."""
    OPTIMIZERS = 2
    """Also the state of the optimizers and of the GradScaler."""


@dataclass(frozen=True)
class Rules:
    """Holds what does not change during a run.

    Attributes:
        start_iter: number of passes of the run, earlier processes included, in which gradients are
            averaged.
        asks: whether some ranks may skip a step (GradScaler). All ranks are then asked in each
            pass after which an exchange would be due, and the round goes on if one will skip.
        looks_every: after how many passes to look whether another replica has come to the point
            for which this one trains, at which a fragment is sent or applied; 0: never. It then is
            the point here, too. A replica that is nearly there goes on to it, so that replicas of
            equal speed do the same number of passes."""

    sync_every: int
    fragments: int = 1
    delay: int = 0
    start_iter: int = 0
    asks: bool = False
    looks_every: int = 0

    @property
    def distance(self) -> int:
        """Passes from one turn to the next."""
        return self.sync_every // self.fragments

    @property
    def shortest(self) -> int:
        """The fewest passes from one action of a turn to the next."""
        return min(self.delay, self.distance - self.delay) if self.delay else self.distance

    @property
    def at_once(self) -> bool:
        """Whether all weights are exchanged together, while the training waits."""
        return self.fragments == 1 and self.delay == 0


@dataclass(frozen=True)
class State:
    """Describes where a rank stands.

    Attributes:
        passes: backward passes that have begun in this process; those of one optimizer step count
            once.
        ended: those of them that have ended.
        number: number of the latest pass in the run, earlier processes included.
        in_round: passes of the running round; those of the replica that has done most, once it has
            ended a turn.
        trained: passes in which this rank has trained its own weights, since a state was loaded.
        turn: the fragment that is exchanged next.
        in_flight: whether that fragment has been sent.
        due_at: in the phase DUE, the value of `ended` since which every parameter must be stepped.
        apart: whether the ranks may have different weights.
        joined: whether the first round has begun; see `Partner.joined`.
        in_step: passes of the optimizer step that runs; None outside of a step with a closure.
        training: `Module.training` in the latest pass.
        unstepped: whether the latest exchange began before the optimizers of this rank had stepped
            since its latest pass, so that they may step after it.
        shared: what rank 0 has shared since the latest pass."""

    phase: Phase = Phase.TRAINING
    passes: int = 0
    ended: int = 0
    number: int = 0
    in_round: int = 0
    trained: int = 0
    turn: int = 0
    in_flight: bool = False
    due_at: int = 0
    apart: bool = False
    joined: bool = True
    in_step: int | None = None
    training: bool = True
    unstepped: bool = False
    shared: Share = Share.OPTIMIZERS

    @property
    def repeats(self) -> bool:
        """Whether the next pass belongs to an optimizer step that already had one."""
        return bool(self.in_step)

    @property
    def exchanging(self) -> bool:
        return self.phase in (Phase.EXCHANGING, Phase.ENDING)

    def has_trained(self, shared: Share) -> bool:
        """Return whether the ranks may differ in their weights, or in what is `shared`."""
        return self.apart or self.shared < shared


# ---- events
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    pass


@dataclass(frozen=True)
class PassBegins(Event):
    """A backward pass that is synchronised begins. `number`: in the run; `training`:
    `Module.training`."""

    number: int
    training: bool = True


@dataclass(frozen=True)
class PassEnds(Event):
    """The last gradient of the pass is there."""


@dataclass(frozen=True)
class LateBackwardEnds(Event):
    """After `Action.CALL_BACK`: the whole backward pass has ended."""


@dataclass(frozen=True)
class PassCounts(Event):
    """After `LateBackwardEnds` and its actions: now count the pass."""


@dataclass(frozen=True)
class Answered(Event):
    """`all_step`: the optimizers of all ranks will step after this pass."""

    all_step: bool


@dataclass(frozen=True)
class Looked(Event):
    """`over`: whether another replica has come to the point that this rank trains for: a fragment
    is sent, or applied there; the same on all ranks of the model."""

    over: bool


@dataclass(frozen=True)
class ForwardBegins(Event):
    """A forward pass that records gradients begins. `training`: `Module.training`."""

    training: bool = True


@dataclass(frozen=True)
class StepBegins(Event):
    """An optimizer of the model begins a step with a closure."""


@dataclass(frozen=True)
class StepEnds(Event):
    """An optimizer has stepped. `since`: every parameter of the model has been stepped when
    `State.ended` was `since` or more; -1: not every parameter has been stepped at all."""

    since: int


@dataclass(frozen=True)
class StepFails(Event):
    """The closure of a step has raised, which ends the step."""


@dataclass(frozen=True)
class BetweenSteps(Event):
    """All ranks are between the same two steps, before `EndRound` or what else communicates.
    `seen`: the steps of all parameters are seen, so what is due here waits for a step that this
    rank has skipped; a rank that has not skipped it runs the exchange already."""

    seen: bool


@dataclass(frozen=True)
class EndRound(Event):
    """All ranks are between the same two steps, and a save, `synchronize` or `leave` needs the
    round to end."""


@dataclass(frozen=True)
class Loaded(Event):
    """A state was loaded. What was in flight is dropped."""


@dataclass(frozen=True)
class Begun(Event):
    pass


@dataclass(frozen=True)
class Sent(Event):
    """The fragment is in flight. In answer to `APPLY`: the exchange before has ended, and another
    one is in flight. `fragment`: its number, if the partner has chosen it; None: `State.turn`. So
    in the next two events."""

    fragment: int | None = None


@dataclass(frozen=True)
class Applied(Event):
    fragment: int | None = None


@dataclass(frozen=True)
class Exchanged(Event):
    """In answer to `SEND`, too, if the partner has exchanged at once. `counts`: False if it had
    nothing to exchange, and the round goes on."""

    counts: bool = True
    fragment: int | None = None


@dataclass(frozen=True)
class Shared(Event):
    """Rank 0 has shared what is not trained, and with `optimizers` also the state of the
    optimizers. `unstepped`: `State.unstepped` is true on some rank."""

    optimizers: bool = False
    unstepped: bool = False


@dataclass(frozen=True)
class Failed(Event):
    """An action has ended in an exception. What was in flight is lost."""


# ---- decisions
# --------------------------------------------------------------------------------------------------

Next = tuple[State, Action]


def may_end_a_turn(rules: Rules, state: State) -> bool:
    """Return whether something may be sent or applied after the pass that comes next, or runs
    now."""
    return _ends_a_turn(rules, state) or _looks(rules, state)


def advance(rules: Rules, state: State, event: Event) -> Next:
    """Return the state after `event`, and what must be done now. Raises ValueError if a round is
    to end, or a state to be loaded, while an exchange runs."""
    if state.exchanging and isinstance(event, EndRound | Loaded):
        raise ValueError(f"{type(event).__name__} in the phase {state.phase.name}")
    match event:
        case PassBegins():
            return _pass_begins(rules, state, event)
        case PassEnds():
            return _pass_ends(rules, state)
        case PassCounts():
            return _count(rules, state)
        case Answered(all_step):
            counted = _with_pass(state)
            return (
                _due(counted) if all_step else replace(counted, phase=Phase.TRAINING)
            ), Action.NOTHING
        case Looked(over):
            return _end_turn_after_pass(rules, state) if over else _counted(state)
        case LateBackwardEnds():
            return _catch_up(rules, state)
        case ForwardBegins(training):
            return _forward_begins(rules, state, training)
        case StepBegins():
            return replace(state, in_step=0), Action.NOTHING
        case StepEnds(since):
            state = replace(state, in_step=None)
            waits = state.phase is not Phase.DUE or since < state.due_at
            return (state, Action.NOTHING) if waits else _exchange(rules, state)
        case StepFails():
            return replace(state, in_step=None), Action.NOTHING
        case BetweenSteps(seen):
            skipped = seen and state.phase is Phase.DUE and state.in_step is None
            return _exchange(rules, state) if skipped else (state, Action.NOTHING)
        case EndRound() if state.apart:
            ending = replace(state, phase=Phase.ENDING, unstepped=False)
            return ending, Action.APPLY if state.in_flight else Action.EXCHANGE_ALL
        case Loaded():
            state = replace(state, in_round=0, trained=0, turn=0, in_flight=False, apart=False)
            return replace(state, phase=Phase.LOADED, shared=Share.OPTIMIZERS), Action.NOTHING
        case Failed():
            return replace(state, phase=Phase.TRAINING, in_flight=False), Action.NOTHING
    return _action_ends(rules, state, event)


def _action_ends(rules: Rules, state: State, event: Event) -> Next:
    match event:
        case Begun():
            return replace(state, phase=_phase_of_pass(rules, state.number + 1)), Action.NOTHING
        case Sent(fragment):
            return _sent(rules, state, fragment)
        case Applied() if state.phase is Phase.ENDING:
            return replace(state, in_flight=False), Action.EXCHANGE_ALL
        case Applied(fragment):
            return _end_turn(rules, replace(_in_turn(rules, state, fragment), in_flight=False))
        case Exchanged(counts=False):
            return replace(state, phase=Phase.TRAINING, joined=True), Action.NOTHING
        case Exchanged() if state.phase is Phase.ENDING:
            return _end_round(state, apart=False)
        case Exchanged(fragment=fragment):
            state = replace(_in_turn(rules, state, fragment), in_flight=False, joined=True)
            return _end_turn(rules, state)
        case Shared(optimizers, unstepped):
            shared = max(state.shared, Share.OPTIMIZERS if optimizers else Share.UNTRAINED)
            phase = Phase.TRAINING if state.exchanging else state.phase
            apart = state.apart or unstepped
            return replace(state, shared=shared, phase=phase, apart=apart), Action.NOTHING
    return state, Action.NOTHING


# ---- passes
# --------------------------------------------------------------------------------------------------


def _phase_of_pass(rules: Rules, number: int) -> Phase:
    return Phase.AVERAGING if number <= rules.start_iter else Phase.TRAINING


def _pass_begins(rules: Rules, state: State, event: PassBegins) -> Next:
    if state.phase in (Phase.AVERAGING, Phase.TRAINING):
        state = replace(state, phase=_phase_of_pass(rules, event.number))
    if not state.repeats:
        state = replace(state, passes=state.passes + 1, shared=Share.NOTHING)
    return replace(state, number=event.number, training=event.training), Action.NOTHING


def _pass_ends(rules: Rules, state: State) -> Next:
    repeated = state.repeats
    # An optimizer may have changed the weights before it calls its closure (SAM).
    late = state.phase is Phase.LOADED or (_comes_late(rules, state) and state.in_step is None)
    state = replace(state, ended=state.ended + (not repeated))
    if state.in_step is not None:
        state = replace(state, in_step=state.in_step + 1)
    if late and not repeated:
        return state, Action.CALL_BACK
    return _count(rules, state, repeated=repeated)


def _count(rules: Rules, state: State, *, repeated: bool = False) -> Next:
    if state.number <= rules.start_iter:
        return state, Action.NOTHING
    state = replace(state, apart=True)
    if repeated:
        return state, Action.NOTHING
    if _ends_a_turn(rules, state):
        return _end_turn_after_pass(rules, state)
    return (state, Action.LOOK) if _looks(rules, state) else _counted(state)


def _counted(state: State) -> Next:
    return _with_pass(state), Action.NOTHING


def _with_pass(state: State) -> State:
    return replace(state, in_round=state.in_round + 1, trained=state.trained + 1)


def _end_turn_after_pass(rules: Rules, state: State) -> Next:
    if rules.asks:
        return state, Action.ASK
    return _due(_with_pass(state)), Action.NOTHING


def _ends_a_turn(rules: Rules, state: State) -> bool:
    return not state.joined or _is_due(rules, state, state.in_round + 1)


def _looks(rules: Rules, state: State) -> bool:
    """Return whether to look after the pass that comes next whether another replica is done."""
    done = state.in_round + 1
    nearly_done = _next_point(rules, state) - done <= max(2, rules.distance // 20)
    return rules.looks_every > 0 and done % rules.looks_every == 0 and not nearly_done


def _due(state: State) -> State:
    """Wait for a step of every parameter from now on; before the first round, since the pass that
    began to wait."""
    waits = state.phase is Phase.DUE and not state.joined
    return replace(state, phase=Phase.DUE, due_at=state.due_at if waits else state.ended)


# ---- what comes late
# -------------------------------------------------------------------------------------------------


def _comes_late(rules: Rules, state: State) -> bool:
    """Return whether what is due no longer waits for the optimizers. Before the first round it
    waits for `sync_every` passes, in which gradients may accumulate, or optimizers take turns."""
    return state.phase is Phase.DUE and (
        state.joined or state.ended - state.due_at >= rules.sync_every
    )


def _forward_begins(rules: Rules, state: State, training: bool) -> Next:
    # A forward pass in the other mode may run on one rank alone. A model may be trained in
    # evaluation mode.
    if training != state.training or state.repeats:
        return state, Action.NOTHING
    if state.phase is not Phase.LOADED and state.in_step is not None:
        return state, Action.NOTHING
    return _catch_up(rules, state)


def _catch_up(rules: Rules, state: State) -> Next:
    if state.phase is Phase.LOADED:
        return state, Action.BEGIN
    if not _comes_late(rules, state):
        return state, Action.NOTHING
    return _exchange(rules, state, unstepped=True)


# ---- an outer step
# --------------------------------------------------------------------------------------------------


def _is_due(rules: Rules, state: State, in_round: int) -> bool:
    return in_round >= _next_point(rules, state)


def _next_point(rules: Rules, state: State) -> int:
    """Return after how many passes of the round fragment `turn` is sent, or applied if it is in
    flight."""
    turn_ends = (state.turn + 1) * rules.distance
    return turn_ends if state.in_flight else turn_ends - rules.delay


def _in_turn(rules: Rules, state: State, fragment: int | None) -> State:
    """Return the state in the turn of a fragment, to which the partner may have gone on."""
    if fragment in (None, state.turn):
        return state
    return replace(state, turn=fragment, in_round=fragment * rules.distance, in_flight=False)


def _sent(rules: Rules, state: State, fragment: int | None) -> Next:
    if state.phase is Phase.ENDING:
        return replace(state, in_flight=True), Action.APPLY
    if state.in_flight:  # its turn has ended, and a later fragment is in flight
        state = replace(state, in_round=0, in_flight=False)
    state = _in_turn(rules, state, fragment)
    # Another replica may have come to this point first.
    in_round = max(state.in_round, _next_point(rules, state))
    return _go_on(rules, replace(state, in_round=in_round, in_flight=True, joined=True))


def _exchange(rules: Rules, state: State, *, unstepped: bool = False) -> Next:
    state = replace(state, phase=Phase.EXCHANGING, unstepped=unstepped)
    if not rules.delay:
        return state, Action.EXCHANGE
    return state, Action.APPLY if state.in_flight else Action.SEND


def _go_on(rules: Rules, state: State) -> Next:
    """Several turns may be due, if the steps of some ranks were skipped."""
    if _is_due(rules, state, state.in_round):
        return _exchange(rules, state, unstepped=state.unstepped)
    return replace(state, phase=Phase.TRAINING), Action.NOTHING


def _end_turn(rules: Rules, state: State) -> Next:
    if state.turn + 1 == rules.fragments:
        return _end_round(state, apart=not rules.at_once)
    in_round = max(state.in_round, (state.turn + 1) * rules.distance)
    return _go_on(rules, replace(state, turn=state.turn + 1, in_round=in_round))


def _end_round(state: State, *, apart: bool) -> Next:
    return replace(state, turn=0, in_round=0, apart=apart, joined=True), Action.SHARE

"""When the ranks exchange weights: each rule of docs/diloco.md as a row of events and actions, and
random trainings.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.local_steps.schedule import (
    Action,
    Answered,
    Applied,
    Begun,
    BetweenSteps,
    EndRound,
    Event,
    Exchanged,
    Failed,
    ForwardBegins,
    LateBackwardEnds,
    Loaded,
    Looked,
    PassBegins,
    PassCounts,
    PassEnds,
    Phase,
    Rules,
    Sent,
    Share,
    Shared,
    State,
    StepBegins,
    StepEnds,
    StepFails,
    advance,
    may_end_a_turn,
)

ANSWERS: dict[Action, Event] = {
    Action.BEGIN: Begun(),
    Action.SEND: Sent(),
    Action.APPLY: Applied(),
    Action.EXCHANGE: Exchanged(),
    Action.EXCHANGE_ALL: Exchanged(),
    Action.SHARE: Shared(),
}


class Rank:
    """Plays a training of a model with two parameters, as `driver.py` does. A word is an event:

    f, e    a forward pass in training mode, in evaluation mode
    b       a backward pass; `b?`: some rank will skip the step after it; `b+`: another replica has
            done its round
    s       a step of both parameters; `s0`, `s1`: of one of them. `s!`: what it leads to fails;
            `s~`: nobody exchanges; `s^`: the partner exchanges at once what it should send, or has
            sent again when it should apply; `s*`: another rank has exchanged before its step
    ( )     the begin and the end of a step with a closure
    x       the closure of the step that has begun raises
    now     all ranks are between two steps, and `end` or `load` may follow
    end     a save or `synchronize`; `end!`: it fails
    all     rank 0 shares the state of the optimizers
    load    a state is loaded
    """

    def __init__(self, rules: Rules, state: State) -> None:
        self.rules, self.state, self.number = rules, state, 0
        self.stepped_at = {"0": -1, "1": -1}
        self.log: list[Action] = []
        self.counted = 0

    def play(self, word: str) -> list[str]:
        """Play a word, and return the names of the actions to which it leads."""
        before, (kind, how) = (
            len(self.log),
            (word.rstrip("?!~+^*01"), word[len(word.rstrip("?!~+^*01")) :]),
        )
        in_round = self.state.in_round
        match kind:
            case "f" | "e":
                self.on(ForwardBegins(kind == "f"), how)
            case "b":
                self.number += 1
                self.on(PassBegins(self.number), how)
                self.on(PassEnds(), how)
                if self.log[before:] == [Action.CALL_BACK]:
                    self.on(LateBackwardEnds(), how)
                    in_round = self.state.in_round
                    self.on(PassCounts(), how)
                self.counted += self.state.in_round - in_round
            case "s":
                self.step_ends(how if how in ("0", "1") else "01", how)
            case "(":
                self.on(StepBegins(), how)
            case "x":
                self.on(StepFails(), how)
            case ")":
                self.step_ends("01", how)
            case "now":
                self.on(BetweenSteps(self.seen), how)
            case "end":
                self.on(EndRound(), how)
            case "all":
                self.on(Shared(optimizers=True), how)
            case "load":
                self.on(Loaded(), how)
        return [action.name for action in self.log[before:]]

    @property
    def seen(self) -> bool:
        return min(self.stepped_at.values()) >= 0

    def step_ends(self, which: str, how: str) -> None:
        self.stepped_at.update(dict.fromkeys(which, self.state.ended))
        self.on(StepEnds(min(self.stepped_at.values())), how)

    def on(self, event: Event, how: str) -> None:
        self.state, action = advance(self.rules, self.state, event)
        while action is not Action.NOTHING:
            self.log.append(action)
            if action is Action.CALL_BACK:
                return
            answer = ANSWERS.get(action, Answered(how != "?"))
            if action is Action.SHARE:
                answer = Shared(unstepped=self.state.unstepped or how == "*")
            if action is Action.LOOK:
                answer = Looked(how == "+")
            if how == "!":
                answer = Failed()
            if how == "~" and isinstance(answer, Exchanged | Sent):
                answer = Exchanged(counts=False)
            if how == "^":
                answer = Exchanged() if action is Action.SEND else Sent()
                how = ""
            self.state, action = advance(self.rules, self.state, answer)


H3 = Rules(sync_every=3)
PARTS = Rules(sync_every=4, fragments=2)
LATER = Rules(sync_every=3, delay=2)
STREAM = Rules(sync_every=4, fragments=2, delay=1)
FIRST = Rules(sync_every=8, looks_every=1)
FIRST_OF_RANKS = Rules(sync_every=8, looks_every=2)
FIRST_LATER = Rules(sync_every=10, delay=5, looks_every=1)
FIRST_ASKS = Rules(sync_every=8, asks=True, looks_every=1)
NEW = State(joined=False)

ROWS: dict[str, tuple[Rules, str, dict[str, Any]]] = {
    # ---- rounds ----
    "a round has sync_every passes, and ends after the steps": (
        H3,
        "f b s  f b s  f b s=EXCHANGE+SHARE  f b s  f b s  f b s=EXCHANGE+SHARE",
        {"in_round": 0, "apart": False, "phase": Phase.TRAINING},
    ),
    "with sync_every=1 every step ends a round": (
        Rules(1),
        "f b s=EXCHANGE+SHARE  f b s=EXCHANGE+SHARE",
        {},
    ),
    "what is due waits for a step of all parameters": (
        Rules(2),
        "f b s0 s1  f b s0 s1=EXCHANGE+SHARE  f b s1 s0  f b s1 s0=EXCHANGE+SHARE",
        {},
    ),
    "steps from before the last pass do not count": (
        Rules(2),
        "f b s  f b s0 s0",
        {"phase": Phase.DUE},
    ),
    "gradients are averaged before start_iter, and these passes do not count": (
        Rules(2, start_iter=2),
        "f b s  f b s  f b s  f b s=EXCHANGE+SHARE",
        {"passes": 4},
    ),
    "before start_iter the ranks have equal weights": (
        Rules(2, start_iter=2),
        "f b s  f b s  end",
        {"apart": False, "phase": Phase.AVERAGING},
    ),
    # ---- optimizers that are not seen ----
    "without steps the exchange comes with the next forward pass": (
        Rules(2),
        "f b  f b  f=EXCHANGE+SHARE b  f b  f=EXCHANGE+SHARE",
        {},
    ),
    "without forward passes it comes at the end of the next backward pass": (
        Rules(2),
        "b b b=CALL_BACK+EXCHANGE+SHARE b b=CALL_BACK+EXCHANGE+SHARE",
        {"in_round": 1},
    ),
    "optimizers that take turns come late": (Rules(2), "f b s0  f b s1  f=EXCHANGE+SHARE b s0", {}),
    "a forward pass in the other mode may run on one rank alone": (
        Rules(1),
        "f b e f=EXCHANGE+SHARE",
        {},
    ),
    "a model may be trained in evaluation mode": (
        Rules(1),
        "f b e f=EXCHANGE+SHARE",
        {"training": True},
    ),
    # ---- ranks of which one does something else ----
    "after a forward pass between the backward pass and the step the ranks differ": (
        Rules(2),
        "f b s  f b f=EXCHANGE+SHARE s",
        {"apart": True, "in_round": 0},
    ),
    "so the others know, and a save ends another round": (
        Rules(2),
        "f b s  f b s*=EXCHANGE+SHARE  now end=EXCHANGE_ALL+SHARE",
        {"apart": False},
    ),
    "after the next round they are equal": (
        Rules(2),
        "f b s  f b f=EXCHANGE+SHARE s  f b s  f b s=EXCHANGE+SHARE",
        {"apart": False},
    ),
    "also if a turn that was due came with it": (
        Rules(2, 2, asks=True),
        "f b?=ASK s f b=ASK f=EXCHANGE+EXCHANGE+SHARE",
        {"unstepped": True},
    ),
    "a rank that has skipped its step exchanges before a save": (
        Rules(2),
        "f b s  f b  now=EXCHANGE+SHARE end",
        {"apart": False, "in_round": 0},
    ),
    "and applies what is in flight": (
        LATER,
        "f b s=SEND  f b s  f b now=APPLY+SHARE",
        {"in_flight": False, "apart": True},
    ),
    "without a step that was seen nothing was skipped": (
        Rules(2),
        "f b  f b  now end=EXCHANGE_ALL+SHARE",
        {"apart": False},
    ),
    "a step that has raised was skipped": (
        Rules(2),
        "f b s  f b ( x f=EXCHANGE+SHARE b s  f b ( x now=EXCHANGE+SHARE",
        {"in_step": None, "in_round": 0},
    ),
    "and the passes after it are not its own": (
        Rules(4),
        "f b ( f b x  f b f b s=EXCHANGE+SHARE",
        {},
    ),
    "between the passes of a step nothing was skipped": (
        Rules(1),
        "f b s=EXCHANGE+SHARE ( f b now f b )=EXCHANGE+SHARE now",
        {},
    ),
    # ---- closures ----
    "the passes of one step with a closure count once": (
        Rules(2),
        "( f b f b f b )  ( f b f b )=EXCHANGE+SHARE  ( f b )",
        {"in_round": 1, "passes": 3, "number": 6},
    ),
    "nothing is exchanged inside of a step": (Rules(1), "( f b f b f b )=EXCHANGE+SHARE", {}),
    "a framework may run the only pass inside of the step": (
        Rules(2),
        "( f b ) ( f b )=EXCHANGE+SHARE",
        {},
    ),
    "an optimizer may have changed the weights before it calls its closure": (
        Rules(1),
        "f b ( f b )=EXCHANGE+SHARE",
        {},
    ),
    "two optimizers that take turns with closures wait for the first pass outside": (
        Rules(1),
        "( f b s0 ( f b s1 f=EXCHANGE+SHARE",
        {},
    ),
    # ---- fragments and delay ----
    "fragments take turns, and the last one ends the round": (
        PARTS,
        "f b s  f b s=EXCHANGE  f b s  f b s=EXCHANGE+SHARE  f b s  f b s=EXCHANGE",
        {"turn": 1, "in_round": 2},
    ),
    "with fragments the ranks never have equal weights between two rounds": (
        PARTS,
        "f b s  f b s=EXCHANGE  f b s  f b s=EXCHANGE+SHARE",
        {"apart": True, "in_round": 0},
    ),
    "with a delay the weights are sent before the end of the round, and applied at its end": (
        LATER,
        "f b s=SEND  f b s  f b s=APPLY+SHARE  f b s=SEND",
        {"in_flight": True, "in_round": 1, "apart": True},
    ),
    "fragments and a delay": (
        STREAM,
        "f b s=SEND  f b s=APPLY  f b s=SEND  f b s=APPLY+SHARE",
        {"turn": 0, "in_flight": False},
    ),
    # ---- early ends ----
    "a joint save ends the round": (
        H3,
        "f b s  end=EXCHANGE_ALL+SHARE  f b s  f b s  f b s=EXCHANGE+SHARE",
        {"in_round": 0, "apart": False},
    ),
    "a round without passes needs no end": (
        H3,
        "end  f b s  f b s  f b s=EXCHANGE+SHARE  end  end",
        {},
    ),
    "a joint save ends what is due": (
        Rules(2),
        "f b s  f b  end=EXCHANGE_ALL+SHARE  f b s",
        {"in_round": 1},
    ),
    "a joint save applies what is in flight, and then exchanges all": (
        STREAM,
        "f b s=SEND  end=APPLY+EXCHANGE_ALL+SHARE  f b s=SEND",
        {"turn": 0, "in_round": 1},
    ),
    "after an early end the first fragment comes first": (
        PARTS,
        "f b s  f b s=EXCHANGE  f b s  end=EXCHANGE_ALL+SHARE  f b s  f b s=EXCHANGE",
        {"turn": 1},
    ),
    "an early end gives equal weights with fragments, too": (
        PARTS,
        "f b s  end=EXCHANGE_ALL+SHARE",
        {"apart": False},
    ),
    "a step with a closure ends before the early end": (
        Rules(3),
        "( f b f b )  end=EXCHANGE_ALL+SHARE",
        {"in_round": 0},
    ),
    # ---- loads ----
    "after a load the weights are chosen at the next forward pass": (
        H3,
        "load f=BEGIN b s",
        {"in_round": 1},
    ),
    "or at the end of the next backward pass": (H3, "load b=CALL_BACK+BEGIN s", {"in_round": 1}),
    "or in a step with a closure before its first pass": (
        H3,
        "load ( f=BEGIN b f b )",
        {"in_round": 1},
    ),
    "or at the end of the first pass of a step": (
        H3,
        "load ( b=CALL_BACK+BEGIN b )",
        {"in_round": 1},
    ),
    "a forward pass in the other mode does not choose": (H3, "f b s load e f=BEGIN", {}),
    "a load begins a round, and drops what is due": (
        Rules(2),
        "f b s f b load s f=BEGIN b s",
        {"in_round": 1},
    ),
    "a load drops what is in flight": (
        LATER,
        "f b s=SEND  load f=BEGIN  b s=SEND  f b s  f b s=APPLY+SHARE",
        {},
    ),
    "a load in the averaged passes": (
        Rules(2, start_iter=3),
        "f b s load f=BEGIN b s",
        {"phase": Phase.AVERAGING},
    ),
    "a load before any pass": (Rules(2), "load f=BEGIN", {"phase": Phase.TRAINING}),
    "a load before any pass, which will average": (
        Rules(2, start_iter=1),
        "load f=BEGIN",
        {"phase": Phase.AVERAGING},
    ),
    "a load after the last averaged pass": (
        Rules(2, start_iter=1),
        "f b s load f=BEGIN",
        {"phase": Phase.TRAINING},
    ),
    "a load before the last averaged pass": (
        Rules(2, start_iter=2),
        "f b s load f=BEGIN",
        {"phase": Phase.AVERAGING},
    ),
    "after a load nothing is to be shared": (
        H3,
        "f b s load end",
        {"shared": Share.OPTIMIZERS, "apart": False},
    ),
    # ---- steps that some rank skips ----
    "with a scaler all ranks are asked before an exchange": (
        Rules(2, asks=True),
        "f b s  f b=ASK s=EXCHANGE+SHARE",
        {},
    ),
    "the round goes on while some rank skips": (
        Rules(2, asks=True),
        "f b s  f b?=ASK  f b?=ASK s  f b=ASK s=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "several turns that are due come together": (
        Rules(4, 4, asks=True),
        "f b?=ASK f b?=ASK f b=ASK s=EXCHANGE+EXCHANGE+EXCHANGE",
        {"turn": 3, "in_round": 3},
    ),
    "a fragment that could not be sent in time is sent and applied together": (
        Rules(4, 2, 1, asks=True),
        "f b?=ASK s f b=ASK s=SEND+APPLY",
        {"turn": 1},
    ),
    # ---- the first step of a machine ----
    # ---- a round ends with the first machine that is done ----
    "nobody is done": (FIRST, "f b=LOOK s f b=LOOK s", {"in_round": 2}),
    "another machine is done: the round ends after this step": (
        FIRST,
        "f b=LOOK s f b+=LOOK s=EXCHANGE+SHARE f b=LOOK",
        {"in_round": 1, "apart": True},
    ),
    "a machine that is nearly done finishes its round": (
        FIRST,
        "b=LOOK s b=LOOK s b=LOOK s b=LOOK s b=LOOK s b+ s b+ s b s=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "the ranks of a machine look now and then": (
        FIRST_OF_RANKS,
        "b+ s b+=LOOK s=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "a step that is skipped does not end the round, the next one does": (
        FIRST_ASKS,
        "f b+=LOOK+ASK s=EXCHANGE+SHARE f b=LOOK s",
        {"in_round": 1},
    ),
    "the round ends when all parameters have been stepped": (
        FIRST,
        "f b+=LOOK s0 s1=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "or with the next pass": (FIRST, "f b+=LOOK f=EXCHANGE+SHARE b=LOOK", {"in_round": 1}),
    "passes of one step look once": (
        FIRST,
        "( f b+=LOOK f b f b )=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "a machine that has not met the others does not look": (
        FIRST,
        "NEW f b+ s=EXCHANGE+SHARE",
        {"joined": True},
    ),
    # ---- machines ----
    "a machine meets the others after its first step": (
        H3,
        "NEW f b s=EXCHANGE+SHARE",
        {"joined": True, "in_round": 0},
    ),
    "it waits for the first step of all its optimizers": (
        H3,
        "NEW f b f b s0 f b s1=EXCHANGE+SHARE",
        {"joined": True},
    ),
    "but not longer than a round": (H3, "NEW f b f b f b f b f=EXCHANGE+SHARE", {"joined": True}),
    "machines that have only begun go on with the round": (
        H3,
        "NEW f b s~=EXCHANGE  f b s  f b s=EXCHANGE+SHARE",
        {"joined": True, "in_round": 0},
    ),
    "a machine of which a rank skips its first step does not meet": (
        Rules(3, asks=True),
        "NEW f b?=ASK s0 f b=ASK s=EXCHANGE+SHARE",
        {},
    ),
    "after a skipped step all optimizers must step anew": (
        Rules(4, asks=True),
        "NEW f b=ASK s0 f b?=ASK f b=ASK s1 s0=EXCHANGE+SHARE",
        {},
    ),
    "a machine leaves before the end of its round": (H3, "f b s  end=EXCHANGE_ALL+SHARE", {}),
    # ---- machines, and exchanges behind the training ----
    "another machine has sent: so does this one": (
        FIRST_LATER,
        "f b+=LOOK s=SEND",
        {"in_round": 5, "in_flight": True, "trained": 1},
    ),
    "another machine has applied: so does this one": (
        FIRST_LATER,
        "f b+=LOOK s=SEND  f b+=LOOK s=APPLY+SHARE",
        {"in_round": 0, "in_flight": False, "trained": 2},
    ),
    "a machine that has nearly come to the point goes on to it": (
        FIRST_LATER,
        "b+=LOOK s=SEND  b=LOOK s b=LOOK s b+ s b+ s b s=APPLY+SHARE",
        {"trained": 6},
    ),
    "what should be sent is exchanged at once, and a round begins": (
        LATER,
        "f b s^=SEND+SHARE  f b s=SEND",
        {"in_round": 1, "in_flight": True},
    ),
    "a machine that comes goes on from where the others have sent": (
        FIRST_LATER,
        "NEW f b s=SEND",
        {"joined": True, "in_round": 5, "in_flight": True},
    ),
    "machines that have only begun send later": (
        Rules(4, delay=2),
        "NEW f b s~=SEND  f b s=SEND",
        {"joined": True, "in_round": 2},
    ),
    "a machine that is late goes on from where the others have sent again": (
        Rules(4, delay=2),
        "f b s  f b s=SEND  f b s  f b s^=APPLY  f b s  f b s=APPLY+SHARE",
        {"in_round": 0, "in_flight": False},
    ),
    "and applies that before it leaves": (
        Rules(4, delay=2),
        "f b s  f b s=SEND  end^=APPLY+APPLY+EXCHANGE_ALL+SHARE",
        {"in_round": 0, "in_flight": False},
    ),
    # ---- failures ----
    "after an exchange that has failed the training goes on, and the next pass tries again": (
        Rules(2),
        "f b s  f b s!=EXCHANGE  f b s=EXCHANGE+SHARE",
        {"in_round": 0},
    ),
    "a fragment that was lost in flight is sent again": (
        LATER,
        "f b s=SEND  f b s  f b s!=APPLY  f b s=SEND+APPLY+SHARE",
        {},
    ),
    "a save that has failed leaves the round as it is": (
        H3,
        "f b s end!=EXCHANGE_ALL f b s",
        {"in_round": 2},
    ),
}


@pytest.mark.parametrize("rule", ROWS)
def test_events_lead_to_the_expected_actions(rule: str) -> None:
    rules, script, expected = ROWS[rule]
    words = script.split()
    rank = Rank(rules, NEW if words[0] == "NEW" else State())
    for place, word in enumerate(words[words[0] == "NEW" :]):
        event, _, actions = word.partition("=")
        assert "+".join(rank.play(event)) == actions, f"word {place}, {word}: {rank.state}"
    assert {name: getattr(rank.state, name) for name in expected} == expected


def test_what_rank_0_has_shared_since_the_latest_pass() -> None:
    rank = Rank(Rules(2), State())
    for word, trained, optimizers_trained in [
        ("b", True, True),
        ("s", True, True),
        ("b", True, True),
        ("s", False, True),  # the round has ended
        ("all", False, False),
        ("end", False, False),
        ("b", True, True),
        ("end", False, True),
    ]:
        rank.play(word)
        assert rank.state.has_trained(Share.UNTRAINED) is trained
        assert rank.state.has_trained(Share.OPTIMIZERS) is optimizers_trained
    averaging = Rank(Rules(2, start_iter=1), State())
    averaging.play("b")
    assert averaging.state.has_trained(Share.UNTRAINED)  # buffers differ, though the weights do not


@pytest.mark.parametrize("event", [EndRound(), Loaded()])
@pytest.mark.parametrize("phase", [Phase.EXCHANGING, Phase.ENDING])
def test_no_round_ends_in_mid_exchange(event: Event, phase: Phase) -> None:
    with pytest.raises(ValueError, match=phase.name):
        advance(H3, State(phase=phase, apart=True), event)


def test_a_forward_pass_of_another_thread_does_not_disturb_an_exchange() -> None:
    exchanging = State(phase=Phase.EXCHANGING, in_round=3, apart=True)
    assert advance(H3, exchanging, ForwardBegins()) == (exchanging, Action.NOTHING)


@pytest.mark.parametrize(("in_round", "expected"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_pass_that_ends_a_turn(in_round: int, expected: bool) -> None:
    assert may_end_a_turn(H3, State(in_round=in_round)) is expected
    assert may_end_a_turn(H3, State(in_round=in_round, joined=False))


# ---- random trainings
# ------------------------------------------------------------------------------------------------

TRAININGS = st.builds(
    lambda distance, fragments, delay, start, asks, looks: Rules(
        distance * fragments, fragments, min(delay, distance - 1), start, asks, looks
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.booleans(),
    st.just(0),
)
STEPS = [
    "f b s",
    "f b s0 s1",
    "f b s0",
    "f b",
    "b",
    "b s",
    "( f b f b )",
    "( b )",
    "f b?",
    "e f b s",
    "( f b ) s0",
]
STOPS = ["end", "all", "load", "end all", "end!", "f b s!", "end load"]


@given(TRAININGS, st.lists(st.sampled_from(STEPS * 3 + STOPS), max_size=40), st.booleans())
@settings(deadline=None, max_examples=300)
def test_random_trainings(rules: Rules, words: list[str], met: bool) -> None:
    """Never two exchanges in flight, never a save in mid-exchange, every pass counted once,
    fragments in turn.
    """
    rank = Rank(rules, State(joined=met))
    for words_of_step in words:
        for word in words_of_step.split():
            before, repeats, averages = (
                rank.state,
                rank.state.repeats,
                rank.number < rules.start_iter,
            )
            counted, log = rank.counted, len(rank.log)
            rank.play(word)
            after = rank.state
            _check_exchanges(rules, before, rank.log[log:], failed="!" in word)
            assert not after.exchanging, "an exchange ends with the event that began it"
            counts = word[0] == "b" and not repeats and not averages
            assert rank.counted - counted == counts
            if word == "end":
                assert not (after.apart or after.in_flight or after.in_round)
            if rules.at_once or word in ("end", "load"):
                assert after.apart or after.in_round == 0
            assert 0 <= after.turn < rules.fragments
            assert after.passes == before.passes + (word[0] == "b" and not repeats)


def _check_exchanges(
    rules: Rules, before: State, actions: Iterable[Action], *, failed: bool
) -> None:
    in_flight = before.in_flight
    turn = before.turn
    for action in actions:
        match action:
            case Action.SEND:
                assert not in_flight and rules.delay
                in_flight = not failed
            case Action.APPLY:
                assert in_flight
                in_flight, turn = False, turn + 1
            case Action.EXCHANGE:
                assert not rules.delay
                turn += 1
            case Action.EXCHANGE_ALL:
                assert not in_flight
                turn = rules.fragments
            case Action.SHARE:
                assert turn == rules.fragments
    assert turn <= rules.fragments


SEEN_OR_NOT = ["f b s", "f b s0 s1", "f b s0", "f b"]
CLOSURES = ["( f b )", "( f b f b )", "( b )", "( b b b )"]


@given(
    TRAININGS,
    st.sampled_from([SEEN_OR_NOT, CLOSURES]).flatmap(
        lambda words: st.lists(
            st.tuples(st.sampled_from(words), st.sampled_from(words)), max_size=30
        )
    ),
    st.lists(st.sampled_from(["", "", "", "end", "load"]), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=300)
def test_ranks_start_the_same_collectives_whatever_their_optimizers_do(
    rules: Rules, steps: list[tuple[str, str]], stops: list[str]
) -> None:
    """Two ranks make the same passes. Their optimizers step at other times, or repeat passes more
    or less often.
    """
    rules = dataclasses.replace(rules, start_iter=0)
    ranks = Rank(rules, State()), Rank(rules, State())
    for scripts, stop in zip(steps, stops, strict=False):
        for rank, script in zip(ranks, scripts, strict=True):
            for word in script.split():
                rank.play(word)
        # A rank that has never stepped would come late to the others, which wait for it in the
        # exchange.
        if stop and all(rank.seen or rank.state.phase is not Phase.DUE for rank in ranks):
            for rank in ranks:
                rank.play("now")
                rank.play(stop)
    for rank in ranks:
        rank.play("f")  # what waits for a step comes late on one of them
    first, second = (
        [action for action in rank.log if action is not Action.CALL_BACK] for rank in ranks
    )
    assert first == second

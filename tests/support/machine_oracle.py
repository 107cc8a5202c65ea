"""Machines that come and go, played in the process of the test: what their weights must be."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import commhooks
from commhooks.engine.state import LearnedState
from commhooks.local_steps.compressor import DiLoCoCompressor
from commhooks.local_steps.flat_weights import divided
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM
from tests.support.machines import Machine
from tests.support.member_job import hash_of, new_model, new_optimizer, shard_of, train_step
from tests.support.simulation import SimulatedRanks

EVERY = 2
_ENOUGH = 21  # comparisons of a machine's weights after an outer step


def train_on(machine: Machine, rounds: int, *others: Machine) -> None:
    """Wait until the machine has taken `rounds` more outer steps than it and `others` have now, and
    all of them together enough for `compare_with_oracle`, however fast they have started.
    """
    machines = (machine, *others)
    machine.round(rounds + max(step for each in machines for step in (0, *each.rounds)))
    while sum(bool(line["part"]) for each in machines for line in each.rounds.values()) < _ENOUGH:
        machine.round(max(machine.rounds) + 1)


def assert_equal_weights(*machines: Machine, of: Sequence[str] = ("weights", "seen")) -> None:
    """All machines have the same weights, or what else `of` names, after each outer step that they
    have taken together, rank by rank.
    """
    compared = 0
    for rank in machines[0].ranks:
        rounds = [each.rounds_of(rank) for each in machines]
        for step in set().union(*rounds):
            there = [each[step] for each in rounds if step in each]
            together = [line for line in there if line["names"] == there[0]["names"]]
            assert len({tuple(line[key] for key in of) for line in there}) == 1, there
            compared += len(together) > 1
    assert compared > 2


class _Simulated:
    """A machine in the process of the test. `source`: the machine whose state it takes, with an
    earlier state `moments` of its optimizer.

    Attributes:
        count: its steps so far.
        sent: those of them that are in outer steps, of each fragment.
    """

    def __init__(
        self,
        oracle: "_Oracle",
        name: str,
        source: "_Simulated | None" = None,
        moments: Any = None,
        count: int = 0,
    ) -> None:
        self.name = name
        self.count = count
        self.sent = [count] * oracle.fragments
        self.model = oracle.new_model()
        self.optimizer = new_optimizer(self.model)
        self._ranks = range(oracle.world)
        self.states = []
        for shard in range(oracle.shards):
            state = LearnedState.of(oracle.new_compressor().state_fields)
            parts = self.shard(oracle, shard)
            if source is None:
                state[ANCHOR.key].update(
                    {n: p.detach().flatten().clone() for n, p in parts.items()}
                )
            else:
                for key in (ANCHOR.key, MOMENTUM.key):
                    state[key].update({n: x.clone() for n, x in source.states[shard][key].items()})
                with torch.no_grad():
                    for n, part in parts.items():
                        part.copy_(state[ANCHOR.key][n].view_as(part))
            self.states.append(state)
        if source is not None:
            self.optimizer.load_state_dict(
                copy.deepcopy(source.optimizer.state_dict() if moments is None else moments)
            )

    def shard(self, oracle: "_Oracle", shard: int) -> dict[str, torch.Tensor]:
        return shard_of(dict(self.model.named_parameters()), shard, oracle.shards)

    def train_until(self, count: int) -> None:
        while self.count < count:
            train_step(self.model, self.optimizer, self.name, self.count, self._ranks)
            self.count += 1


class _Oracle:
    """Machines in the process of the test, with rounds of at most `every` steps."""

    def __init__(
        self,
        first: str,
        wire: str,
        options: Any = None,
        world: int = 1,
        shards: int = 1,
        every: int = EVERY,
        **model: int,
    ) -> None:
        config = commhooks.DiLoCo(sync_every=every, wire=wire, **options or {})
        self.new_compressor: Callable[[], Any] = lambda: DiLoCoCompressor(config)
        self.new_model = functools.partial(new_model, 0, **model)
        self.world, self.shards, self.every = world, shards, every
        self.fragments = config.fragments
        sizes = {name: part.numel() for name, part in self.new_model().named_parameters()}
        self._names = divided(sizes, config.fragments)
        self.machines = {name: _Simulated(self, name) for name in first}
        # the state of each optimizer after each outer step
        self._moments: dict[tuple[str, int], Any] = {}

    def outer_step(
        self,
        step: int,
        names: list[str],
        sent: dict[str, int],
        counts: dict[str, int],
        took: dict[str, tuple[str, int]],
        whole: bool,
        kept: set[str],
    ) -> None:
        """Train, average, and train on while that is in flight. `sent`: the steps of machines when
        they send their weights; `counts`: when they apply the mean. One that has made fewer steps
        counts less. A machine that is new has none, the weights from before, and the state of the
        optimizer that it `took`: of which machine, after which outer step. A machine that has made
        none, and is not new, was not sure whether the outer step before was taken. `whole`: of all
        fragments; otherwise they take turns. `kept`: the machines that have trained on meanwhile.
        """
        turn = (step - 1) % self.fragments
        turns = range(self.fragments) if whole else [turn]
        exchanged = [name for turn in turns for name in self._names[turn]]
        source = self.machines[min(self.machines)]
        new = {
            name: _Simulated(
                self, name, source, self._moments.get(took.get(name, ("", 0))), sent.get(name, 1)
            )
            for name in names
            if name not in self.machines
        }
        self.machines = {
            name: machine for name, machine in (self.machines | new).items() if name in names
        }
        steps = {}
        for name, machine in self.machines.items():
            machine.train_until(sent.get(name, machine.count + self.every))
            steps[name] = machine.count - machine.sent[turn]
            for place in turns:
                machine.sent[place] = machine.count
        means = [
            self._average([self.machines[name] for name in names], shard, steps, exchanged)
            for shard in range(self.shards)
        ]
        for place, name in enumerate(names):
            machine = self.machines[name]
            then = [_of(machine.shard(self, shard), exchanged) for shard in range(self.shards)]
            then = [{n: part.detach().clone() for n, part in parts.items()} for parts in then]
            machine.train_until(counts.get(name, 0))
            for shard, flats in enumerate(means):
                parts = _of(machine.shard(self, shard), exchanged)
                _apply(parts, flats[place], then[shard] if name in kept else None)
            self._moments[name, step] = copy.deepcopy(machine.optimizer.state_dict())

    @torch.no_grad()
    def _average(
        self, machines: list[_Simulated], shard: int, steps: dict[str, int], names: list[str]
    ) -> list[torch.Tensor]:
        """Return the new anchor of each machine, which all have the same bits."""
        parts = [_of(machine.shard(self, shard), names) for machine in machines]
        ranks = SimulatedRanks(self.new_compressor, len(machines), parts[0])
        ranks.states = [machine.states[shard] for machine in machines]
        for work, machine in zip(ranks._works, machines, strict=True):
            work.weight = len(machines) * steps[machine.name] / sum(steps.values())
        flats = [
            torch.cat([part.flatten() for part in of_machine.values()]) for of_machine in parts
        ]
        assert ranks.step(flats)
        return flats


@torch.no_grad()
def _apply(
    parts: dict[str, torch.Tensor], flat: torch.Tensor, then: dict[str, torch.Tensor] | None
) -> None:
    """Set the weights to the new anchor, and add what has changed since `then`."""
    anchors = flat.split([part.numel() for part in parts.values()])
    for (name, part), anchor in zip(parts.items(), anchors, strict=True):
        new = anchor.view_as(part)
        part.copy_(new if then is None else (new - then[name]) + part)


def _of(parts: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Return these parts, the last one first, as they are sent."""
    return {name: part for name, part in reversed(list(parts.items())) if name in names}


def _known(counts: dict[str, int | None]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count is not None}


def compare_with_oracle(
    machines: list[Machine], wire: str, first: str = "a", enough: int = _ENOUGH, **given: Any
) -> None:
    """Play the rounds of all machines in one process, and compare the weights after each outer
    step, bit by bit. `first`: the names of the machines that begin together.
    """
    oracle, compared = _Oracle(first, wire, **given), 0
    for step in sorted({step for machine in machines for step in machine.rounds}):
        lines = {
            machine.name: machine.rounds[step] for machine in machines if step in machine.rounds
        }
        if not any(line["part"] for line in lines.values()):
            continue  # the beginning of the first machine
        names = next(line["part"] for line in lines.values() if line["count"] > 1)
        # a machine that has died while the exchange was in flight has told only when it began
        sent = _known({machine.name: machine.sent_in(step) for machine in machines})
        counts = _known({machine.name: machine.count_in(step) for machine in machines})
        took = {machine.name: machine.took_before(step) for machine in machines}
        whole = any(line["whole"] for line in lines.values())
        kept = {machine.name for machine in machines if machine.kept_in(step)}
        oracle.outer_step(step, names, sent, counts, took, whole, kept)
        for machine in machines:
            # A machine that has just come has the weights of the others.
            same = oracle.machines.get(machine.name) or next(iter(oracle.machines.values()))
            if machine.name in lines:
                assert same.count == counts[machine.name] or machine.name not in oracle.machines
            for rank in machine.ranks:
                if step in (rounds := machine.rounds_of(rank)):
                    own = same.shard(oracle, rank % oracle.shards).values()
                    assert rounds[step]["weights"] == hash_of(own), (step, machine.name, rank)
                    compared += 1
    assert compared >= enough

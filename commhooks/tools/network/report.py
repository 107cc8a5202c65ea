"""What `commhooks network` has found, as text and as plain types."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from commhooks.plan import new_table, text_of
from commhooks.tools.network.interfaces import Interface
from commhooks.tools.network.link import Link, Pair, bandwidth
from commhooks.tools.network.predicted import Exchange

SMALL = 0.15
"""The exchange is small if it takes at most this share of the time that a step computes. No hook that loses more is
advised then: it could make the step 13 % shorter at most."""
SLOW = 0.5
"""Of the median: a connection below it is named."""
UNUSED = 0.25
"""Of what an interface is made for: less is remarked on."""
LEGEND = (
    "Predicted from all ranks together, as if nothing overlapped with the backward pass and the codec took no time; * "
    "with ranks_per_node. `commhooks doctor` measures a step of your own model."
)


@dataclass(frozen=True)
class NetworkReport:
    """The same on every rank.

    Attributes:
        machines: their names and ranks.
        interfaces: of each machine, by its name.
        backend: of the process group.
        pairs: single connections.
        link: all ranks together.
        exchanges: by size of the model, as the user wrote it; what a step spends with each hook.
        step_ms: a step without a network, if it is known.
        took_s: seconds that measuring took.
    """

    machines: dict[str, list[int]]
    interfaces: dict[str, Interface]
    backend: str
    pairs: list[Pair]
    link: Link
    exchanges: dict[str, list[Exchange]]
    step_ms: float | None
    took_s: float

    @property
    def _ranks(self) -> int:
        return sum(map(len, self.machines.values()))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"advice": self.advice()}

    def __str__(self) -> str:
        return text_of(*self._machines(), self._pairs(), self._together(), self._exchanges(), LEGEND, *self.advice())

    # ---- advice ------------------------------------------------------------------------------------------------------

    def advice(self) -> list[str]:
        hooks = [self._hook(size, exchanges) for size, exchanges in self.exchanges.items()]
        return [*self._slow_connections(), *self._slow_interfaces(), *hooks]

    def _kinds(self) -> dict[str, list[Pair]]:
        """The pairs between machines and those inside one."""
        machine = {rank: name for name, ranks in self.machines.items() for rank in ranks}
        between = [pair for pair in self.pairs if machine[pair.ranks[0]] != machine[pair.ranks[1]]]
        return {"between machines": between, "inside a machine": [pair for pair in self.pairs if pair not in between]}

    def _slow_connections(self) -> list[str]:
        found = []
        for where, pairs in self._kinds().items():
            usual = statistics.median(pair.mbit_per_s for pair in pairs) if pairs else 0.0
            slow = [pair for pair in pairs if pair.mbit_per_s < SLOW * usual]
            if slow:
                worst = min(slow, key=lambda pair: pair.mbit_per_s)
                found.append(
                    f"Ranks {worst.ranks[0]} and {worst.ranks[1]} reach {bandwidth(worst.mbit_per_s)} where "
                    f"{bandwidth(usual)} is usual {where}: every all-reduce waits for the slowest connection. Look at "
                    "this one first."
                )
        return found

    def _slow_interfaces(self) -> list[str]:
        reached = self.link.mbit_per_s
        slow = {
            name: each
            for name, each in self.interfaces.items()
            if each.rated_mbit_per_s and reached < UNUSED * each.rated_mbit_per_s
        }
        if len(self.machines) == 1 or not slow:
            return []
        name, each = next(iter(slow.items()))
        others = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        return [
            f"{name}{others} sends over {each.words}, but reaches {bandwidth(reached)}. Is it the right one? "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another (gloo takes no exclusion such as ^lo). If it is, "
            "look at what else uses the network."
        ]

    def _hook(self, size: str, exchanges: list[Exchange]) -> str:
        """The least lossy hook with which the exchange of a model of this size is small."""
        plain = exchanges[0]
        spends = f"{size} parameters: with plain DDP a step spends {_duration(plain.seconds)} on the network"
        if self.step_ms is None:
            return (
                f"{spends}. If it computes for {_duration(plain.seconds / SMALL)} or more, nothing is needed. Else "
                'begin with hook="auto", which measures and chooses; diloco sends the least.'
            )
        computing, limit = f"beside {self.step_ms:g} ms of computing", SMALL * self.step_ms / 1e3
        if plain.seconds <= limit:
            return f"{spends}, {computing}: nothing needed."
        small = [each for each in exchanges if each.seconds <= limit]
        best = small[0] if small else min(exchanges, key=lambda each: each.seconds)
        options = f", hook_options={dict(best.candidate.options)!r}" if best.candidate.options else ""
        nodes = ', ranks_per_node="auto"' if best.between_nodes else ""
        return (
            f'{spends}. With hook="{best.candidate.hook}"{options}{nodes} it would be {_duration(best.seconds)}: '
            f"{'small' if small else 'the least of all, but not small'} {computing}. Compare the last loss with plain "
            "DDP's."
        )

    # ---- text --------------------------------------------------------------------------------------------------------

    def _machines(self) -> list[str]:
        return [
            f"{self._ranks} ranks, {self.backend}, measured in {self.took_s:.0f} s",
            *(
                f"  {name}: ranks {', '.join(map(str, ranks))}; {self.interfaces[name].words}"
                for name, ranks in self.machines.items()
            ),
        ]

    def _pairs(self) -> Any:
        table = new_table("Connections")
        for column in ("ranks", "Mbit/s", "latency, ms"):
            table.add_column(column, justify="right")
        for pair in self.pairs:
            table.add_row(f"{pair.ranks[0]} - {pair.ranks[1]}", f"{pair.mbit_per_s:,.0f}", f"{pair.latency_ms:.3g}")
        return table

    def _together(self) -> str:
        return (
            f"All ranks together: {bandwidth(self.link.mbit_per_s)} for each in an all-reduce of one large buffer, "
            f"{self.link.latency_ms:.3g} ms for one number."
        )

    def _exchanges(self) -> Any:
        table = new_table("Seconds per step, by size")
        table.add_column("hook")
        for size in self.exchanges:
            table.add_column(size, justify="right")
        for row in zip(*self.exchanges.values(), strict=True):
            cells = [f"{each.seconds:.3g}{' *' if each.between_nodes else ''}" for each in row]
            table.add_row(row[0].candidate.label, *cells)
        return table


def _duration(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded >= 1 else f"{1e3 * rounded:g} ms"

"""The ranks of this machine, which act as one, and the connections of a rank with the same ranks of
other machines.
"""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_rows, gather_texts
from commhooks.comm.groups import adopt
from commhooks.members.client import NETWORK_ERRORS, Client, listens
from commhooks.members.report import Report

_WHAT = "the list of machines"
_CONNECT_LIMIT_S = 10.0
"""How long gloo or NCCL may take to connect. Before that all machines have said that they are
there.
"""
_LEAST_LIMIT_S = 0.1
_POLL_S = 0.05
_PROBE_EVERY_S = 2.0


class RanksOfMachine:
    """The ranks of this machine. All of them must call each method together.

    Args:
        local: the ranks of this machine that have the same weights, or the same shard of them. Rank
            0 of them connects to other machines.
        shards: the ranks of this machine that hold the shards of the model; None: it is not
            sharded.
        device: of this rank's model.

    Attributes:
        exchanges: whether this rank connects to other machines.
        is_first: whether this rank talks to the lighthouse, and logs.
        shard: the number of this rank's shard.
        alone: whether it is the only rank of the machine.
    """

    def __init__(
        self, local: dist.ProcessGroup, shards: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.exchanges = local.rank() == 0
        self.shard = 0 if shards is None else shards.rank()
        self.is_first = self.exchanges and self.shard == 0
        self._device, self._shards = device, shards
        # A collective over each of these groups in turn reaches all ranks of the machine.
        self._groups = [local] if shards is None else [shards, local]
        self.alone = all(group.size() == 1 for group in self._groups)

    def all_agree(self, good: bool) -> bool:
        """Return whether `good` is true on all ranks of this machine."""
        for group in self._groups:
            own = torch.tensor([good], dtype=torch.int32, device=self._device)
            good = bool(
                gather_rows(
                    own, group, None, "whether all ranks of the machine have exchanged"
                ).all()
            )
        return good

    def first_text(self, text: str) -> str:
        """Return the first of the texts of all ranks of this machine that is not empty."""
        for group in self._groups:
            text = next(filter(None, gather_texts(text, group, self._device, _WHAT)), "")
        return text

    def of_shards(self, text: str) -> tuple[str, ...]:
        """Return the text of each shard."""
        return (
            (text,)
            if self._shards is None
            else tuple(gather_texts(text, self._shards, self._device, _WHAT))
        )

    def key_of_shards(self, own: int) -> int:
        """Combine a number below 2**62 of each shard into one, equal on all ranks of this
        machine.
        """
        if self._shards is None:
            return own
        keys = gather_rows(torch.tensor([own], device=self._device), self._shards, None, _WHAT)
        return agreement_key(keys.flatten().tolist())


class NotConnected(OSError):
    """Raised if this rank cannot connect with another machine.

    Attributes:
        unreachable: the ids of the machines that do not answer here.
    """

    def __init__(self, text: str, unreachable: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.unreachable = tuple(unreachable)


class Connections:
    """Connects this rank with the ranks of other machines that hold the same shard.

    Machines connect in two steps. First each says in its status that it is ready, and waits until
    all others say so. So a rank never waits in native code for a machine that does not come, it
    knows whom it cannot reach, and learns at once if another one has given up. Then gloo or NCCL
    connects them, which takes milliseconds.

    Attributes:
        group: connects the machines of the latest `connect`; None before.
        name: of these connections; "" without.
        number: of this machine's latest report.
        unreachable: the machines that do not answer here, by id. A thread removes those that answer
            again.
    """

    def __init__(
        self,
        id: str,
        shard: int,
        device: torch.device,
        timeout_s: Callable[[], float],
        client: Client,
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.name, self.number = "", 0
        self.unreachable: dict[str, Report] = {}
        self._id = id
        self._shard = shard
        self._device = device
        self._timeout_s = timeout_s
        self._client = client
        self._torchft_group: Any = None
        self._connecting = ""
        self._why_silent: dict[str, str] = {}  # of servers, after the latest question
        self._failed: deque[str] = deque(maxlen=16)
        self._prober: threading.Thread | None = None
        self._closed = threading.Event()

    def status(self) -> dict[str, Any]:
        """Return what the other machines may know at any time; from any thread."""
        return {
            "id": self._id,
            "number": self.number,
            "connecting": self._connecting,
            "failed": list(self._failed),
        }

    def connect(self, machines: Sequence[Report], name: str, limit_s: float) -> None:
        """Connect with `machines`, this one among them, under a name that all of them know. Raises
        NotConnected, or RuntimeError of torch.
        """
        self.disconnect()
        self._connecting = name
        self._wait_until_ready(machines, name, time.monotonic() + limit_s)
        limit = timedelta(seconds=min(_CONNECT_LIMIT_S, self._timeout_s()))
        made = _group_class(self._device)(timeout=limit)
        rank = [machine.id for machine in machines].index(self._id)
        made.configure(
            f"{machines[0].store}/commhooks/{name}/{self._shard}", self._id, rank, len(machines)
        )
        self._torchft_group, self.group, self.name = made, made.parent, name
        adopt(
            self.group,
            (
                "gloo"
                if self._device.type == "cpu"
                else dist.get_default_backend_for_device(self._device)
            ),
        )

    def limit(self, limit_s: float) -> None:
        """Let each collective of the next exchange fail after `limit_s` seconds."""
        assert self.group is not None
        # torch 2.13; before, exchanges have the limit of the connection
        if hasattr(self.group, "set_timeout"):
            self.group.set_timeout(timedelta(seconds=max(_LEAST_LIMIT_S, limit_s)))

    def _wait_until_ready(self, machines: Sequence[Report], name: str, deadline: float) -> None:
        waiting = [machine for machine in machines if machine.id != self._id]
        first = machines[0]
        if waiting and first.id != self._id and not listens(first.store):
            raise NotConnected(f"{first.name} at {first.store} does not answer", [first.id])
        while waiting:
            statuses = self.check(waiting, name)
            for machine in waiting:
                status = statuses[machine.id]
                if status.get("number", 0) > machine.number:
                    raise NotConnected(f"{machine.name} has asked for the machines again")
            waiting = [
                machine for machine in waiting if statuses[machine.id].get("connecting") != name
            ]
            if waiting and time.monotonic() > deadline:
                raise NotConnected(f"{_names(waiting)} did not come to connect")
            if waiting:
                time.sleep(_POLL_S)

    def check(self, machines: Sequence[Report], name: str) -> dict[str, dict[str, Any]]:
        """Return the status of each of `machines` but this one. Raises NotConnected if one does not
        answer, or has given up the exchange `name`.
        """
        others = [machine for machine in machines if machine.id != self._id]
        statuses = self._statuses(others)
        if silent := [machine for machine in others if machine.id not in statuses]:
            raise self._not_connected(silent)
        for machine in others:
            if name in statuses[machine.id].get("failed", ()):
                raise NotConnected(f"{machine.name} has given up the exchange")
        return statuses

    def _statuses(self, machines: Sequence[Report]) -> dict[str, dict[str, Any]]:
        """Ask `machines` for their status. Those that do not answer are missing in the result."""
        if not machines:
            return {}
        with ThreadPoolExecutor(min(16, len(machines)), "commhooks status") as pool:
            answers = list(
                pool.map(lambda machine: self._status_of(machine.servers[self._shard]), machines)
            )
        # Behind a router that forwards ports another machine may answer.
        return {
            machine.id: status
            for machine, status in zip(machines, answers, strict=True)
            if status.get("id") == machine.id
        }

    def _status_of(self, server: str) -> dict[str, Any]:
        self._why_silent.pop(server, None)
        try:
            return self._client.ask(server)
        except NETWORK_ERRORS as error:
            self._why_silent[server] = f" ({str(error) or type(error).__name__})"
        return {}

    def silence_of(self, machine: Report) -> str:
        """Return a clause that says why `machine` has not answered the latest question."""
        server = machine.servers[self._shard]
        return f"{machine.name} at {server} does not answer{self._why_silent.get(server, '')}"

    def _not_connected(self, silent: Sequence[Report]) -> NotConnected:
        reasons = "; ".join(map(self.silence_of, silent))
        return NotConnected(reasons, [machine.id for machine in silent])

    def give_up(self, name: str) -> None:
        """Close the connections after the exchange `name` has failed, and tell the others."""
        self._failed.append(name)
        self.disconnect()

    def all_answer(self, machines: Sequence[Report], unreachable: Collection[str] = ()) -> bool:
        """Find out which of `machines` do not answer, beside `unreachable`, and keep them in mind.
        Return whether all do.
        """
        others = [machine for machine in machines if machine.id != self._id]
        silent = {
            *unreachable,
            *({machine.id for machine in others} - self._statuses(others).keys()),
        }
        self.unreachable |= {machine.id: machine for machine in others if machine.id in silent}
        if self.unreachable and (self._prober is None or not self._prober.is_alive()):
            self._prober = threading.Thread(target=self._probe, name="commhooks probe", daemon=True)
            self._prober.start()
        return not silent

    def has_moved_on(self, machine: Report) -> bool:
        """Return whether `machine` has asked for another quorum since this report."""
        status = self._statuses([machine]).get(machine.id, {})
        number: int = status.get("number", 0)
        return number > machine.number

    def _probe(self) -> None:
        while self.unreachable and not self._closed.wait(_PROBE_EVERY_S):
            for machine in list(self.unreachable.values()):
                if self._statuses([machine]) and listens(machine.store):
                    self.unreachable.pop(machine.id, None)

    def forget(self, present: Sequence[Report]) -> None:
        """Forget machines that are no longer there."""
        ids = {machine.id for machine in present if not machine.left}
        for id in self.unreachable.keys() - ids:
            self.unreachable.pop(id, None)

    def confirm(self) -> None:
        """Tell the connected ranks that everything has arrived on this machine. It ends only after
        all of them have begun it. Raises HookRunError if one of them is gone.
        """
        assert self.group is not None
        gather_rows(torch.ones(1, device=self._device), self.group, None, "the confirmation")

    def disconnect(self) -> None:
        """Close the connections."""
        made, self._torchft_group, self.group, self.name = self._torchft_group, None, None, ""
        if made is not None:
            made.abort(errored=False)
            del made
            # gloo closes connections when nothing refers to the group; until then the other
            # machines wait for this one. The traceback of a failure refers to it, and is young; a
            # collection of everything takes up to a second.
            gc.collect(1)

    def close(self) -> None:
        self._closed.set()
        self.disconnect()


def _group_class(device: torch.device) -> Any:
    from torchft import process_group

    return (
        process_group.ProcessGroupGloo if device.type == "cpu" else process_group.ProcessGroupNCCL
    )


def _names(machines: Sequence[Report]) -> str:
    return ", ".join(machine.name for machine in machines)

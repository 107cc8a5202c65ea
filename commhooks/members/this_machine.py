"""What connects this machine with the others: its lighthouse client, state server, connections and
ranks.
"""

import json
import socket
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from commhooks.errors import AttachError, HookConfigError
from commhooks.members.addresses import check_interface, own_host
from commhooks.members.client import Client
from commhooks.members.history import History
from commhooks.members.lighthouse import Lighthouse, address_of, check_torchft
from commhooks.members.lines import Lines
from commhooks.members.numbers import Numbers
from commhooks.members.options import Torchft
from commhooks.members.peers import Connections, RanksOfMachine
from commhooks.members.round_end import RoundEnd
from commhooks.members.secret import key_of
from commhooks.members.state_server import StateServer


class ThisMachine:
    """Connects this machine. All of its ranks must make it, and close it, together.

    Attributes:
        id: its name, with a random number.
        servers: the address of the `StateServer` of each shard.
        store: the address of its `TCPStore`, in which the ranks of a new group find each other.
        server: of this rank; None if this rank does not exchange.
        lighthouse: on the first rank; None on others.
        round_end: what this rank has heard of the ends of rounds.
        history: the latest outer steps of this rank, while another machine reads them.

    Raises:
        HookConfigError: torchft is missing, or no lighthouse is given.
        AttachError: the lighthouse cannot be reached within `timeout_s`, or others could not reach
            this machine.
    """

    def __init__(self, options: Torchft, ranks: RanksOfMachine, device: torch.device) -> None:
        self.options, self.ranks, self.lines = options, ranks, Lines(ranks.is_first)
        self.key = key_of(options.secret)
        self.client = Client(self.key)
        self.round_end = RoundEnd(self.client)
        self.history = History(self.timeout_s)
        self.numbers = Numbers()
        self.server: StateServer | None = None
        self.lighthouse: Lighthouse | None = None
        own_id = (
            f"{options.name or socket.gethostname()}:{uuid.uuid4().hex[:8]}"
            if ranks.is_first
            else ""
        )
        self.id = ranks.first_text(own_id)
        self.store = ""
        self._store: dist.TCPStore | None = None
        self.connections = Connections(self.id, ranks.shard, device, self.timeout_s, self.client)
        failure = ""
        try:
            self._open(options, device)
        except (HookConfigError, AttachError) as error:
            failure = json.dumps([type(error).__name__, str(error)])
        except (OSError, RuntimeError) as error:  # of sockets
            failure = json.dumps(
                ["", f"members: this machine cannot listen for the other machines: {error}"]
            )
        if failure := ranks.first_text(failure):
            self.close()
            kind, text = json.loads(failure)
            raise (HookConfigError if kind == "HookConfigError" else AttachError)(text)
        self.servers = ranks.of_shards("" if self.server is None else self.server.address)

    def _open(self, options: Torchft, device: torch.device) -> None:
        check_torchft()
        address = address_of(options.lighthouse)
        if not self.ranks.exchanges:
            return
        host = own_host(address)
        if device.type == "cpu":
            check_interface(host)
        self.server = StateServer(
            host,
            self.timeout_s,
            self._status,
            self._is_waited_for,
            self.round_end.hear,
            self.key,
            self.history,
            self.lines,
        )
        if self.ranks.is_first:
            self._store = dist.TCPStore(host.strip("[]"), 0, is_master=True, wait_for_workers=False)
            self.store = f"{host}:{self._store.port}"
            self.lighthouse = Lighthouse(
                address,
                self.id,
                self.server.address,
                self.store,
                self.timeout_s,
                self.lines,
                self.key,
            )

    def timeout_s(self) -> float:
        """Return after how many seconds a machine is given up that does not answer or move."""
        limit_s = self.options.timeout_s
        return self.numbers.limit_s if limit_s is None else limit_s

    def limit_s(self, deadline: float | None) -> float:
        """Return `timeout_s`, or the seconds until `deadline` if that comes first."""
        timeout_s = self.timeout_s()
        if deadline is None:
            return timeout_s
        return max(0.0, min(timeout_s, deadline - time.monotonic()))

    def _status(self) -> dict[str, Any]:
        return self.connections.status() | {"numbers": self.numbers.shown()}

    def _is_waited_for(self) -> None:
        if self.lighthouse is not None:
            self.lighthouse.heartbeats.waited_for()

    def close(self) -> None:
        """Tell the others that they need not wait for this machine, and close everything; `stats`
        and `state_dict` still work.
        """
        self.round_end.close()
        if self.lighthouse is not None:
            self.lighthouse.close()
        if self.server is not None:
            self.server.close()
        self.connections.close()
        self._store = None  # which ends its thread

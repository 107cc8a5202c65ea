"""Live membership: machines that join and leave a training while it runs, found by a lighthouse of torchft.

Each machine runs a job of its own. Its first rank sends heartbeats to the lighthouse, and `Membership.ask` waits until
the lighthouse has seen the requests of all machines that are alive. So all of them get the same list, and rank 0, or in
a sharded model each rank, connects to the same ranks of the other machines (`connect`). A machine that is behind reads
its state from the same ranks of another machine over HTTP (`StateServer`, `fetch`).

torchft 0.2: `torchft.coordination` is its public low-level interface. Its `Manager` is not used, because it sends the
state of a machine that joins while the others wait, and gives up the work of a step that failed.
"""

import contextlib
import ctypes
import gc
import hashlib
import http.server
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_rows, gather_texts
from commhooks.comm.groups import adopt
from commhooks.errors import AttachError, HookConfigError, HookRunError, invalid, logger_of
from commhooks.options import as_python

logger = logger_of(__name__)

PROTOCOL = 2
"""Changes with what machines send each other, so that another version of commhooks is refused if it must be."""
VARIABLE = "TORCHFT_LIGHTHOUSE"
_HEARTBEAT_S = 0.5  # torchft's lighthouse takes a machine for dead after 5 s without
_LINE_EVERY_S = 10.0
_ALIVE_EVERY_S = 1.0
_ALIVE_LIMIT_S = 5.0
_PIECE_BYTES = 16 * 2**20
_WHAT = "the list of machines"


@dataclass(frozen=True, kw_only=True)
class Torchft:
    """Machines join and leave the training while it runs; see docs/members.md.

    Args:
        lighthouse: address of the lighthouse, such as "http://host:29510". None: the environment variable
            TORCHFT_LIGHTHOUSE.
        min_machines: with fewer machines an outer step waits for more.
        timeout_s: seconds after which a machine that does not answer is left out.
        leave_s: seconds that a machine which leaves waits until the others come to their outer step.
        name: name of this machine, different on every machine. None: the host name.
    """

    lighthouse: str | None = None
    min_machines: int = 1
    timeout_s: float = 60.0
    leave_s: float = 20.0
    name: str | None = None

    def __post_init__(self) -> None:
        for option in ("min_machines", "timeout_s", "leave_s"):
            object.__setattr__(self, option, as_python(getattr(self, option)))
        if type(self.min_machines) is not int or self.min_machines < 1:
            raise invalid("Torchft: min_machines", self.min_machines, "a number of machines, 1 or more")
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s < float("inf"):
            raise invalid("Torchft: timeout_s", self.timeout_s, "seconds, more than 0")
        if type(self.leave_s) not in (int, float) or not 0 <= self.leave_s < float("inf"):
            raise invalid("Torchft: leave_s", self.leave_s, "seconds, 0 or more")
        for option in ("lighthouse", "name"):
            value = getattr(self, option)
            if not isinstance(value, str | None) or value == "":
                raise invalid(f"Torchft: {option}", value, "a text, or None")


def torchft_of(given: object) -> Torchft | None:
    """Check the argument `members` of the front ends."""
    if given is None or isinstance(given, Torchft):
        return given
    if given == "torchft":
        return Torchft()
    raise invalid("members", given, "'torchft', commhooks.Torchft(...), or None", ["torchft"])


@dataclass(frozen=True)
class Machine:
    """Describes a machine that has asked for the list.

    Attributes:
        id: the name with a random number, so that a machine that has restarted is another one.
        step: committed outer steps.
        record: what else it has passed to `Membership.ask`, and "servers": the addresses of the `StateServer` of each
            shard.
        store: the address of its `TCPStore`.
    """

    id: str
    step: int
    record: Mapping[str, Any]
    store: str

    @property
    def name(self) -> str:
        return self.id.rpartition(":")[0]


class Membership:
    """Connects this machine with the others of a training. All ranks of the machine must call each method together.

    Args:
        local: the ranks of this machine that have the same weights, or the same shard of them. Rank 0 of them connects
            to other machines.
        shards: the ranks of this machine that hold the shards of the model; None: it is not sharded.
        device: of this rank's model.

    Attributes:
        exchanges: whether this rank connects to other machines.
        machines: that train the running round, sorted by name; set by `MemberSteps`.
        connected: the machines of the latest `connect`, in the order of their ranks.
        group: connects the machines in `connected`; None before the first `connect`, and on ranks that do not exchange.

    Raises:
        HookConfigError: torchft is missing, or no lighthouse is given.
        AttachError: the lighthouse cannot be reached within `timeout_s`.
    """

    def __init__(
        self, options: Torchft, local: dist.ProcessGroup, shards: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.options, self.exchanges = options, local.rank() == 0
        self.machines: list[Machine] = []
        self.connected: list[Machine] = []
        self.group: dist.ProcessGroup | None = None
        self._device, self._shards, self._shard = device, shards, 0 if shards is None else shards.rank()
        # A collective over each of these groups in turn reaches all ranks of the machine.
        self._inside = [local] if shards is None else [shards, local]
        self._key = ""
        self._torchft_group: Any = None
        self.server: StateServer | None = None  # on the rank that exchanges
        self._lighthouse: _Lighthouse | None = None
        failure = ""
        address = options.lighthouse or os.environ.get(VARIABLE, "")
        try:
            check_torchft()
            if not address:
                raise HookConfigError(
                    f"members without a lighthouse: set {VARIABLE}=http://host:29510 to the address that `commhooks "
                    "lighthouse` prints, or give commhooks.Torchft(lighthouse=...)"
                )
            if self.exchanges:
                host = _own_address(address)
                self.server = StateServer(host)
                if self._shard == 0:
                    self._lighthouse = _Lighthouse(address, options, host)
        except (HookConfigError, AttachError) as error:
            failure = json.dumps([type(error).__name__, str(error)])
        except (OSError, RuntimeError) as error:  # of sockets
            failure = json.dumps(["", f"members: this machine cannot listen for the other machines: {error}"])
        if found := self._spread(failure):
            self.close()
            kind, text = json.loads(found)
            raise (HookConfigError if kind == "HookConfigError" else AttachError)(text)
        self.id = self._spread("" if self._lighthouse is None else self._lighthouse.id)
        own = "" if self.server is None else self.server.address
        self._servers = [own] if shards is None else gather_texts(own, shards, device, _WHAT)

    @property
    def name(self) -> str:
        return self.id.rpartition(":")[0]

    @property
    def logs(self) -> bool:
        return self._lighthouse is not None

    def ask(self, step: int, limit_s: float | None = None, **record: Any) -> list[Machine]:
        """Wait until all machines that are alive have asked. Returns them, sorted by name; the same list on all. Raises
        HookRunError after `limit_s` seconds; with None it waits as long as it takes, with a line every 10 s. `step`:
        committed outer steps. `record`: further content of `Machine.record`, for JSON; the first rank's counts."""
        began, answer, waiting = time.monotonic(), "", None
        while not answer:
            if self._lighthouse is not None:
                if waiting is None:
                    waiting = _Waiting(self._lighthouse, step, {**record, "servers": self._servers})
                answer = waiting.answer(_LINE_EVERY_S if limit_s is None else min(_LINE_EVERY_S, limit_s))
                waited = time.monotonic() - began
                if not answer and limit_s is not None and waited >= limit_s:
                    answer = "[]"
                elif not answer:
                    logger.warning("members: %s waits for %s since %.0f s", self.name, waiting.reason, waited)
            answer = self._spread(answer)
        found = [Machine(**each) for each in json.loads(answer)]
        if not found:
            raise HookRunError(f"members: no other machine has come within {limit_s:g} s")
        return sorted(found, key=lambda machine: machine.id)

    def connect(self, machines: Sequence[Machine]) -> None:
        """Connect with `machines`, this machine among them, unless the connections exist. They are made anew if a
        machine reports another number of failures in its record than at the latest call. Raises an exception of torchft
        or torch if a connection fails, or OSError as soon as a machine is gone."""
        key = json.dumps([(each.id, each.record.get("failures")) for each in machines])
        self.connected = list(machines)
        if not self.exchanges or key == self._key:
            return
        self.disconnect()
        limit = timedelta(seconds=self.options.timeout_s)
        made = _group_class(self._device)(timeout=limit)
        rank = [each.id for each in machines].index(self.id)
        # A machine that leaves and comes back: the same machines may connect twice, but not after the same step.
        prefix = hashlib.sha256(f"{key} {machines[0].step}".encode()).hexdigest()[:16]
        store = f"{machines[0].store}/commhooks/{prefix}/{self._shard}"
        self._while_alive(machines, lambda: made.configure(store, self.id, rank, len(machines)))
        self._torchft_group, self.group, self._key = made, made.parent, key
        adopt(self.group, "gloo" if self._device.type == "cpu" else dist.get_default_backend_for_device(self._device))

    def _while_alive(self, machines: Sequence[Machine], connect: Callable[[], None]) -> None:
        """Run `connect`, which waits for `machines` up to `timeout_s`, in a thread, and raise OSError if a process for
        which it waits listens no longer: it has died since the machines met. The thread is then left to its timeout."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                if self._device.type != "cpu":  # NCCL connects the current device of the thread
                    torch.accelerator.set_device_index(self._device)
                connect()
            except Exception as error:  # raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="commhooks connect", daemon=True)
        thread.start()
        thread.join(_ALIVE_EVERY_S)
        while thread.is_alive():
            for servers in [each.record["servers"] for each in machines]:
                # The ranks find each other in the store of the first rank of a machine.
                for address in {servers[0], servers[self._shard]}:
                    socket.create_connection(_host_and_port(address), _ALIVE_LIMIT_S).close()
            thread.join(_ALIVE_EVERY_S)
        if errors:
            raise errors.pop()  # the list would keep the error, and thereby the connections, in a reference cycle

    def confirm(self) -> None:
        """Tell the connected ranks that everything has arrived on this machine. It ends only after all of them have
        begun it. Raises HookRunError if one of them is gone."""
        assert self.group is not None
        gather_rows(torch.ones(1, device=self._device), self.group, None, "the confirmation")

    def disconnect(self) -> None:
        """Close the connections. The next `connect` makes new ones."""
        made, self._torchft_group, self.group, self._key = self._torchft_group, None, None, ""
        if made is not None:
            made.abort(errored=False)
            del made
            # gloo closes connections when nothing refers to the group; until then the other machines wait for this one.
            gc.collect()

    def fetch(self, machine: Machine, step: int) -> tuple[bytes, Callable[[int, torch.Tensor], None]]:
        """Fetch the state of step `step` from the rank of `machine` with the same shard; see `fetch`."""
        return fetch(machine.record["servers"][self._shard], step, self.options.timeout_s)

    # ---- the ranks of this machine -----------------------------------------------------------------------------------

    def on_all_ranks(self, good: bool) -> bool:
        """Return whether `good` is true on all ranks of this machine."""
        for group in self._inside:
            own = torch.tensor([good], dtype=torch.int32, device=self._device)
            good = bool(gather_rows(own, group, None, "whether all ranks of the machine have exchanged").all())
        return good

    def key_of_shards(self, own: int) -> int:
        """Combine a number below 2**62 of each shard into one, equal on all ranks of this machine."""
        if self._shards is None:
            return own
        keys = gather_rows(torch.tensor([own], device=self._device), self._shards, None, _WHAT)
        return agreement_key(keys.flatten().tolist())

    def _spread(self, text: str) -> str:
        """Return the first of the texts of all ranks of this machine that is not empty."""
        for group in self._inside:
            text = next(filter(None, gather_texts(text, group, self._device, _WHAT)), "")
        return text

    def close(self) -> None:
        """Leave the training. The other machines then no longer wait for this machine."""
        if self._lighthouse is not None:
            self._lighthouse.close()
        if self.server is not None:
            self.server.close()
        self.disconnect()


# ---- the lighthouse --------------------------------------------------------------------------------------------------


def check_torchft() -> None:
    """Raise HookConfigError if torchft is missing or too old."""
    try:
        from torchft.coordination import LighthouseClient  # noqa: F401
    except ImportError as error:
        raise HookConfigError(
            f'members="torchft" needs torchft 0.2 or newer ({error}): pip install "commhooks[members]"'
        ) from error


def _own_address(lighthouse: str) -> str:
    """Return the address of the interface through which this machine reaches the lighthouse."""
    parts = urlsplit(lighthouse if "//" in lighthouse else f"//{lighthouse}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise AttachError(f"members: the lighthouse {lighthouse} cannot be found: {error}") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        host: str = probe.getsockname()[0]
    return f"[{host}]" if ":" in host else host


class _Lighthouse:
    """Connects this machine with the lighthouse. A thread sends heartbeats."""

    def __init__(self, address: str, options: Torchft, host: str) -> None:
        from torchft.coordination import LighthouseClient

        self.address, self.limit = address, timedelta(seconds=options.timeout_s)
        self.id = f"{options.name or socket.gethostname()}:{uuid.uuid4().hex[:8]}"
        # The ranks of a new group find each other in the store of the first machine.
        store = dist.TCPStore(host.strip("[]"), 0, is_master=True, wait_for_workers=False)
        self.store, self._store = f"{host}:{store.port}", store
        try:
            self._new_client: Callable[[], Any] = lambda: LighthouseClient(address, self.limit)
            self.client = self._new_client()
        except Exception as error:  # torchft raises RuntimeError and TimeoutError
            raise AttachError(
                f"members: the lighthouse at {address} did not answer within {options.timeout_s:g} s; start it by "
                f"`commhooks lighthouse`, or correct {VARIABLE} ({error})"
            ) from error
        self.reached = True
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="commhooks heartbeat", daemon=True).start()

    def _beat(self) -> None:
        client: Any = self.client
        while not self._closed.wait(_HEARTBEAT_S):
            try:
                client = client or self._new_client()
                client.heartbeat(self.id, timedelta(seconds=5))
                self.reached = True
            except Exception:
                self.reached, client = False, None

    def quorum(self, step: int, record: Mapping[str, Any]) -> Any:
        """Return the quorum of torchft. Waits until there is one, and connects again if the lighthouse restarts."""
        while not self._closed.is_set():
            try:
                return self.client.quorum(
                    self.id,
                    timedelta(days=1),  # a request that ends too early would leave the others with a list of the dead
                    address=self.id,
                    store_address=self.store,
                    step=step,
                    world_size=1,
                    data=record,
                )
            except Exception:
                self._closed.wait(_HEARTBEAT_S)
                with contextlib.suppress(Exception):
                    self.client = self._new_client()
        raise HookRunError("members: this machine has left the training")

    def close(self) -> None:
        self._closed.set()


class _Waiting:
    """Requests the list of machines in a thread."""

    def __init__(self, lighthouse: _Lighthouse, step: int, record: Mapping[str, Any]) -> None:
        self._lighthouse, self._found = lighthouse, ""
        self._thread = threading.Thread(target=self._ask, args=(step, record), name="commhooks quorum", daemon=True)
        self._thread.start()

    def _ask(self, step: int, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(HookRunError):
            quorum = self._lighthouse.quorum(step, record)
            self._found = json.dumps(
                [
                    {
                        "id": each.replica_id,
                        "step": each.step,
                        "record": each.data,
                        "store": each.store_address,
                    }
                    for each in quorum.participants
                ]
            )

    def answer(self, limit_s: float) -> str:
        self._thread.join(limit_s)
        return self._found

    @property
    def reason(self) -> str:
        if not self._lighthouse.reached:
            return f"the lighthouse at {self._lighthouse.address}, which does not answer"
        return "the other machines, which have not reached their outer step"


def _group_class(device: torch.device) -> Any:
    from torchft import process_group

    return process_group.ProcessGroupGloo if device.type == "cpu" else process_group.ProcessGroupNCCL


# ---- the state for a machine that is behind --------------------------------------------------------------------------


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class StateServer:
    """Serves a copy of this rank's state to ranks of machines that are behind, from a thread.

    GET /step/form returns the description, and /step/i the bytes of tensor i; 404 as long as there is no state of that
    step. Whoever reaches the port can read the weights.
    """

    def __init__(self, host: str) -> None:
        self._state: tuple[int, bytes, list[torch.Tensor]] | None = None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Server((host.strip("[]"), 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="commhooks state", daemon=True).start()

    def serve(self, step: int, form: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Serve copies of `tensors`, described by `form`, from now on, in place of the state before."""
        self._state = None  # free its memory first
        self._state = step, form, [each.detach().to("cpu", copy=True).contiguous() for each in tensors]

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        state, (step, _, part) = self._state, request.path.strip("/").partition("/")
        known = state is not None and step == str(state[0])
        if state is None or not known or not (part == "form" or part.isdecimal() and int(part) < len(state[2])):
            request.send_error(404)
            return
        content = memoryview(state[1]) if part == "form" else _bytes_of(state[2][int(part)])
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        for start in range(0, len(content), _PIECE_BYTES):
            request.wfile.write(content[start : start + _PIECE_BYTES])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._state = None


def fetch(server: str, step: int, limit_s: float) -> tuple[bytes, Callable[[int, torch.Tensor], None]]:
    """Wait for the state of `step` at a `StateServer`. Returns its description, and a function that reads the tensor
    with a number into a contiguous tensor on the CPU. Raises OSError if the server is gone, or has no state of this
    step within `limit_s`."""

    def get(part: object) -> Any:
        return urllib.request.urlopen(f"http://{server}/{step}/{part}", timeout=limit_s)

    def read(number: int, into: torch.Tensor) -> None:
        view, done = _bytes_of(into), 0
        with get(number) as answer:
            while done < len(view):
                count = answer.readinto(view[done : done + _PIECE_BYTES])
                if not count:
                    raise OSError(f"{server} has ended the transfer of its state")
                done += count

    deadline = time.monotonic() + limit_s
    while True:
        try:
            with get("form") as answer:
                return answer.read(), read
        except urllib.error.HTTPError as error:
            if error.code != 404 or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor, for as long as the tensor is there. torch needs no numpy."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

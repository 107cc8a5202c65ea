"""Simulates on the CPU in which order an accelerator's streams may run what a training queues.

`simulated_accelerator()` treats all tensors as tensors on a CUDA device, except tensors that a
program with a GPU would have on the host. Operators run at once, with two additional effects:

- Each is work on the current stream. Every stream has a vector clock: the latest work of each other
  stream that it comes after. A read or a write that does not come after the latest conflicting
  access to the same bytes is a fault.
- Memory belongs to the stream that allocated it. It is a fault to free it while another stream may
  still use it, unless `record_stream` was called (the rule of torch's caching allocator).

A collective of gloo is work on a stream of its group; `wait()` makes the current stream wait for
it. A future made with a device holds an event of the stream on which it was completed; DDP and
`wait()` wait for that event, and `then` calls back on a stream of its own (as torch's
`ivalue::Future`). When the host reads a tensor, it waits for the current stream, and everything
queued later comes after that.
"""

import contextlib
import functools
import itertools
import linecache
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from commhooks.comm.collectives import ALL_GATHER, PointToPoint, new_future
from commhooks.engine import backward_pass, immediate
from commhooks.local_steps import driver
from tests.support.cuda_stand_ins import Clock, Cuda, Stream, cuda_stand_ins
from tests.support.kernels import computing_with
from tests.support.late_execution import (
    LateExecution,
    can_be_late,
    collective,
    is_view,
    spoil,
    write_later,
    writes,
    written,
)

COLLECTIVES = [
    "all_reduce",
    "all_gather",
    ALL_GATHER,
    "broadcast",
    "all_to_all_single",
    "reduce_scatter_tensor",
]
# of FSDP since torch 2.13
COLLECTIVES += [name for name in ("reduce_scatter_single",) if hasattr(dist, name)]
FACTORIES = (
    "tensor empty zeros ones full arange rand randn randint frombuffer from_numpy scalar_tensor"
).split()
READ_BY_HOST = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "_unique2",
    "unique_dim",
}
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
METADATA_ONLY = re.compile(
    r"aten::(new_.*|.*_like|_unsafe_view|is_same_size|sym_.*|_has_.*|stride|size)$"
)
HIDDEN_WRITES = {"fsdp::all_gather_copy_in": "all_gather_output"}
"""Operator -> the argument into which it writes, and of which its results are views, unknown to its
schema.
"""
WHOLE = 1 << 62
_TO = torch.Tensor.to
DEVICE = torch.device("cpu")
"""The accelerator; the host is "cpu"."""


class Access(NamedTuple):
    """An access to the bytes from `begin` to `end`, by the work `number` of a stream."""

    begin: int
    end: int
    stream: Stream
    number: int
    what: str

    def overlaps(self, begin: int, end: int) -> bool:
        return self.begin < end and begin < self.end


@dataclass(eq=False)
class Memory:
    """One storage."""

    home: Stream
    on_host: bool
    made_by: str
    freed: Any = None
    """The weak reference whose callback runs when the storage is freed."""
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    used: Clock = field(default_factory=dict)
    kept_for: set[Stream] = field(default_factory=set)
    copied: Clock = field(default_factory=dict)
    """For host memory: the copy from the device that the host has not waited for."""


class Accelerator:
    """The state of the simulated accelerator.

    Attributes:
        cuda: its streams and events.
        faults: sentences.
        host_waits: what the host waited for in the packages, with the line.
        late: runs operators late; None: they run at once.
    """

    def __init__(self, cuda: Cuda, late: LateExecution | None) -> None:
        self.cuda = cuda
        self.late = late
        self.faults: list[str] = []
        self.host_waits: list[str] = []
        self.running = True
        self.at_once = False
        """Nothing is late now."""
        self._memory: dict[int, Memory] = {}
        self._numbers = itertools.count(1)
        self._groups: dict[str, Stream] = {}
        self._kinds: dict[Any, list[tuple[int, str, str]]] = {}
        self._lock = threading.RLock()
        self.local = threading.local()

    # ----------------------------------------------------------------------------------------------
    # memory

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return the record of a tensor's memory. Memory that was not seen being allocated is on
        the device, allocated long ago.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = Memory(self.cuda.default, False, "something before")
            memory.freed = weakref.ref(storage, lambda _: self._freed(key))
        return memory

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_sparse and self.memory(tensor).on_host

    def memory_on_host(self, tensor: torch.Tensor) -> Clock:
        """Return the copy that writes this host memory, if there is one."""
        return {} if tensor.is_sparse else self.memory(tensor).copied

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`Tensor.record_stream`."""
        for part in _parts(tensor):
            self.memory(part).kept_for.add(stream)

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record that the current stream uses the memory."""
        current = self.cuda.current()
        for tensor in tensors:
            for part in _parts(tensor):
                self.memory(part).used[current] = current.clock.get(current, 0)

    def _freed(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key)
            if memory.on_host or not self.running:
                return
            for stream, number in memory.used.items():
                safe = [
                    memory.home.clock,
                    self.cuda.host,
                    *(stream.clock for stream in memory.kept_for),
                ]
                if stream is not memory.home and all(
                    clock.get(stream, 0) < number for clock in safe
                ):
                    self._fault(
                        f"memory of {memory.made_by}, allocated on {memory.home}, is freed while"
                        f" {stream} may use it"
                    )

    # ----------------------------------------------------------------------------------------------
    # work

    def launch(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: Stream | None = None,
    ) -> tuple[Stream, int, Clock]:
        """Queue work. `stream`: of a collective, which keeps its tensors itself; None: the current
        one. Returns its stream, its number, and the work that it comes after.
        """
        with self._lock:
            on = stream or self.cuda.current()
            number = next(self._numbers)
            on.see(self.cuda.host)
            after = dict(on.clock)
            for tensors, writing in ((reads, False), (writes, True)):
                for tensor in itertools.chain.from_iterable(map(_parts, tensors)):
                    memory = self.memory(tensor)
                    if memory.on_host or tensor.numel() == 0:
                        continue
                    self._access(
                        memory, tensor, Access(*_extent(tensor), on, number, what), writing
                    )
                    if stream is None:
                        memory.used[on] = number
            on.clock[on] = number
            return on, number, after

    def _access(self, memory: Memory, tensor: torch.Tensor, new: Access, writing: bool) -> None:
        for earlier, kind in (
            (memory.writes, "writes"),
            (memory.reads if writing else [], "reads"),
        ):
            for old in earlier:
                if (
                    old.overlaps(new.begin, new.end)
                    and new.stream.clock.get(old.stream, 0) < old.number
                    and old.number != new.number
                ):
                    verb = "writes" if writing else "reads"
                    self._fault(
                        f"{new.what} on {new.stream} {verb} {tuple(tensor.shape)} of memory of"
                        f" {memory.made_by}, which {old.what} on {old.stream} {kind}: nothing"
                        " orders them"
                    )
        if writing:
            for accesses in (memory.reads, memory.writes):
                accesses[:] = [
                    access
                    for access in accesses
                    if not (new.begin <= access.begin and access.end <= new.end)
                ]
            memory.writes.append(new)
        else:
            same = (
                access
                for access in memory.reads
                if access.stream is not new.stream or access.begin != new.begin
            )
            memory.reads[:] = [*same, new]

    def allocate(self, tensor: torch.Tensor, what: str, *, on_host: bool) -> None:
        """Record a new storage. Its memory may have been used by earlier work of the current
        stream.
        """
        for part in _parts(tensor):
            memory = self.memory(part)
            memory.on_host = on_host
            memory.made_by = what
            memory.home = self.cuda.current()
            memory.reads, memory.writes = [], []
            if not on_host:
                number = memory.home.clock.get(memory.home, 0)
                memory.writes.append(
                    Access(0, WHOLE, memory.home, number, f"the allocation by {what}")
                )

    def wait_on_host(self, why: str, clock: Clock | None = None) -> None:
        """Make the host wait for this work, by default for the current stream."""
        clock = self.cuda.current().clock if clock is None else clock
        self.force(clock)
        with self._lock:
            self.cuda.host_sees(clock)
            place, in_packages = _place()
            if in_packages:
                self.host_waits.append(f"{why} {place}")

    def force(self, clock: Clock | None = None) -> None:
        """Run late work, by default the current stream's."""
        if self.late is not None:
            self.late.force(self.cuda.current().clock if clock is None else clock)

    def read_by_host(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Record that the host reads the numbers: of device tensors once they are ready, of host
        tensors at once.
        """
        if any(
            n > self.cuda.host.get(stream, 0)
            for tensor in tensors
            for stream, n in self.memory_on_host(tensor).items()
        ):
            self._fault(f"{what} reads on the host what a copy may not have written yet")
        if not all(map(self.is_on_host, tensors)):
            self.wait_on_host(f"{what} reads")

    def _fault(self, text: str) -> None:
        sentence = f"{text} {_place()[0]}"
        if sentence not in self.faults:
            self.faults.append(sentence)

    # ----------------------------------------------------------------------------------------------
    # operators

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if is_view(func):
            return func(*args, **kwargs)
        if (
            self.late is not None
            and (queued := self._begin(self.late, func, args, kwargs)) is not None
        ):
            return queued[0]
        result = func(*args, **kwargs)
        self.note(func, args, kwargs, result)
        return result

    def _begin(
        self, late: LateExecution, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """Queue an operator for later, and return its result. None: it must run now, after
        everything that it comes after.
        """
        name = func._schema.name
        tensors = _tensors([*args, *kwargs.values()])
        short = name.partition("::")[2]
        to = getattr(self.local, "to", None)
        hosts = [self.is_on_host(tensor) for tensor in tensors]
        plain = not any(tensor.is_sparse for tensor in tensors)
        if self.at_once or not tensors or (all(hosts) and to != "device"):
            return None
        if METADATA_ONLY.match(name):
            return None
        crosses = short in COPIES and (
            len(set(hosts)) == 2 or (to is not None and (to == "host") != hosts[0])
        )
        if name.startswith("c10d::") and plain and getattr(self.local, "started", None) is not None:
            self.force()
            answers = _tensors(args[0])
            result, run = collective(func, args, kwargs, answers)
            work = self._collective(name, args, kwargs)
            spoil(answers)
        elif (
            name.startswith(("c10d::", "_c10d_functional::"))
            or not can_be_late(func)
            or not plain
            or (crosses and not _is_non_blocking(short, args, kwargs))
        ):
            self.force()
            return None
        else:
            later = (args, kwargs)
            if not crosses:  # the host's numbers are those of now
                later = tree_map(
                    lambda e: (
                        e.clone() if isinstance(e, torch.Tensor) and self.is_on_host(e) else e
                    ),
                    later,
                )
            if writes(func):
                result = written(func, args, kwargs)
                new = []
            else:
                # of numbers that may not be there yet: only the shapes count
                result = func(*args, **kwargs)
                new = _tensors(result)
            work = self.note(func, args, kwargs, result)
            spoil(new)
            run = write_later(func, *later, [] if HIDDEN_WRITES.get(name) else new)
        assert work is not None
        late.queue(*work, run)
        return (result,)

    def note(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> tuple[Stream, int, Clock]:
        """Record that an operator has run. Returns the result of `launch`."""
        name = func._schema.name
        if name.startswith("c10d::"):
            return self._collective(name, args, kwargs)
        reads, writes, inputs = [], [], []
        for place, argument, kind in self._kinds_of(func):
            value = args[place] if place < len(args) else kwargs.get(argument)
            tensors = _tensors(value)
            inputs += tensors
            if kind != "nothing":
                (writes if kind == "write" else reads).extend(tensors)
        before = {part.untyped_storage()._cdata for tensor in inputs for part in _parts(tensor)}
        new = [
            part
            for tensor in _tensors(result)
            for part in _parts(tensor)
            if part.untyped_storage()._cdata not in before
        ]
        to = getattr(self.local, "to", None)
        hosts = [self.is_on_host(tensor) for tensor in inputs]
        for tensor in new:
            self.allocate(
                tensor, name, on_host=(bool(hosts) and all(hosts)) if to is None else to == "host"
            )
        work = self.launch(name, reads, [*writes, *new])
        ready = (
            self.cuda.current().clock
            if not all(map(self.is_on_host, [*writes, *new]))
            else self.cuda.host
        )
        if any(
            number > ready.get(stream, 0)
            for tensor in reads
            for stream, number in self.memory_on_host(tensor).items()
        ):
            self._fault(f"{name} reads on the host what a copy may not have written yet")
        short = name.partition("::")[2]
        if short in READ_BY_HOST:
            self.read_by_host(short, inputs)
        elif (
            short == "index"
            and any(tensor.dtype == torch.bool for tensor in inputs[1:])
            and not all(hosts)
        ):
            self.wait_on_host("an index by a mask reads")
        elif short in COPIES:
            self._between(reads, [*writes, *new], _is_non_blocking(short, args, kwargs))
        return work

    def _between(
        self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], non_blocking: bool
    ) -> None:
        """Record a copy, perhaps between host and device."""
        on_host = [tensor for tensor in written if self.is_on_host(tensor)]
        if len({len(on_host) == len(written), *map(self.is_on_host, read)}) == 1:
            return
        if not non_blocking:
            self.wait_on_host("a copy between host and device")
            return
        for tensor in on_host:
            self.memory(tensor).copied = dict(self.cuda.current().clock)

    def _kinds_of(self, func: Any) -> list[tuple[int, str, str]]:
        kinds = self._kinds.get(func)
        if kinds is None:
            schema = func._schema
            kinds = self._kinds[func] = []
            for place, argument in enumerate(schema.arguments):
                alias = argument.alias_info
                kind = "read" if alias is None else "write" if alias.is_write else "nothing"
                if kind == "read" and METADATA_ONLY.match(schema.name):
                    kind = "nothing"
                if argument.name == HIDDEN_WRITES.get(schema.name):
                    kind = "write"
                kinds.append((place, argument.name, kind))
                # in place: most read it, too
                if kind == "write" and schema.name.endswith("_") and place == 0:
                    kinds.append((place, argument.name, "nothing"))
        return kinds

    def _collective(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Stream, int, Clock]:
        group = next(
            (
                str(_group_name(argument))
                for argument in [*args, *kwargs.values()]
                if _group_name(argument)
            ),
            "",
        )
        stream = self._groups.setdefault(group, Stream(name=f"the stream of group {group!r}"))
        tensors = [_tensors(argument) for argument in args]
        reads, writes = tensors[1:2], tensors[:1]
        if name in ("c10d::send",):
            reads = writes
            writes = []
        current = self.cuda.current()
        read = [*itertools.chain(*reads)]
        written = [*itertools.chain(*writes)]
        stream.see(current.clock)
        work = self.launch(name, read, written, stream)
        started = getattr(self.local, "started", None)
        if started is None:
            current.see(stream.clock)
            self.use([*read, *written])
        else:
            started.append((dict(stream.clock), [*written, *read]))
        return work


class Work:
    """Stands in for a `dist.Work` of NCCL."""

    def __init__(
        self,
        work: Any,
        accelerator: Accelerator,
        started: Sequence[tuple[Clock, list[torch.Tensor]]],
    ) -> None:
        self._work = work
        self._accelerator = accelerator
        self._clock: Clock = {
            stream: number for clock, _ in started for stream, number in clock.items()
        }
        self._tensors = [tensor for _, tensors in started for tensor in tensors]

    def wait(self, *args: Any) -> bool:
        with _disable_current_modes():  # gloo copies
            self._work.wait(*args)
        self._accelerator.cuda.current().see(self._clock)
        self._accelerator.use(self._tensors)
        self._tensors = []
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[DEVICE])
        value = self._work.get_future().wait()
        if self._accelerator.late is not None:
            value = self._tensors[: len(value)]  # not the copies
        future.complete(value, self._clock)
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _future_of(accelerator: Accelerator) -> type:
    cuda = accelerator.cuda
    real = torch.futures.Future

    class Future(torch.futures.Future):  # type: ignore[type-arg]
        def __init__(self, *, devices: Any = None) -> None:
            super().__init__()
            self.devices = devices or []
            self.event: Clock = {}

        def __class_getitem__(cls, item: Any) -> Any:
            return real[item]

        def complete(self, result: Any, event: Clock) -> None:
            self.event = dict(event) if self.devices else {}
            super().set_result(result)

        def set_result(self, result: Any) -> None:
            self.complete(result, cuda.current().clock)

        def synchronize(self) -> None:
            """As of torch: the current stream waits for the event, and the allocator knows it."""
            if self.event and self.done():
                cuda.current().see(self.event)
                with contextlib.suppress(RuntimeError):  # it failed
                    tensors = _tensors(super().value())
                    for tensor in tensors:
                        accelerator.keep(tensor, cuda.current())

        def wait(self) -> Any:
            value = super().wait()
            self.synchronize()
            return value

        def then(self, callback: Any) -> Any:
            then = Future(devices=self.devices)

            def call(_: Any) -> None:
                with cuda.on(Stream(name="a stream of callbacks")):
                    self.synchronize()
                    try:
                        then.set_result(callback(self))
                    except Exception as error:
                        then.set_exception(error)

            super().add_done_callback(call)
            return then

    return Future


class _Operators(TorchDispatchMode):
    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping takes as long as a small operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # and sees what it does on the shards
        return self.accelerator.run(func, args, kwargs or {})


def _places(accelerator: Accelerator) -> Iterator[tuple[Any, str, Any]]:
    """Replace the functions that determine what a program with a GPU has on the host: tensors that
    are made without a device or copied to "cpu". A mode for Python functions would be off in
    backward passes.
    """
    local = accelerator.local
    to = _TO

    def made(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            on_device = isinstance(kwargs.get("device"), torch.device)
            with mock.patch.object(local, "to", "device" if on_device else "host", create=True):
                new = factory(*args, **kwargs)
            if factory.__name__ == "tensor":
                accelerator.allocate(new, "torch.tensor", on_host=not on_device)
                if on_device:
                    accelerator.wait_on_host("torch.tensor with a device copies")
            return new

        return make

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if not isinstance(target, (str, torch.device)):
            return to(tensor, *args, **kwargs)
        to_host = isinstance(target, str)
        with mock.patch.object(local, "to", "host" if to_host else "device", create=True):
            return to(
                tensor,
                *args,
                **kwargs | ({"copy": True} if to_host != accelerator.is_on_host(tensor) else {}),
            )

    def read(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def by_host(tensor: torch.Tensor, *args: Any) -> Any:
            accelerator.launch(name, [tensor.detach()], [])
            accelerator.read_by_host(name, [tensor])
            return method(tensor, *args)

        return by_host

    def like(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: (made(factory) if "device" in kwargs else factory)(
            *args, **kwargs
        )

    yield from ((torch, name, made(getattr(torch, name))) for name in FACTORIES)
    yield from ((torch, name, like(getattr(torch, name))) for name in ("empty_like", "zeros_like"))
    yield torch.Tensor, "to", move
    yield torch.Tensor, "cpu", lambda tensor: tensor.to("cpu")
    yield from ((torch.Tensor, name, read(name)) for name in ("tolist", "numpy"))


@contextlib.contextmanager
def simulated_accelerator(late: int | None = None) -> Iterator[Accelerator]:
    """Context manager, for this process and its threads. Models are made, moved to `DEVICE` and
    wrapped inside.

    Args:
        late: the seed of an order in which operators run late; None: each runs when it is called.
    """
    with contextlib.ExitStack() as patches:
        cuda = patches.enter_context(cuda_stand_ins())
        accelerator = Accelerator(cuda, None if late is None else LateExecution(late))
        run = threading.Thread.run
        register = DistributedDataParallel.register_comm_hook
        make = DistributedDataParallel.__init__

        def run_thread(thread: threading.Thread) -> None:
            with _Operators(accelerator):
                run(thread)

        def asynchronous(collective: Callable[..., Any]) -> Callable[..., Any]:
            def begin(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
                started = accelerator.local.started = []
                try:
                    work = Work(collective(*args, async_op=True, **kwargs), accelerator, started)
                finally:
                    accelerator.local.started = None
                return work if async_op else (work.wait(), None)[1]

            return begin

        def wrap(model: Any, *args: Any, **kwargs: Any) -> None:
            accelerator.force()  # the constructor reads memory
            with mock.patch.object(accelerator, "at_once", True):
                make(model, *args, **kwargs)

        def register_comm_hook(model: Any, state: Any, hook: Any) -> None:
            def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
                future = hook(state, bucket)
                # Before DDP's own callback, which waits for the futures on the current stream.
                torch.autograd.Variable._execution_engine.queue_callback(
                    getattr(future, "synchronize", lambda: None)
                )
                return future

            register(model, state, reduce)

        def free(tensor: torch.Tensor) -> None:
            """Free memory as FSDP does: later work of the stream that allocated it may get it."""
            with (
                cuda.on(accelerator.memory(tensor).home),
                torch.autograd._unsafe_preserve_version_counter(tensor),
            ):
                spoil([tensor])

        for owner, name, value in (
            (_fsdp_param, "free_storage", free),
            (torch.cpu, "Stream", functools.partial(cuda.new_stream, None)),
            (torch.cpu, "Event", cuda.new_event),
            (torch.cpu, "current_stream", cuda.current),
            (torch.cpu, "stream", cuda.on),
            (
                torch.Tensor,
                "record_stream",
                lambda tensor, stream: accelerator.keep(tensor, stream),
            ),
            (torch.futures, "Future", _future_of(accelerator)),
            (threading.Thread, "run", run_thread),
            (DistributedDataParallel, "__init__", wrap),
            (DistributedDataParallel, "register_comm_hook", register_comm_hook),
            (cuda, "wait_for", lambda event: accelerator.wait_on_host("an event", event.clock)),
            # The device of a future decides whether it has an event.
            *(
                (module, "new_future", lambda _: new_future(torch.device("cuda", 0)))
                for module in (backward_pass, immediate, driver)
            ),
            (PointToPoint, "applies_to", staticmethod(lambda group, device: False)),
            *((dist, name, asynchronous(getattr(dist, name))) for name in COLLECTIVES),
            *_places(accelerator),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(computing_with("torch"))
        patches.enter_context(_Operators(accelerator))
        patches.callback(setattr, accelerator, "running", False)
        if accelerator.late is not None:
            save = torch.save
            patches.enter_context(
                mock.patch.object(
                    torch, "save", lambda *arguments: (accelerator.force(), save(*arguments))
                )
            )
            patches.callback(accelerator.late.run_all)
        yield accelerator


# ---- helpers -------------------------------------------------------------------------------------


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [tensor for item in value for tensor in _tensors(item)]
        if isinstance(value, (list, tuple))
        else []
    )


def _is_non_blocking(copy: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", copy == "copy_" and args[2:]))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors in it."""
    if tensor.is_sparse:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    begin = tensor.storage_offset() * size
    return begin, begin + (last + 1) * size


def _group_name(value: Any) -> str | None:
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return str(dist.ProcessGroup.unbox(value).group_name)
    return None


def _place() -> tuple[str, bool]:
    """Return the innermost line of the packages, and True; the innermost line of the tests if there
    is none.
    """
    in_tests = None
    for frame, number in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if re.search(r"/(commhooks|lightning_commhooks|accelerate_commhooks)/", file):
            return _described(file, number), True
        if (
            in_tests is None
            and "/tests/" in file
            and not file.endswith(("/simulated_accelerator.py", "/cuda_stand_ins.py"))
        ):
            in_tests = _described(file, number)
    return in_tests or "", False


def _described(file: str, number: int) -> str:
    return f"({file.rpartition('/')[2]}:{number} {linecache.getline(file, number).strip()})"

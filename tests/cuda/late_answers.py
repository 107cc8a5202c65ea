"""Collectives that answer late: whoever reads a buffer before it has waited for the answer reads
NaN.

One GPU shows no race by itself: ranks on gloo block the host, and a single rank on NCCL exchanges
nothing. So each asynchronous collective of the body works on copies, fills the caller's tensors
with NaN (bytes with 255) at once, and writes the results into them later: on CUDA after a sleep on
another stream, on the CPU after a sleep in another thread. `wait()` does what a backend's does: on
CUDA it makes the current stream wait for an event, on the CPU it blocks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commhooks.comm.collectives import ALL_GATHER, PointToPoint

DELAY_S = 0.003
LIMIT_S = 60.0
_CYCLES_PER_S = 2_000_000_000  # at least: no GPU runs much faster


@dataclass
class Seen:
    """How many collectives answered late."""

    answers: int = 0


@contextlib.contextmanager
def late_answers() -> Iterator[Seen]:
    """In the body each asynchronous collective of a dense tensor answers `DELAY_S` late."""
    seen = Seen()
    reduce = dist.all_reduce
    gather = getattr(dist, ALL_GATHER)
    cast = dist.broadcast
    exchange = dist.all_to_all_single
    by_messages = PointToPoint.exchange

    def late(tensors: Sequence[torch.Tensor], begin: Callable[[list[torch.Tensor]], Any]) -> Any:
        """`begin` is called with copies of `tensors`, in which the answer will be."""
        seen.answers += 1
        results = [tensor.clone() for tensor in tensors]
        work = begin(results)
        for tensor in tensors:
            tensor.fill_(
                float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            )
        return (_LateOnCuda if tensors[0].is_cuda else _LateOnHost)(tensors, results, work)

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op or tensor.is_sparse:
            return reduce(tensor, *args, async_op=async_op, **kwargs)
        return late([tensor], lambda results: reduce(results[0], *args, async_op=True, **kwargs))

    def all_gather(rows: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return gather(rows, *args, **kwargs)
        return late([rows], lambda results: gather(results[0], *args, async_op=True, **kwargs))

    def broadcast(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return cast(tensor, *args, **kwargs)
        return late([tensor], lambda results: cast(results[0], *args, async_op=True, **kwargs))

    def all_to_all_single(
        output: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if not async_op:
            return exchange(output, *args, **kwargs)
        return late([output], lambda results: exchange(results[0], *args, async_op=True, **kwargs))

    def messages(
        self: PointToPoint,
        sent: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> Any:
        return late(arriving, lambda results: by_messages(self, sent, results, group))

    replaced = {
        "all_reduce": all_reduce,
        ALL_GATHER: all_gather,
        "broadcast": broadcast,
        "all_to_all_single": all_to_all_single,
    }
    with (
        mock.patch.multiple(dist, **replaced),
        mock.patch.object(PointToPoint, "exchange", messages),
    ):
        yield seen


def sleep_on(device: torch.device) -> None:
    """Keep the current stream of a GPU busy; the host goes on. On the CPU nothing."""
    if device.type != "cuda":
        return
    if not hasattr(torch.cuda, "_sleep"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.cuda._sleep: late_answers.py needs something"
            " else"
        )
    # private, torch 2.11 to 2.13: there is no public one
    torch.cuda._sleep(int(DELAY_S * _CYCLES_PER_S))


class _LateOnCuda:
    """Stands for a `dist.Work`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], work: Any
    ) -> None:
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work.wait()
            sleep_on(self._device)
            for tensor, result in zip(tensors, results, strict=True):
                result.record_stream(self._stream)
                tensor.copy_(result)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def wait(self) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future


class _LateOnHost:
    """Stands for a `dist.Work`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], work: Any
    ) -> None:
        self._future: Any = torch.futures.Future()

        def answer() -> None:
            try:
                work.wait()
                time.sleep(DELAY_S)
                for tensor, result in zip(tensors, results, strict=True):
                    tensor.copy_(result)
            except RuntimeError as error:
                self._future.set_exception(error)
            else:
                self._future.set_result(list(tensors))

        self._thread = threading.Thread(target=answer, name="late answer", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        self._thread.join(LIMIT_S)
        if not self._future.done():
            raise RuntimeError(f"no answer within {LIMIT_S:g} s")
        self._future.value()  # raises what the backend has raised
        return True

    def get_future(self) -> Any:
        return self._future

"""All-reduces that answer late: whoever reads a buffer before it has waited for the answer reads NaN.

One GPU shows no race by itself: ranks on gloo block the host, and a single rank on NCCL exchanges nothing. So each
asynchronous all-reduce of the body reduces a copy, fills the caller's tensor with NaN at once, and writes the result
into it later: on CUDA after a sleep on another stream, on the CPU after a sleep in another thread. `wait()` does what a
backend's does: on CUDA it makes the current stream wait for an event, on the CPU it blocks.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

DELAY_S = 0.003
LIMIT_S = 60.0
_CYCLES_PER_S = 2_000_000_000  # at least: no GPU runs much faster


@dataclass
class Seen:
    """How many all-reduces answered late."""

    answers: int = 0


@contextlib.contextmanager
def late_answers(delay_s: float = DELAY_S) -> Iterator[Seen]:
    """In the body every asynchronous `dist.all_reduce` of dense tensors answers `delay_s` seconds late, or more."""
    reduce, seen = dist.all_reduce, Seen()

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op or tensor.is_sparse:
            return reduce(tensor, *args, async_op=async_op, **kwargs)
        seen.answers += 1
        result = tensor.clone()
        work = reduce(result, *args, async_op=True, **kwargs)
        tensor.fill_(float("nan"))
        return (_LateOnCuda if tensor.is_cuda else _LateOnHost)(tensor, result, work, delay_s)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield seen


def sleep_on(device: torch.device, seconds: float = DELAY_S) -> None:
    """Keep the current stream of a GPU busy; the host goes on. On the CPU nothing."""
    if device.type != "cuda":
        return
    if not hasattr(torch.cuda, "_sleep"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.cuda._sleep: late_answers.py needs something else")
    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # private, torch 2.11 to 2.13: there is no public one


class _LateOnCuda:
    """Stands for a `dist.Work`."""

    def __init__(self, tensor: torch.Tensor, result: torch.Tensor, work: Any, delay_s: float) -> None:
        self._tensor = tensor
        self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        result.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            work.wait()
            sleep_on(tensor.device, delay_s)
            tensor.copy_(result)
            self._event = torch.cuda.Event()
            self._event.record(self._stream)

    def wait(self) -> bool:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future(devices=[self._tensor.device])
        with torch.cuda.stream(self._stream):
            future.set_result([self._tensor])
        return future


class _LateOnHost:
    """Stands for a `dist.Work`."""

    def __init__(self, tensor: torch.Tensor, result: torch.Tensor, work: Any, delay_s: float) -> None:
        self._future: Any = torch.futures.Future()

        def answer() -> None:
            try:
                work.wait()
                time.sleep(delay_s)
                tensor.copy_(result)
            except RuntimeError as error:
                self._future.set_exception(error)
            else:
                self._future.set_result([tensor])

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

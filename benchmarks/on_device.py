"""The cost of some work on a device: its time, the host's time, kernels, and operations that made the host wait."""

import os
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler of torch 2.13 writes lines to stderr

import torch
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


class Cuda:
    device = torch.device("cuda")

    def times(self, work: Work) -> tuple[float, float]:
        """Return milliseconds on the current stream, and on the host until `work` returns."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        work()
        host_ms = 1000 * (time.perf_counter() - started)
        end.record()  # DDP has made this stream wait for the hook's futures
        torch.cuda.synchronize()
        return begin.elapsed_time(end), host_ms

    def waits(self, work: Work) -> int:
        """Count the operations in `work` that made the host wait."""
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return count_waits(str(warning.message) for warning in seen)

    def profiled(self, work: Work) -> tuple[int, int]:
        """Return the kernels of `work`, and the calls that wait for the device."""
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
        events = profiler.events() or []
        on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(map(is_kernel, on_device)), sum(event.name in WAITING for event in events)


class Cpu:
    """A rehearsal without a GPU: the host's time, and operators instead of kernels."""

    device = torch.device("cpu")

    def times(self, work: Work) -> tuple[float, float]:
        started = time.perf_counter()
        work()
        passed_ms = 1000 * (time.perf_counter() - started)
        return passed_ms, passed_ms

    def waits(self, work: Work) -> int:
        work()
        return 0

    def profiled(self, work: Work) -> tuple[int, int]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            work()
        return sum(event.name.startswith("aten::") for event in profiler.events() or []), 0


def count_waits(texts: Iterable[str]) -> int:
    """Count the warnings about waits. `set_sync_debug_mode` itself also warns, that it does not see all "synchronizing
    operations"."""
    return sum("called a synchronizing" in text for text in texts)


def is_kernel(event: Any) -> bool:
    """Whether an event of the device is a kernel. It is not if it is a copy, a fill, or the range that an annotation on
    the host covers on the device, such as "nccl:all_reduce" or DDP's own."""
    if event.name.startswith(("Memcpy", "Memset", "nccl:", "DistributedDataParallel.", "torch.distributed.")):
        return False
    return not getattr(event, "is_user_annotation", False)

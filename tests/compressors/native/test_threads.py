"""The native kernel uses torch's number of threads, and no bit depends on it."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from commhooks.compressors.native import tables as kernel_tables
from commhooks.compressors.powersgd.cpu import NativeProducts
from tests.support import warm
from tests.support.compilers import needs_compiler

SHAPES = [
    (1, 1),
    (7, 1),
    (1, 9),
    (5, 3),
    (3, 50_000),
    (50_000, 3),
    (640, 1061),
    (600, 512),
    (65, 4608),
    (9001, 33),
]
pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _all_steps(dtype: torch.dtype, rank: int) -> list[torch.Tensor]:
    """Compute all shapes from fixed numbers in one call, so that the threads have work."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(n, m, min(n, m, rank)) for n, m in SHAPES]
    products = NativeProducts(shapes, dtype)

    def draw() -> list[torch.Tensor]:
        return [torch.randn(n, m, generator=generator, dtype=dtype) for n, m, _ in shapes]

    def refill(i: int) -> torch.Tensor:
        raise AssertionError("the rows of random numbers are independent")

    delta, residual = draw(), draw()
    mean_q = [torch.randn(r, m, generator=generator, dtype=dtype) for _, m, r in shapes]
    products.unit_rows(mean_q, refill)
    products.form_p(delta, residual, 0.5)
    largest = products.largest.clone()
    rows = [row.clone() for row in products.p]
    products.orthonormalize(rows, refill)
    products.form_q(delta)
    products.reconstruct(range(len(shapes)), delta, residual, mean_q)
    return [*delta, *residual, *rows, *products.p, *products.q, largest]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float64, 3), (torch.float32, 16)], ids=str)
def test_no_bit_depends_on_the_number_of_threads(
    threads: Callable[[int], None], dtype: torch.dtype, rank: int
) -> None:
    results = []
    for number in (1, 3, 2, 3):
        threads(number)
        results.append(_all_steps(dtype, rank))
    assert all(x.isfinite().all() for x in results[0])
    assert all(_same(first, second) for first, second in pairwise(results))


class _Team:
    """Stands for OpenMP: runs the function in Python threads and counts them."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        kind = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        )
        self._callback = kind(self._start)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def _start(self, function: int, argument: int, number: int, flags: int) -> None:
        self.asked.append(number)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        team = [threading.Thread(target=call, args=(argument,)) for _ in range(number)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join(timeout=60)


def test_the_kernel_uses_as_many_threads_as_torch(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    alone = _all_steps(torch.float32, 4)
    team = _Team()
    monkeypatch.setattr(kernel_tables, "_entry_point", lambda: team.address)
    assert _same(_all_steps(torch.float32, 4), alone) and team.asked == []
    threads(3)
    products = NativeProducts([(100, 600, 1)], torch.float32)  # small work wakes no threads
    products.q[0].fill_(1)
    products.form_p([torch.ones(100, 600)], None, 1.0)
    assert team.asked == [] and products.p[0][0, 99] == 600 and kernel_tables.team(2**62)[1] == 3
    assert _same(_all_steps(torch.float32, 4), alone)
    assert len(team.asked) >= 4 and set(team.asked) == {3}
    monkeypatch.setattr(kernel_tables, "_entry_point", lambda: None)  # another OpenMP
    assert _same(_all_steps(torch.float32, 4), alone) and kernel_tables.team(2**62)[1] == 1


def test_several_threads_may_call_the_kernel_at_once(threads: Callable[[int], None]) -> None:
    threads(2)
    expected = {rank: _all_steps(torch.float32, rank) for rank in (2, 5)}
    wrong = []

    def work(rank: int) -> None:
        torch.set_num_threads(2)  # a setting of each thread
        wrong.extend(
            rank for _ in range(3) if not _same(_all_steps(torch.float32, rank), expected[rank])
        )

    callers = [threading.Thread(target=work, args=(rank,)) for rank in (2, 5, 2)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in callers)


FORKED = """
import os, signal, sys, torch
from commhooks.compressors.native import tables as kernel_tables
from commhooks.compressors.powersgd.cpu import NativeProducts
torch.set_num_threads(2)
products = NativeProducts([(600, 600, 1)], torch.float32)
products.q[0].fill_(1)
delta = torch.ones(600, 600)
def step():
    products.form_p([delta], None, 1.0)
    return int(products.p[0].sum())
before = kernel_tables.team(2**62)[1]
torch.ones(2**22).sum()  # in torch's threads; the kernel has not run yet
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends it
    os._exit(0 if (kernel_tables.team(2**62)[1], step()) == (1, 600 * 600) else 1)
print(before, os.waitpid(child, 0)[1], kernel_tables.team(2**62)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have() -> None:
    done = subprocess.run(
        [warm.python(), "-c", FORKED], capture_output=True, text=True, timeout=280, check=True
    )
    before, status, after = done.stdout.split()
    assert status == "0" and before == after

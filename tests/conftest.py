"""Fixtures for all tests: the clean environment, the worker pool, and the guard against leaked process groups."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clean_env  # of examples/, where the demo has it from too
import pytest

KEEP_CUDA = os.environ.get("COMMHOOKS_TEST_CUDA") == "1"


# Whoever starts the tests in the background makes them ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_hf_home = tempfile.mkdtemp(prefix="commhooks-hf-")
atexit.register(shutil.rmtree, _hf_home, ignore_errors=True)


def _set_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


# Before torch is imported, which reads the number of threads and the visible devices; the workers inherit it.
_set_environ(clean_env.cleaned(os.environ, _hf_home, keep_cuda=KEEP_CUDA))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from workers import WorkerPool  # noqa: E402

FRAMEWORKS = {
    "with_lightning": ["lightning.pytorch"],
    "with_accelerate": ["accelerate"],
    "with_transformers": ["accelerate", "transformers.trainer"],
}


@pytest.hookimpl(wrapper=True)  # so that this is done before xdist reads its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        for framework in FRAMEWORKS.get(item.path.parent.name, []):
            item.add_marker(pytest.mark.frameworks(framework))
        # A file at a time, and all that need a framework in one process and its workers, which import it once.
        frameworks = item.get_closest_marker("frameworks")
        item.add_marker(pytest.mark.xdist_group("frameworks" if frameworks else item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("frameworks") is None)  # the long group first
    if not (KEEP_CUDA and torch.cuda.is_available()):
        skip = pytest.mark.skip(reason="needs a CUDA device and COMMHOOKS_TEST_CUDA=1")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)
    return (yield)


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Every test starts without the variables of launchers and batch systems, and what it sets ends with it."""
    before = clean_env.cleaned(os.environ, _hf_home, keep_cuda=KEEP_CUDA)
    _set_environ(before)
    yield
    _set_environ(before)


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """A process group that a test leaves behind in the main process fails that test, not the next one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a torch.distributed process group behind in the main process")


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest, worker_pool: WorkerPool) -> Callable[..., list[Any]]:
    """`run_ranks(fn, *args, world_size=2, timeout_s=60, init=True, **kwargs)`: see `workers.WorkerPool.run`."""
    worker_pool.import_first(*(name for mark in request.node.iter_markers("frameworks") for name in mark.args))
    return worker_pool.run


@pytest.fixture(scope="session")
def saved_by_two(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Of the tests with Accelerate: see `accelerate_checkpoints.save_by_two`."""
    from accelerate_checkpoints import save_by_two  # Accelerate takes a while to import

    return save_by_two(worker_pool, tmp_path_factory)


@pytest.fixture
def checkpoint(saved_by_two: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(saved_by_two[0], tmp_path / "checkpoint"))

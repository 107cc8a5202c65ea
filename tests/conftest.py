"""Fixtures for all tests: a clean environment, the worker pool, and guards against leaks."""

import atexit
import gc
import multiprocessing.spawn
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clean_env  # of examples/, where the demo has it from too
import pytest

gc.disable()  # until everything is imported and collected, where it only takes time
KEEP_CUDA = os.environ.get("COMMHOOKS_TEST_CUDA") == "1"


# Whoever starts the tests in the background makes them ignore Ctrl-C, and so would every process
# that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_hf_home = tempfile.mkdtemp(prefix="commhooks-hf-")
atexit.register(shutil.rmtree, _hf_home, ignore_errors=True)


def _set_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


# Else every process compiles the sources of commhooks and of the tests anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported, which reads the number of threads and the visible devices; the workers
# inherit it.
_set_environ(clean_env.cleaned(os.environ, _hf_home, keep_cuda=KEEP_CUDA))

from tests.support import warm  # noqa: E402

if TYPE_CHECKING:
    from tests.support.workers import WorkerPool

# What takes long to import: where it is needed, by folder or file. It is imported once, see
# `warm.py`.
LIGHTNING, ACCELERATE, TRANSFORMERS = "lightning.pytorch", "accelerate", "transformers.trainer"
FRAMEWORKS = {
    "with_lightning": [LIGHTNING],
    "with_accelerate": [ACCELERATE],
    "with_transformers": [ACCELERATE, TRANSFORMERS],
    "test_examples.py": [ACCELERATE],
    "test_chaos.py": [LIGHTNING],
    "test_demo.py": [LIGHTNING, ACCELERATE],
    "test_docs.py": [LIGHTNING, ACCELERATE, TRANSFORMERS],
    "test_files.py": [LIGHTNING, ACCELERATE],
    "test_hostile_files.py": [LIGHTNING, ACCELERATE],
    "test_resume.py": [LIGHTNING, ACCELERATE],
    "test_own_compressor.py": [LIGHTNING, ACCELERATE, TRANSFORMERS],
    "test_packaging.py": [LIGHTNING, ACCELERATE],
}


# The files that take longest begin first with `pytest -n`, so that none is left at the end. For
# about half of that time, tests of machines, time limits and whole scripts wait for something. In
# this order two of four processes run such tests while the others compute, all the time.
FIRST = (
    "test_machines.py",
    "test_in_flight.py",
    "test_docs.py",
    "test_modes.py",
    "test_simulated_accelerator.py",
    "test_every_compressor.py",
    "test_shards.py",
    "test_empty_parameters.py",
    "test_change.py",
    "test_cpu.py",
    "test_fully_shard_rounds.py",
    "test_accelerate_saving.py",
    "test_saving.py",
    "test_auto_nodes.py",
    "test_hierarchy.py",
    "test_site.py",
    "test_benchmarks.py",
    "test_shards_modes.py",
    "test_hard_gradients.py",
    "test_lightning_config.py",
    "test_check.py",
    "test_pytorch_lightning.py",
    "test_auto_training.py",
    "test_packaging.py",
    "test_shards_streams.py",
    "test_options.py",
    "test_outer_steps.py",
    "test_threads.py",
    "test_resume.py",
    "test_rounds.py",
    "test_fully_shard_promises.py",
    "test_auto_resume.py",
    "test_library.py",
    "test_edges.py",
    "test_lightning_fsdp2.py",
    "test_examples.py",
    "test_decide.py",
    "test_common_state.py",
    "test_lightning_members.py",
    "test_demo.py",
    "test_lightning_training.py",
    "test_native_bits.py",
    "test_accelerate_attached.py",
    "test_fully_shard_modes.py",
    "test_accelerate_shards.py",
    "test_ddp_options.py",
    "test_accelerate_replicas.py",
    "test_unused.py",
    "test_lighthouse.py",
    "test_quantized_cases.py",
    "test_accelerate_data_order.py",
    "test_powersgd_against_oracle.py",
    "test_figures.py",
    "test_addresses.py",
    "test_hostile_files.py",
    "test_close.py",
    "test_accelerator_factors.py",
    "test_late_answers.py",
    "test_transformers_replicas.py",
    "test_named_collectives.py",
    "test_transformers_members.py",
    "test_accelerate_members.py",
    "test_learning_rate.py",
    "test_metrics.py",
    "test_transformers_trainer.py",
    "test_fabric.py",
    "test_lightning_loading.py",
    "test_sources.py",
    "test_ends.py",
    "test_accelerator.py",
    "test_lightning_shards.py",
    "test_interrupted_trainer.py",
    "test_schedule.py",
    "test_quantized_against_oracle.py",
    "test_first_pass.py",
    "test_make_cuda.py",
    "test_replicate.py",
    "test_casts_between_nodes.py",
    "test_lost_ranks.py",
    "test_chaos.py",
)


_in_the_servers: list[str] = []
"""What `pytest -n` has imported there, so that no worker ends because another test needs it."""


def _frameworks(nodeid: str) -> list[str]:
    path = Path(nodeid.partition("::")[0])
    return FRAMEWORKS.get(path.parent.name) or FRAMEWORKS.get(path.name) or []


def pytest_configure(config: pytest.Config) -> None:
    """The processes of `pytest -n` share the servers of `warm.py` and are forked there, because
    each of them imports all modules with tests, and with them all frameworks: 15 s of CPU time.
    """
    if hasattr(config, "workerinput"):
        _in_the_servers.extend(config.workerinput["modules"])
        sys.executable = config.workerinput["python"]  # some tests need a process that is started
        multiprocessing.spawn.set_executable(sys.executable)
    elif (
        config.getoption("numprocesses", None) and not KEEP_CUDA
    ):  # this process itself needs no torch
        warm.share()
        chosen = [
            name
            for name in FRAMEWORKS
            if config.args == config.getini("testpaths") or name in str(config.args)
        ]
        _in_the_servers.extend(sorted({module for name in chosen for module in FRAMEWORKS[name]}))
        with ThreadPoolExecutor() as both:
            pythons = list(
                both.map(lambda server: warm.python(*_in_the_servers, server=server), (0, 1))
            )
        config.option.tx = [
            f"popen//python={pythons[index % 2]}" for index in range(len(config.option.tx))
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput.update(python=sys.executable, modules=_in_the_servers)


def _turn(item: pytest.Item) -> int:
    name = Path(item.nodeid.partition("::")[0]).name
    return FIRST.index(name) if name in FIRST else len(FIRST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)
    import torch

    if not (KEEP_CUDA and torch.cuda.is_available()):
        skip = pytest.mark.skip(reason="needs a CUDA device: make test-cuda")
        for item in items:
            # not its keywords: a folder has that name
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: no later collection needs to look at them
    gc.enable()


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Every test starts without the variables of launchers, and what it sets ends with it."""
    before = clean_env.cleaned(os.environ, _hf_home, keep_cuda=KEEP_CUDA)
    _set_environ(before)
    yield
    _set_environ(before)


@pytest.fixture(autouse=True)
def forgotten_registrations() -> Iterator[None]:
    from tests.support.registries import registries_as_before

    with registries_as_before():
        yield


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    """Fail the test that leaves a process group behind in the main process, not the next one."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a torch.distributed process group behind in the main process")


@pytest.fixture(autouse=True)
def gradients_stay_on() -> Iterator[None]:
    """Fail the test that leaves autograd off, as `no_grad` around a generator's yield does."""
    import torch

    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("the test left autograd switched off in the main process")


@pytest.fixture(scope="session")
def worker_pool() -> "Iterator[WorkerPool]":
    from tests.support.compilers import compile_kernels
    from tests.support.workers import WorkerPool

    compile_kernels()  # some tests give their ranks less time than that may take
    pool = WorkerPool()
    pool.import_first(*_in_the_servers)
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(
    request: pytest.FixtureRequest, worker_pool: "WorkerPool"
) -> Callable[..., list[Any]]:
    """Return `WorkerPool.run`."""
    worker_pool.import_first(*_frameworks(request.node.nodeid))
    return worker_pool.run

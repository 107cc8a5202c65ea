"""On CUDA the codec, the caller and a saving thread wait for what they read (with stand-ins)."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from commhooks.comm import collectives
from commhooks.engine.backward_pass import BackwardPass
from commhooks.gradients import precision
from tests.support.cuda_stand_ins import Cuda, Stream, cuda_stand_ins
from tests.support.ddp_steps import batch, mlp, process_group_of_one, wrap
from tests.support.inside import session_of

pytestmark = pytest.mark.timeout(60)

STEPS = 3
NEXT_P = f"P of bucket 0 at step <= {STEPS}"


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """Names what hooks send, and commits: "commit 1" is the first."""
    start = collectives.start
    commit = BackwardPass.commit
    commits = iter(range(1, 1000))

    def named_start(send: Any, group: Any, counters: Any, where: str = "", *rest: Any) -> Any:
        cuda.queue(f"{send.what} of {where}")
        return start(send, group, counters, where, *rest)

    def named_commit(self: BackwardPass, good: Any) -> None:
        cuda.queue(f"commit {next(commits)}")
        commit(self, good)

    with (
        process_group_of_one(),
        cuda_stand_ins() as cuda,
        mock.patch.object(collectives, "start", named_start),
        mock.patch.object(BackwardPass, "commit", named_commit),
    ):
        yield cuda


class Training:
    """A model with a bucket per layer."""

    def __init__(self) -> None:
        self.model = mlp()
        self.ddp = wrap(self.model)
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}
        self.hook = commhooks.attach(self.ddp, "powerSGD", hook_options=options)

    def step(self, steps: int = 1) -> "Training":
        for number in range(steps):
            self.ddp.zero_grad()
            self.ddp(batch(number)).square().mean().backward()
        return self

    def step_with(self, in_the_middle: Callable[[], Any]) -> None:
        """Run a step that calls `in_the_middle` once its first bucket has been sent."""
        handle = self.model[2].register_full_backward_hook(lambda *_: in_the_middle())
        self.step()
        handle.remove()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_mps_and_the_cpu_have_no_streams(kind: str) -> None:
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device(kind)):
        assert precision.has_streams(torch.device(kind, 0)) == (kind != "mps")
        assert not precision.has_streams(torch.device("cpu"))
        assert not precision.is_capturing(torch.device("cpu"))
    assert not precision.has_streams(torch.device("cpu"))


def test_a_thread_that_saves_waits_for_the_latest_commit_only(cuda: Cuda) -> None:
    training = Training().step(STEPS)
    saved = []

    def save() -> None:
        cuda.queue("kernels of backward")
        assert NEXT_P in cuda.codec.after
        thread = threading.Thread(target=lambda: saved.append(training.hook.state_dict("mean")))
        thread.start()
        thread.join()
        waits = cuda.host_waits[thread]
        assert len(waits) > 6 and all(f"commit {STEPS}" in wait for wait in waits)
        assert not any(NEXT_P in wait or "kernels of backward" in wait for wait in waits)

    training.step_with(save)
    assert saved[0]["step"] == STEPS and saved[0]["exact"]


def test_all_hooks_of_a_device_share_one_stream_of_high_priority(cuda: Cuda) -> None:
    for _ in range(3):
        Training().step(2).hook.stats()
    # that of the codec, and that of readers
    assert sorted(stream.priority for stream in cuda.made) == [
        -1,
        0,
    ]


def test_a_commit_that_failed_is_waited_for_too(cuda: Cuda) -> None:
    training = Training().step(STEPS)
    reader = Stream()

    def fail(self: BackwardPass, good: Any) -> None:
        cuda.queue("half a commit")
        raise RuntimeError("in the middle of a commit")

    with (
        mock.patch.object(BackwardPass, "commit", fail),
        pytest.raises(RuntimeError, match="in the middle"),
    ):
        training.step()
    with cuda.on(reader):
        training.hook.norms()
    assert "half a commit" in reader.after


def test_labels_are_upper_bounds_until_the_host_has_read_the_outcomes(cuda: Cuda) -> None:
    training = Training().step(5)
    assert session_of(training.hook).counters.last_issued.endswith("at step <= 4")
    assert training.hook.stats()["step"] == 5
    training.step()
    assert session_of(training.hook).counters.last_issued.endswith("at step 5")


@pytest.mark.parametrize("on_cuda", [True, False])
def test_statistics_are_logged_at_their_frequency(cuda: Cuda, on_cuda: bool, caplog: Any) -> None:
    options = {"start_powerSGD_iter": 0, "compression_stats_logging_frequency": 2}
    ddp = wrap(mlp())
    commhooks.attach(ddp, "powerSGD", hook_options=options)
    with caplog.at_level("INFO", "commhooks.engine"), contextlib.ExitStack() as on_the_cpu:
        if not on_cuda:
            on_the_cpu.enter_context(
                mock.patch("commhooks.gradients.precision.is_host_readable", lambda device: True)
            )
        for number in range(6):
            ddp(batch(number)).square().mean().backward()
    steps = [
        line.split(",")[0]
        for line in caplog.messages
        if line.startswith("Compression stats: iter ")
    ]
    bound = "<= " if on_cuda else ""
    assert steps == [f"Compression stats: iter {step}" for step in ("0", f"{bound}2", f"{bound}4")]

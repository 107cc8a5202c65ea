"""The memory of outer steps: few buffers at a time, and anchor and momentum in host memory beside
an accelerator, for which the CPU stands here.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import commhooks
from commhooks.comm import collectives
from commhooks.local_steps import exchange, flat_weights, offload, outer_state, outer_step
from commhooks.local_steps.outer_steps import OuterSteps
from tests.support.cuda_stand_ins import cuda_stand_ins, storage
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import masks
from tests.support.training import Run, plain

SEVERAL = 1000  # bytes in a buffer of weights, so that there are several


@pytest.fixture(autouse=True)
def several_buffers() -> Iterator[None]:
    with mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL):
        yield


@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _resumed(on_accelerator: bool, config: commhooks.DiLoCo) -> Any:
    """Saved in mid-round and loaded; also what the plan says, and how often state was moved to the
    host.
    """
    with (
        masks(on_accelerator),
        mock.patch.object(outer_state, "to_host", wraps=offload.to_host) as moved,
    ):
        saved = Run.new(hook=config).train(5).save(residual="mean")
        run = Run.new(hook=config).load(saved).train(5)
        memory = run.hook.plan().memory
        return (
            run.weights(),
            plain(saved["hook"]["parameters"]),
            moved.call_count,
            memory.factors,
            memory.host,
        )


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_state_in_host_memory_changes_no_bit(run_ranks, wire):
    config = commhooks.DiLoCo(sync_every=3, outer_lr=0.7, outer_momentum=0.5, wire=wire)
    here, there = (run_ranks(_resumed, on_accelerator, config) for on_accelerator in (False, True))
    for (weights, saved, moved, kept, host), (
        same,
        same_saved,
        also_moved,
        on_device,
        in_host,
    ) in zip(here, there, strict=True):
        assert torch.equal(weights, same) and saved == same_saved
        assert (moved, host, on_device) == (0, 0, 0)
        # the anchor at the start, and both after the load
        assert also_moved >= 3 * len(saved) and in_host == kept


def test_offload_can_be_switched_off():
    with process_group_of_one(), masks():
        memory = Run.new(hook=commhooks.DiLoCo(offload=False)).hook.plan().memory
        assert memory.host == 0 < memory.factors
        text = str(Run.new(hook="diloco").hook.plan())
        assert "MB of host memory" in text or "kB of host memory" in text


def test_the_copies_are_ordered_with_the_outer_step():
    """By streams: the host waits for none of them."""
    made: list[str] = []
    fetched: list[torch.Tensor] = []
    returned: list[torch.Tensor] = []
    copying, fetch, put_back = offload.copying, offload.fetch, offload.put_back
    with process_group_of_one(), cuda_stand_ins() as cuda, contextlib.ExitStack() as patches:
        copy_streams = set()

        @contextlib.contextmanager
        def named(device: torch.device, *, after_current: bool) -> Iterator[None]:
            name = f"{'back' if after_current else 'here'} {len(made)}"
            cuda.queue(f"before {name}")
            with copying(device, after_current=after_current):
                assert (f"before {name}" in cuda.current().after) == after_current
                copy_streams.add(cuda.current())
                cuda.queue(name)
                made.append(name)
                yield

        def ordered(function: Any) -> Any:
            def checked(*args: Any, **kwargs: Any) -> Any:
                assert {each for each in made if each.startswith("here")} <= cuda.current().after
                return function(*args, **kwargs)

            return checked

        def noting_fetch(*args: Any) -> Any:
            found = fetch(*args)
            fetched.extend(found.values())
            return found

        def noting_put_back(values: Any, *args: Any) -> None:
            returned.extend(values.values())
            put_back(values, *args)

        for owner, name, value in (
            (offload, "copying", named),
            (outer_step, "fetch", noting_fetch),
            (outer_step, "put_back", noting_put_back),
            (outer_step, "chosen", ordered(outer_step.chosen)),
            (collectives, "start", ordered(collectives.start)),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        run = Run.new(
            hook=commhooks.DiLoCo(sync_every=1, outer_momentum=0.5, wire="float32")
        ).train(2)
        (copy_stream,) = copy_streams
        assert copy_stream is not cuda.default and copy_stream.priority == 0
        _, committed = run.hook._hook.driver.outer.held._mark._at  # type: ignore[union-attr]
        assert set(made) <= committed.after and len(made) > 8
        assert all((storage(each), cuda.default) in cuda.kept for each in fetched)
        assert all((storage(each), copy_stream) in cuda.kept for each in returned)
        assert fetched and len(returned) >= len(fetched)


def _in_flight(wire: str) -> tuple[int, int, int]:
    """The most exchanges that are under way at one time, the most buffers with weights that are
    alive, and the number of all.
    """
    made: list[Any] = []
    running = most_running = most_alive = 0
    packed, finish = flat_weights.packed, OuterSteps._finish

    def counted(*given: Any) -> torch.Tensor:
        nonlocal running, most_running, most_alive
        flat = packed(*given)
        made.append(weakref.ref(flat))
        most_alive = max(most_alive, sum(each() is not None for each in made))
        running += 1
        most_running = max(most_running, running)
        return flat

    def finished(*given: Any) -> torch.Tensor:
        nonlocal running
        running -= 1
        return finish(*given)

    with (
        mock.patch.object(exchange, "packed", counted),
        mock.patch.object(OuterSteps, "_finish", finished),
        mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL),
    ):
        Run.new(hook=commhooks.DiLoCo(sync_every=2, wire=wire)).train(2)
    return most_running, most_alive, len(made)


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_two_buffers_are_exchanged_at_a_time(run_ranks, wire):
    for most_running, most_alive, count in run_ranks(_in_flight, wire):
        assert most_running == 2
        assert most_alive <= 3 < count  # a thread of gloo may hold one a moment longer


def test_the_plan_counts_two_buffers():
    with process_group_of_one():
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(16)]
        run = Run.new(torch.nn.Sequential(*layers), hook=commhooks.LocalSGD(sync_every=1))
        assert run.hook.plan().memory.copies == 2 * SEVERAL < 16 * 8 * 8 * 4

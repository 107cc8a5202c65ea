"""Profiles name hook calls, exchanges and kernels; otherwise nothing is recorded."""

from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from commhooks.compressors.native import library
from commhooks.gradients import profiling
from tests.support.ddp_steps import process_group_of_one
from tests.support.training import Run


@pytest.mark.skipif(library.is_switched_off(), reason="the native kernels are turned off")
def test_a_profile_names_the_hook_and_its_kernels() -> None:
    with process_group_of_one():
        run = Run.new(hook="int8", hook_options={"start_iter": 0, "block_size": 32}).train(2)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run.train(1)
        buckets = len(run.hook.plan().buckets)
    counts = {
        event.key: event.count
        for event in profiled.key_averages()
        if event.key.startswith("commhooks ")
    }
    assert counts["commhooks int8_compress: hook call"] == buckets > 1
    # An exchange begins, receives codes twice, and is committed.
    assert counts["commhooks int8_compress: exchange"] >= 3 * buckets
    assert any(name.endswith(": native kernel") for name in counts)


def test_a_profile_names_outer_steps() -> None:
    with process_group_of_one():
        run = Run.new(hook="diloco", hook_options={"sync_every": 2}).train(2)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run.train(4)
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["commhooks diloco: outer step"] == 2


def test_without_a_profiler_nothing_is_recorded() -> None:
    with (
        process_group_of_one(),
        mock.patch.object(profiling, "record_function", side_effect=AssertionError),
    ):
        Run.new(hook="int8", hook_options={"start_iter": 0, "block_size": 32}).train(2)
    assert not torch.autograd._profiler_enabled()

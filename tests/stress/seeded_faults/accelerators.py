"""Faults of what runs on accelerators; the tests run it on CPU tensors."""

from tests.stress.seeded_faults.mutant import Mutant

_KERNEL, _VIEWS, _FACTORS, _CODEC = (
    "commhooks/compressors/powersgd/device_kernel.py",
    "commhooks/compressors/named_views.py",
    "commhooks/compressors/powersgd/packed_factors.py",
    "commhooks/compressors/powersgd/codec.py",
)
_TOGETHER = "compressors/powersgd/test_packed_factors.py::test_together_as_alone"
_ORACLE = "compressors/powersgd/test_powersgd_against_oracle.py::test_gradients_and_residuals_equal_the_oracle"
_STREAMS, _ORDER = "commhooks/engine/streams.py", "engine/test_streams.py"
_MASKS = "engine/test_masked_commit.py::test_masks_decide_as_the_host_does"

MUTANTS = [
    Mutant(
        "behind a mask: a bad step is committed",
        _KERNEL,
        "        keep = (good & now.used)",
        "        keep = now.used",
        _MASKS,
    ),
    Mutant(
        "behind a mask: an idle layer is committed",
        _KERNEL,
        "        keep = (good & now.used)",
        "        keep = (good | (now.used & False))",
        _ORACLE,
    ),
    Mutant(
        "stacks: a lost residual comes back",
        _VIEWS,
        "            else:\n                view.zero_()\n",
        "            else:\n                pass\n",
        "compressors/test_named_views.py::test_slices_follow_a_dict",
    ),
    Mutant(
        "stacks: missing directions stay missing",
        _CODEC,
        "rows.addcmul_(refill, weak.unsqueeze(-1), value=_NUDGE)",
        "rows",
        "compressors/powersgd/test_orthonormal_stack.py::test_orthonormal_for_hard_inputs",
    ),
    Mutant(
        "packed factors: padding holds a neighbour's numbers",
        _FACTORS,
        "torch.full((sum(self._sizes),), self.numel, dtype=torch.int32)",
        "torch.full((sum(self._sizes),), self.numel - 1, dtype=torch.int32)",
        _TOGETHER,
    ),
    Mutant(
        "steps are counted twice or never when a signal comes",
        "commhooks/engine/held_state.py",
        "            if self._unread is unread:\n",
        "            if True:\n",
        "engine/test_settle.py::test_a_handler_that_saves_while_the_host_waits",
    ),
    Mutant(
        "a pass begins while another thread counts steps",
        "commhooks/engine/held_state.py",
        "        with self.lock:  # another",
        "        if True:  # another",
        "engine/test_settle.py::test_a_pass_waits_for_a_thread_that_counts_steps",
    ),
    Mutant(
        "streams: who reads waits for the next pass",
        _STREAMS,
        "        stream.wait_event(event)\n",
        "        stream.wait_stream(_stream(device, _CODEC_PRIORITY))\n",
        f"{_ORDER}::test_a_thread_that_saves_waits_for_the_latest_commit_only",
    ),
    Mutant(
        "streams: a commit that failed is not marked",
        "commhooks/engine/held_state.py",
        "            finally:\n                if precision.has_streams(device):\n",
        "            finally:\n                if precision.has_streams(device) and not self.torn:\n",
        f"{_ORDER}::test_a_commit_that_failed_is_waited_for_too",
    ),
    Mutant(
        "streams: loaded tensors are freed too early",
        "commhooks/engine/consensus.py",
        "        keep_for_current_stream(tensor for entries in state.entries.values() for tensor in entries.values())\n",  # noqa: E501
        "",
        f"{_ORDER}::test_loaded_tensors_stay_until_the_codec_has_read_them",
    ),
    Mutant(
        "streams: all-reduces of an abandoned pass go on writing",
        "commhooks/engine/session.py",
        "            wait_for_abandoned(self._drop_pass(), ABANDONED_LIMIT_S)\n",
        "            self._drop_pass()\n",
        "engine/test_abandoned_collectives.py",
    ),
    Mutant(
        "a CUDA graph is captured",
        "commhooks/gradients/ddp.py",
        "    if precision.has_streams(grad_bucket.buffer().device) and torch",
        "    if False and torch",
        "gradients/test_cuda_graphs.py",
    ),
]

"""Seeded faults. What runs on accelerators, and answers that come late: on CPU tensors, except where `cuda=True`."""

from tests.stress.seeded_faults.mutant import Mutant

_ORDER = "engine/test_streams.py"
_LATE = "cuda/test_late_answers.py::test_late_answers_change_nothing"
_NCCL = f"{_LATE}[powerSGD-cuda over nccl]"

MUTANTS = [
    Mutant(
        "behind a mask: a bad step is committed",
        "commhooks/compressors/powersgd/device_kernel.py",
        "        keep = (good & now.used)",
        "        keep = now.used",
        "engine/test_masked_commit.py::test_masks_decide_as_the_host_does",
    ),
    Mutant(
        "stacks: a lost residual comes back",
        "commhooks/compressors/named_views.py",
        "            else:\n                view.zero_()\n",
        "            else:\n                pass\n",
        "compressors/test_named_views.py::test_slices_follow_a_dict",
    ),
    Mutant(
        "stacks: missing directions stay missing",
        "commhooks/compressors/powersgd/codec.py",
        "rows.addcmul_(refill, weak.unsqueeze(-1), value=_NUDGE)",
        "rows",
        "compressors/powersgd/test_orthonormal_stack.py::test_orthonormal_for_hard_inputs",
    ),
    Mutant(
        "packed factors: padding holds a neighbour's numbers",
        "commhooks/compressors/powersgd/packed_factors.py",
        "torch.full((sum(self._sizes),), self.numel, dtype=torch.int32)",
        "torch.full((sum(self._sizes),), self.numel - 1, dtype=torch.int32)",
        "compressors/powersgd/test_packed_factors.py::test_together_as_alone",
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
        "commhooks/engine/streams.py",
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
        "the engine reads an answer before it has waited",
        "commhooks/engine/backward_pass.py",
        "        answer = verdict if self._pending is None else self._pending.wait()\n",
        "        answer = verdict if self._pending is None else self._pending.answer\n",
        f"{_LATE}[powerSGD-cpu]",
    ),
    Mutant(
        "a simple hook reads an answer before it is there",
        "commhooks/engine/immediate.py",
        "    return pending.future().then(finish)\n",
        "    done = new_future(flat.device)\n    done.set_result(go_on(pending.answer))\n    return done\n",
        f"{_LATE}[fp16-cpu]",
    ),
    Mutant(
        "on a GPU DDP does not wait for the codec",
        "commhooks/comm/collective.py",
        '    return torch.futures.Future(devices=[] if device.type == "cpu" else [device])\n',
        "    return torch.futures.Future()\n",
        _NCCL,
        cuda=True,
    ),
    Mutant(
        "on a GPU a save does not wait for the codec",
        "commhooks/engine/streams.py",
        "        stream.wait_event(event)\n",
        "",
        "cuda/test_gpu_saving.py::test_a_thread_that_saves_never_mixes_two_steps[cuda over nccl]",
        cuda=True,
    ),
]

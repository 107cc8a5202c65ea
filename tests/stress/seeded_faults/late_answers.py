"""Faults that show only when an answer comes late; those with `cuda=True` show only on a GPU."""

from seeded_faults.mutant import Mutant

_LATE = "cuda/test_late_answers.py::test_late_answers_change_nothing"
_NCCL = f"{_LATE}[powerSGD-cuda over nccl]"

MUTANTS = [
    Mutant(
        "the engine reads an answer before it has waited",
        "commhooks/engine/backward_pass.py",
        "        assert self._pending is not None\n        answer = self._pending.wait()\n",
        "        assert self._pending is not None\n        answer = self._pending.answer\n",
        f"{_LATE}[powerSGD-cpu]",
    ),
    Mutant(
        "a wait that does not wait",
        "commhooks/comm/collective.py",
        "                self._work.wait()\n",
        "                pass\n",
        f"{_LATE}[powerSGD-cpu as accelerator]",
    ),
    Mutant(
        "an exchange reads what others sent before it has waited",
        "commhooks/engine/backward_pass.py",
        "        assert self._pending is not None\n        answer = self._pending.wait()\n",
        "        assert self._pending is not None\n"
        "        early = self._pending.answer.dtype == torch.uint8\n"
        "        answer = self._pending.answer if early else self._pending.wait()\n",
        f"{_LATE}[int8, torch-cpu]",
    ),
    Mutant(
        "a simple hook reads an answer before it is there",
        "commhooks/engine/immediate.py",
        "    return pending.future().then(finish)\n",
        "    done = new_future(flat.device)\n    done.set_result(go_on(pending.answer))\n    return done\n",
        f"{_LATE}[fp16-cpu]",
    ),
    Mutant(
        "the cosine is taken before the true mean is there",
        "commhooks/hook/cosine.py",
        "dist.all_reduce(gradient, group=self._group())",
        "dist.all_reduce(gradient, group=self._group(), async_op=True)",
        f"{_LATE}[checks-cpu]",
    ),
    Mutant(
        "on a GPU the codec does not wait for backward",
        "commhooks/engine/streams.py",
        "    stream.wait_stream(torch.cuda.current_stream(device))\n    with torch.cuda.stream(stream):\n        keep",
        "    with torch.cuda.stream(stream):\n        keep",
        _NCCL,
        cuda=True,
    ),
    Mutant(
        "on a GPU DDP does not wait for the codec",
        "commhooks/comm/collective.py",
        "    return torch.futures.Future(devices=[device])\n",
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
    Mutant(
        "on a GPU the host reads the verdict",
        "commhooks/engine/session.py",
        "state, on_host = self.state, precision.is_host_readable(good.device)\n",
        "state, on_host = self.state, True\n",
        "cuda/test_gpu_host_waits.py::test_the_host_never_waits",
        cuda=True,
    ),
    Mutant(
        "a run in which every test skips is a good one",
        "tests/cuda/run.py",
        '        if not self.count("passed"):\n',
        "        if not self.outcomes:\n",
        "project/test_make_cuda.py::test_its_table_and_its_verdict",
    ),
]

"""Faults that show only when an answer comes late; those with `cuda=True` show only on a GPU."""

from tests.stress.seeded_faults.mutant import Mutant

_LATE = "cuda/test_late_answers.py::test_late_answers_change_nothing"
_NCCL = f"{_LATE}[powerSGD-cuda over nccl]"

MUTANTS = [
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
]

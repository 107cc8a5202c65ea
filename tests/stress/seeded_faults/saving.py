"""Seeded faults. The hook in checkpoints: payloads, joint saves, what a resume takes over."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "rank 0's residual everywhere",
        "commhooks/checkpoint/payload.py",
        "saved[ranks.index(target.rank)]",
        "saved[0]",
        "checkpoint/test_elastic_resume.py::test_from_any_number_of_ranks",
    ),
    Mutant(
        "rows of Q in another order",
        "commhooks/compressors/powersgd/fields.py",
        "for dim in rest)).reshape(saved.shape[0], -1)\n",
        "for dim in rest)).reshape(saved.shape[0], -1).flip(0)\n",
        "checkpoint/test_golden_payloads.py::test_step_start_q_and_residuals_are_those_of_the_file",
    ),
    Mutant(
        "strict loading changes the hook before it raises",
        "commhooks/checkpoint/payload.py",
        "    for name in parameters:\n        if name not in target.parameters:\n",
        "    for name in parameters:\n        if name in target.parameters:\n"
        "            target.parameters[name].data.zero_()\n        if name not in target.parameters:\n",
        "checkpoint/test_changed_setup.py::test_another_model",
    ),
    Mutant(
        "ranks do not compare their state",
        "commhooks/engine/consensus.py",
        "            state.drop_local()\n",
        "            pass\n",
        "checkpoint/test_resume.py::test_the_residual_of_another_rank_is_never_used",
    ),
    Mutant(
        "step not restored",
        "commhooks/checkpoint/learned_state.py",
        "            session.consensus.replaced(",
        "            session.state.step = 0\n            session.consensus.replaced(",
        "checkpoint/test_golden_payloads.py::test_step_start_q_and_residuals_are_those_of_the_file",
    ),
    Mutant(
        "a joint save goes ahead without all ranks",
        "commhooks/comm/joint_save.py",
        '            if decision == b"all":\n',
        "            if True:\n",
        "comm/test_joint_save.py::test_one_rank_saves_alone",
    ),
    Mutant(
        "a failed save counts as a good one",
        "commhooks/comm/joint_save.py",
        "            failures = [late] if outcome is None else [each for each in outcome if each]\n",
        "            failures: list[str] = []\n",
        "comm/test_joint_save.py::test_a_failure_in_the_middle",
    ),
    Mutant(
        "the others wait for a rank whose commit failed",
        "commhooks/checkpoint/learned_state.py",
        "            if not alone and joint and saver is not None:\n",
        "            if False:\n",
        "checkpoint/test_changed_surroundings.py::test_nobody_waits_for_a_rank_whose_commit_failed",
    ),
    Mutant(
        "a rank that saves alone declines the joint saves of the others",
        "commhooks/checkpoint/learned_state.py",
        "            if not alone and joint and saver is not None:\n",
        "            if not alone and saver is not None:\n",
        "checkpoint/test_changed_surroundings.py::test_a_save_of_one_rank_alone_declines_no_joint_save",
    ),
    Mutant(
        "learned state waits for the garbage collector",
        "commhooks/hook/engine_hook.py",
        "        self._session = session\n",
        "        self._session = session\n        self._circle = self\n",
        "hook/test_close.py::test_buffers_go_with_the_model",
    ),
]

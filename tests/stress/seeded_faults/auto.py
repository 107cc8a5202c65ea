"""Seeded faults. `auto`: trials, choice, the exchange of what was measured, the change, what is saved."""

from tests.stress.seeded_faults.mutant import Mutant

_TRAINING = "compressors/auto/test_auto_training.py"
_LEFTOVERS = "compressors/auto/test_orphaned_residuals.py"

MUTANTS = [
    Mutant(
        "auto: every rank decides from its own times",
        "commhooks/compressors/adaptive.py",
        "        return rows\n",
        "        return [rows[self._group.rank()]]\n",
        f"{_TRAINING}::test_times_that_make_no_sense_on_one_rank_leave_all_with_all_reduce",
    ),
    Mutant(
        "auto: always the fastest, however much it changes",
        "commhooks/compressors/candidates.py",
        "key=lambda label: (known[label].changes, usable[label])",
        "key=lambda label: usable[label]",
        "compressors/auto/test_trials.py",
    ),
    Mutant(
        "auto: a trial that could not be measured stays in force",
        "commhooks/compressors/auto/trials.py",
        '    if now.phase == "trying":\n        return _ended(',
        "    if False:\n        return _ended(",
        f"{_TRAINING}::test_a_trial_that_cannot_be_measured_is_taken_back",
    ),
    Mutant(
        "auto: a first trial that is taken back counts as a choice",
        "commhooks/compressors/auto/trials.py",
        "now = now if now.why else replace(now, since=None)",
        "pass",
        "compressors/auto/test_auto_resume.py::test_with_another_number_of_ranks_a_trial_is_taken_back",
    ),
    Mutant(
        "auto: residuals that wait are lost in a checkpoint",
        "commhooks/checkpoint/learned_state.py",
        "if not compressor.selective or isinstance(compressor, AdaptiveCompressor):",
        "if not compressor.selective:",
        "compressors/auto/test_auto_resume.py::test_residuals_of_what_is_excluded_now_go_with_the_next_gradient",
    ),
    Mutant(
        "auto: residuals of a branch that is not used at the change are lost",
        "commhooks/engine/orphaned_residuals.py",
        "zip(slots, flags.tolist(), strict=True) if has_gradient]\n",
        "zip(slots, flags.tolist(), strict=True)]\n",
        f"{_LEFTOVERS}::test_what_is_left_for_a_branch_that_is_not_used_at_the_change_waits_for_its_next_gradient",
    ),
    Mutant(
        "auto: residuals are lost in a pass in which another bucket is not finite",
        "commhooks/engine/known_buckets.py",
        "compressor.judges_averages or state.has_local()",
        "compressor.judges_averages",
        f"{_LEFTOVERS}::test_what_is_left_waits_if_another_bucket_of_the_pass_is_not_finite",
    ),
    Mutant(
        "auto: a residual that was sent is looked for again",
        "commhooks/engine/known_buckets.py",
        "            self.orphaned = orphaned(self.layout, self.compressed, state)  # those",
        "            pass  # those",
        f"{_LEFTOVERS}::test_a_choice_that_does_not_hold_is_taken_back_and_nothing_is_lost",
    ),
]

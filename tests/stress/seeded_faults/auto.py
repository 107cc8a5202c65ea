"""Seeded faults. `auto`: prediction, choice, the exchange of what was measured, the change, what is saved."""

from seeded_faults.mutant import Mutant

_AUTO = "commhooks/compressors/auto"
_TRAINING = "compressors/auto/test_auto_training.py"
_RESUME = "compressors/auto/test_auto_resume.py"

MUTANTS = [
    Mutant(
        "ranks by glob: the last pattern counts",
        "commhooks/gradients/exclude.py",
        "    for pattern in patterns:\n        if any(",
        "    for pattern in reversed(patterns):\n        if any(",
        "compressors/powersgd/test_ranks_by_glob.py::test_each_matrix_has_its_rank",
    ),
    Mutant(
        "ranks by glob: what matches nothing has rank 1",
        "commhooks/compressors/powersgd/config.py",
        "return None if glob is None else ranks[glob]",
        "return 1 if glob is None else ranks[glob]",
        "compressors/powersgd/test_ranks_by_glob.py::test_each_matrix_has_its_rank",
    ),
    Mutant(
        "auto: the network carries all messages at once",
        f"{_AUTO}/pipeline.py",
        "self._network_s = max(self._network_s, self.host_s) + ",
        "self._network_s = self.host_s + ",
        "compressors/auto/test_auto_pipeline.py::test_by_hand",
    ),
    Mutant(
        "auto: second rounds do not wait for their answers",
        f"{_AUTO}/pipeline.py",
        "self.host_s = max(self.host_s, bucket.arrives_s) + bucket.times.codec_s[bucket.sent]",
        "self.host_s = self.host_s + bucket.times.codec_s[bucket.sent]",
        "compressors/auto/test_auto_pipeline.py::test_by_hand",
    ),
    Mutant(
        "auto: what was measured does not anchor the prediction",
        f"{_AUTO}/prediction.py",
        "max(measured_s + own - modelled[now], min(own, measured_s))",
        "own",
        "compressors/auto/test_prediction.py::test_the_candidate_in_force_takes_what_was_measured",
    ),
    Mutant(
        "auto: always the fastest, however much it changes",
        f"{_AUTO}/choice.py",
        "key=lambda label: (changes[label], times[label])",
        "key=lambda label: times[label]",
        "compressors/auto/test_choice.py::test_choose",
    ),
    Mutant(
        "auto: what was tried does not count",
        f"{_AUTO}/choice.py",
        "label: tried_s[label] if _usable(tried_s.get(label, math.nan)) else seconds",
        "label: seconds",
        "compressors/auto/test_choice.py::test_an_overrun_concerns_what_compresses_and_was_not_tried",
    ),
    Mutant(
        "auto: the fastest rank counts",
        f"{_AUTO}/report.py",
        "times = [max(column) if",
        "times = [min(column) if",
        "compressors/auto/test_report.py::test_the_slowest_rank_counts",
    ),
    Mutant(
        "auto: a time that one rank could not measure is left out",
        f"{_AUTO}/report.py",
        "if all(_usable(each) for each in column) else math.nan for column",
        "if any(_usable(each) for each in column) else math.nan for column",
        "compressors/auto/test_report.py::test_what_one_rank_could_not_measure_nobody_knows",
    ),
    Mutant(
        "auto: every rank decides from its own times",
        "commhooks/engine/observer.py",
        "        return rows\n",
        "        return [rows[self._group.rank()]]\n",
        f"{_TRAINING}::test_times_that_make_no_sense_on_one_rank_leave_all_with_all_reduce",
    ),
    Mutant(
        "auto: residuals are lost at a change",
        "commhooks/engine/leftovers.py",
        "        slot.of(flat).add_(residuals[slot.name] * step.residual_factor)\n",
        "        pass\n",
        f"{_TRAINING}::test_a_choice_that_does_not_hold_is_taken_back_and_nothing_is_lost",
    ),
    Mutant(
        "auto: residuals are sent again and again after a change",
        "commhooks/engine/leftovers.py",
        "                residuals.pop(slot.name, None)\n",
        "                pass\n",
        f"{_TRAINING}::test_a_choice_that_does_not_hold_is_taken_back_and_nothing_is_lost",
    ),
    Mutant(
        "auto: measuring changes the gradients",
        "commhooks/engine/rehearsal.py",
        "    copy = torch.empty_like(gradient)\n",
        "    copy = gradient\n",
        "compressors/auto/test_ranks_per_layer.py::test_energies_are_those_of_the_singular_values",
    ),
    Mutant(
        "auto: a choice is kept, whatever it takes",
        f"{_AUTO}/phases.py",
        '    return dataclasses.replace(made, phase="trying", watch=Watch(step, step + TRY_STEPS))\n',
        "    return resting(made, config, step)\n",
        f"{_TRAINING}::test_a_choice_that_does_not_hold_is_taken_back_and_nothing_is_lost",
    ),
    Mutant(
        "auto: it never measures again",
        f"{_AUTO}/choice.py",
        "    return max(abs(step_s - then_step_s), waited) > by * then_step_s\n",
        "    return False\n",
        f"{_TRAINING}::test_it_looks_again_and_changes_when_the_times_have",
    ),
    Mutant(
        "auto: the decision is not saved",
        "commhooks/checkpoint/payload.py",
        '{} if target.compressor.notes is None else {"notes": target.compressor.notes}',
        "{}",
        f"{_RESUME}::test_a_run_that_resumes_goes_on_as_the_one_that_saved",
    ),
    Mutant(
        "auto: another number of ranks goes on with the old figures",
        "commhooks/checkpoint/learned_state.py",
        'same_ranks = content.get("world_size") == self._world_size',
        "same_ranks = True",
        f"{_RESUME}::test_another_number_of_ranks_measures_anew_with_the_choice_in_force",
    ),
    Mutant(
        "auto: the ranks do not compare their decisions",
        "commhooks/engine/session.py",
        "in_force = compressor.config, compressor.planning_config, compressor.chosen",
        "in_force = compressor.config",
        f"{_TRAINING}::test_ranks_with_different_decisions_say_so",
    ),
    Mutant(
        "auto: layers that keep least keep the lowest rank",
        f"{_AUTO}/ranks.py",
        "next((rank for rank, each in enumerate(shares, 1) if each >= share), len(shares))",
        "next((rank for rank, each in enumerate(shares, 1) if each >= share), 1)",
        "compressors/auto/test_ranks_per_layer.py::test_ranks_for_a_share",
    ),
    Mutant(
        "auto: a rank decides before the ranks have compared their steps",
        "commhooks/engine/session.py",
        "        self._agree_once(group, bucket.flat)  # before",
        "        # before",
        f"{_RESUME}::test_a_load_on_one_rank_only_is_an_error_before_that_rank_decides",
    ),
]

"""Seeded faults. Weights averaged once in several steps: the outer step, rounds, what is saved."""

from tests.stress.seeded_faults.mutant import Mutant

_STEP, _HOOK = "commhooks/compressors/local_steps/exchange.py", "commhooks/hook/local_steps_hook.py"
_TURNS = "commhooks/hook/outer_steps.py"
_TESTS, _ROUNDS, _SAVING = "hook/test_local_steps.py", "hook/test_local_rounds.py", "hook/test_local_saving.py"
_RESUME = f"{_SAVING}::test_a_run_that_resumes_in_mid_round_goes_on_as_the_other"
_STREAMING = f"{_TESTS}::test_streaming_is_that_of_the_paper"
_MISHAPS = "hook/test_local_mishaps.py"
_RECOVERY = "hook/test_local_recovery.py"

MUTANTS = [
    Mutant(
        "local steps: the collectives of the wire are taken for sums",
        "commhooks/compressors/local_steps/compressor.py",
        "            self.collectives = self._wire.collectives\n",
        "            pass\n",
        "compressors/test_named_collectives.py",
    ),
    Mutant(
        "local steps: a rank that is lost keeps the others from averaging",
        _HOOK,
        "rows[:, 0].all() or rows[:, 1].any()",
        "rows[:, 0].all()",
        f"{_RECOVERY}::test_a_rank_whose_weights_are_not_finite_ends_the_round_though_its_gradients_never_are",
    ),
    Mutant(
        "local steps: statistics that overflow on one rank spread",
        "commhooks/hook/means.py",
        "if finite_somewhere else change",
        "if False else change",
        f"{_RECOVERY}::test_statistics_that_overflow_on_one_rank_stay_those_of_the_others",
    ),
    Mutant(
        "streaming: what is on its way at a load counts as a step of the loaded state",
        _HOOK,
        "self._outer.forget(patiently=True)",
        "self._outer.forget()",
        f"{_RECOVERY}::test_what_is_on_its_way_does_not_count_as_a_step_of_the_loaded_state",
    ),
    Mutant(
        "local steps: an optimizer keeps its NaN after a discarded round",
        "commhooks/gradients/training_events.py",
        "                del optimizer.state[parameter]\n",
        "                pass\n",
        f"{_MISHAPS}::test_later_rounds_are_finite_again",
    ),
    Mutant(
        "streaming: only the part that was discarded goes back to its anchor",
        _HOOK,
        "        self._go_to_anchor()  # other parts may not be finite, either\n",
        "",
        f"{_MISHAPS}::test_later_rounds_are_finite_again",
    ),
    Mutant(
        "local steps: momentum that is not Nesterov's",
        _STEP,
        "            part.add_(after * mu)\n",
        "            part.copy_(after)\n",
        f"{_TESTS}::test_diloco_is_that_of_the_paper",
    ),
    Mutant(
        "local steps: a round that is not finite moves the anchor",
        _STEP,
        "chosen(good, moved, anchor[name])",
        "moved",
        f"{_MISHAPS}::test_a_round_with_a_rank_that_is_not_finite_is_discarded",
    ),
    Mutant(
        "local steps: a save leaves the optimizers' moments to the ranks",
        _HOOK,
        "                self._means.average_moments(self._optimizers)\n",
        "",
        _RESUME,
    ),
    Mutant(
        "local steps: scales of integers are averaged without them",
        "commhooks/gradients/training_events.py",
        "            if not _is_coded(state)\n",
        "",
        f"{_SAVING}::test_what_is_kept_in_integers_stays_each_ranks_own",
    ),
    Mutant(
        "local steps: each pass of a closure counts",
        _HOOK,
        "        if repeated:\n",
        "        if False:\n",
        f"{_ROUNDS}::test_passes_of_a_closure_count_once",
    ),
    Mutant(
        "local steps: buffers stay apart",
        "commhooks/hook/means.py",
        "            now.copy_(torch.where(change == 0, common, common + change))\n",
        "            pass\n",
        f"{_ROUNDS}::test_batchnorm_tied_and_frozen",
    ),
    Mutant(
        "local steps: an outer step inside an optimizer's step",
        _HOOK,
        "if self._due and not self._optimizers.stepping and",
        "if self._due and",
        f"{_ROUNDS}::test_passes_of_a_closure_count_once",
    ),
    Mutant(
        "local steps: a rank that skips its step is late for the outer one",
        _HOOK,
        "        if not self._scaled:\n            return True\n",
        "        return True\n",
        f"{_ROUNDS}::test_rounds_end_together_in_every_mode",
    ),
    Mutant(
        "local steps: a resumed run keeps the weights of a save on one rank alone",
        _HOOK,
        "        self._to_anchor = bool(self._session.state[ANCHOR.key])\n",
        "",
        f"{_SAVING}::test_a_save_on_one_rank_alone_holds_the_anchor",
    ),
    Mutant(
        "local steps: the outer step comes after the first of two optimizers",
        "commhooks/gradients/training_events.py",
        "            if not self._missing:\n",
        "            if True:\n",
        f"{_ROUNDS}::test_rounds_end_together_in_every_mode",
    ),
    Mutant(
        "local steps: a late outer step in a forward pass of rank 0 alone",
        _HOOK,
        " and module.training == self._trained_in_mode:",
        ":",
        f"{_ROUNDS}::test_optimizers_that_torch_does_not_know_get_their_outer_step_before_the_next_forward_pass",
    ),
    Mutant(
        "streaming: what the training has added since the weights were sent is lost",
        _TURNS,
        "        if self._sent and not self.discarded:\n",
        "        if False:\n",
        _STREAMING,
    ),
    Mutant(
        "streaming: a save forgets what is on its way",
        _TURNS,
        'then exchange all weights."""\n        self._arrive()\n',
        'then exchange all weights."""\n        self.forget()\n',
        _STREAMING,
    ),
]

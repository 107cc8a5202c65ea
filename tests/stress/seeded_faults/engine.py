"""Seeded faults. The engine and what compressors lean on: turns, verdicts, layouts, error feedback, further fields."""

from tests.stress.seeded_faults.mutant import Mutant

_ENGINE, _COMPRESSORS = "commhooks/engine", "commhooks/compressors"
_TURNS = "engine/test_backward_pass.py::test_a_bucket_starts_and_each_earlier_one_takes_a_step"

MUTANTS = [
    Mutant(
        "buckets are committed while others have not told whether they are finite",
        f"{_ENGINE}/backward_pass.py",
        "            each.finish()\n        return torch",
        "            each.finish()\n"
        "        self.running[0].advance(bool(self.running[0].finite))\n"
        "        return torch",
        "engine/test_backward_pass.py::test_nothing_is_committed_before_all_have_told_whether_they_are_finite",
    ),
    Mutant(
        "abandoned exchanges stay open",
        f"{_ENGINE}/backward_pass.py",
        "        with contextlib.suppress(Exception):\n            self._task.exchange.close()\n",
        "",
        "engine/test_backward_pass.py::test_an_abandoned_pass_closes_its_exchanges",
    ),
    Mutant(
        "the buffers of an abandoned pass are used again",
        f"{_ENGINE}/session.py",
        "            writing = self._pass.abandon()\n            self.consensus.buckets.clear()\n",
        "            writing = self._pass.abandon()\n",
        "engine/test_abandoned_backward.py",
    ),
    Mutant(
        "after a load the ranks go on as they had agreed before",
        f"{_ENGINE}/consensus.py",
        "        self._agreement = None\n        self._held.torn",
        "        self._held.torn",
        "checkpoint/test_resume.py::test_loading_into_a_running_hook",
    ),
    Mutant(
        "an exchange may end without a verdict",
        f"{_ENGINE}/task.py",
        "            if self._judged and not self._decided:\n",
        "            if False:\n",
        "compressors/test_author_errors.py::test_a_malformed_exchange",
    ),
    Mutant(
        "at once: a second collective is tolerated",
        "commhooks/engine/immediate.py",
        "    if not step.last:\n",
        "    if False:\n",
        "engine/test_immediate.py::test_more_than_one_collective_is_refused",
    ),
    Mutant(
        "residuals of buckets that DDP left out keep the old loss scale",
        "commhooks/engine/state.py",
        "                if name not in but:\n",
        "                if False:\n",
        "gradients/test_loss_scale.py::test_buckets_that_ddp_leaves_out_follow_the_scale",
    ),
    Mutant(
        "residuals in use are scaled twice",
        "commhooks/engine/state.py",
        "                if name not in but:\n",
        "                if True:\n",
        "gradients/test_loss_scale.py",
    ),
    Mutant(
        "layouts that DDP has given up are kept",
        f"{_ENGINE}/known_buckets.py",
        "            del self._buckets[key]\n",
        "",
        "hook/test_plan_model.py::test_buckets_are_those_of_ddp_after_the_first_step",
    ),
    Mutant(
        "a further field is not saved",
        "commhooks/checkpoint/payload.py",
        'if each.per == "parameter"]\n    for name, parameter in',
        'if each.key in ("q", "p", "residual")]\n    for name, parameter in',
        "checkpoint/test_further_fields.py::test_a_resume_is_bit_equal",
    ),
    Mutant(
        "sums of three ranks are reordered where a round trip is long",
        "commhooks/engine/coalescing.py",
        '        if send.op == "sum" and not self._which.reordered and self.ranks(send.over) > 2:\n',
        "        if False:\n",
        "engine/test_coalescing.py::test_sums_of_three_ranks_wait_only_where_the_user_says_so",
    ),
    Mutant(
        "what waits for others is sent without them",
        "commhooks/engine/backward_pass.py",
        "            if earlier.has_round_left and not earlier.is_held:\n",
        "            if earlier.has_round_left:\n",
        "engine/test_coalescing.py::test_a_long_link_changes_no_bit_and_takes_a_round_for_all_buckets",
    ),
]

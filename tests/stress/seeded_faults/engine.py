"""Seeded faults. The engine and what compressors lean on: turns, verdicts, layouts, further fields; ranks in nodes."""

from tests.stress.seeded_faults.mutant import Mutant

_ENGINE = "commhooks/engine"
_HIERARCHY = "commhooks/engine/hierarchy.py"
_NODES = "engine/test_hierarchy.py"

MUTANTS = [
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
        "residuals of buckets that DDP left out keep the old loss scale",
        "commhooks/engine/state.py",
        "                if name not in but:\n",
        "                if False:\n",
        "gradients/test_loss_scale.py::test_buckets_that_ddp_leaves_out_follow_the_scale",
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
        "what waits for others is sent without them",
        "commhooks/engine/backward_pass.py",
        "            if earlier.has_round_left and not earlier.is_held:\n",
        "            if earlier.has_round_left:\n",
        "engine/test_coalescing.py::test_a_long_link_changes_no_bit_and_takes_a_round_for_all_buckets",
    ),
    Mutant(
        "nodes: each rank believes its own verdict",
        "commhooks/engine/session.py",
        '        node = self.consensus.arrangement.groups.get("node")\n',
        "        node = None\n",
        f"{_NODES}::test_a_step_that_is_not_finite_changes_nothing_on_any_node",
    ),
    Mutant(
        "nodes: a mean residual counts once per node, not once per rank",
        _HIERARCHY,
        "            tensors[name] = mean * self.nodes.ranks_per_node\n",
        "            tensors[name] = mean\n",
        f"{_NODES}::test_another_number_of_ranks_resumes",
    ),
]

"""Seeded faults. Ranks in nodes: sums, owners, verdicts, what is learned, residuals in checkpoints."""

from tests.stress.seeded_faults.mutant import Mutant

_HIERARCHY, _SHARES = "commhooks/engine/hierarchy.py", "commhooks/engine/node_shares.py"
_TESTS = "engine/test_hierarchy.py"
_SAME = f"{_TESTS}::test_the_same_as_without_nodes"

MUTANTS = [
    Mutant(
        "nodes: the average of sums is not divided",
        _HIERARCHY,
        "        own.div_(after)\n",
        "",
        _SAME,
    ),
    Mutant(
        "nodes: each rank believes its own verdict",
        "commhooks/engine/session.py",
        '        node = self.consensus.arrangement.groups.get("node")\n',
        "        node = None\n",
        f"{_TESTS}::test_a_step_that_is_not_finite_changes_nothing_on_any_node",
    ),
    Mutant(
        "nodes: a mean residual counts once per node, not once per rank",
        _HIERARCHY,
        "            tensors[name] = mean * self.nodes.ranks_per_node\n",
        "            tensors[name] = mean\n",
        f"{_TESTS}::test_another_number_of_ranks_resumes",
    ),
    Mutant(
        "nodes: what another rank has learned is not taken",
        _SHARES,
        "        if owner != self._local_rank and learned:\n",
        "        if False:\n",
        _SAME,
    ),
]

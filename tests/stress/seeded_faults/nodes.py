"""Seeded faults. Ranks in nodes: sums, owners, verdicts, what is learned, residuals in checkpoints."""

from seeded_faults.mutant import Mutant

_HIERARCHY, _SHARES = "commhooks/engine/hierarchy.py", "commhooks/engine/node_shares.py"
_TESTS = "engine/test_hierarchy.py"
_CASTS = "engine/test_casts_between_nodes.py"
_SAME = f"{_TESTS}::test_the_same_as_without_nodes"

MUTANTS = [
    Mutant(
        "nodes: a number larger than that of the ranks is ignored in silence",
        "commhooks/comm/nodes.py",
        "        if 1 < group.size() < int(ranks_per_node) and",
        "        if False and",
        "engine/test_which_nodes.py::test_a_number_larger_than_that_of_the_ranks_is_a_warning",
    ),
    Mutant(
        "nodes: the average of sums is not divided",
        _HIERARCHY,
        "        own.div_(after)\n",
        "",
        _SAME,
    ),
    Mutant(
        "nodes: a cast gets the sum of a node",
        _HIERARCHY,
        "        before, after = (1, count) if state.local else (count, 1)\n",
        "        before, after = 1, count\n",
        f"{_CASTS}::test_a_cast_gets_the_mean_of_a_node",
    ),
    Mutant(
        "nodes: one node goes by the engine",
        "commhooks/hook/attach.py",
        "    if nodes is not None:\n",
        "    if request.ranks_per_node is not None:\n",
        f"{_CASTS}::test_one_node_is_as_none",
    ),
    Mutant(
        "nodes: passes with a cast count as compressed",
        "commhooks/engine/session.py",
        "        self.outcomes.add(good, current.compressing and self.compressor.selective)\n",
        "        self.outcomes.add(good, current.compressing)\n",
        f"{_CASTS}::test_a_cast_is_saved_as_without_nodes",
    ),
    Mutant(
        "nodes: several devices of a cast are noticed in the first backward pass",
        "commhooks/hook/stateless_hook.py",
        ' if self._one_device else ""\n',
        ' if False else ""\n',
        f"{_CASTS}::test_parameters_on_several_devices_are_refused_when_it_is_attached",
    ),
    Mutant(
        "nodes: a cast is among all ranks",
        "commhooks/engine/awaited.py",
        "        return plan if info.sparse else replace(plan, compressed=True, numel_compressed=plan.numel)\n",
        "        return plan\n",
        f"{_CASTS}::test_a_cast_between_nodes_only",
    ),
    Mutant(
        "nodes: each rank believes its own verdict",
        _HIERARCHY,
        '        self._all_reduce(everywhere, dist.ReduceOp.MIN, "the verdict")\n',
        "",
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
        "nodes: residuals of other owners are dropped",
        _HIERARCHY,
        "                self._collect(state[key], parameters)\n",
        "                pass\n",
        f"{_TESTS}::test_another_arrangement_resumes",
    ),
    Mutant(
        "nodes: what another rank has learned is not taken",
        _SHARES,
        "        if owner != self._local_rank and learned:\n",
        "        if False:\n",
        _SAME,
    ),
    Mutant(
        "nodes: what another rank has dropped is kept",
        _SHARES,
        "                known.pop(plan.key, None)\n",
        "                pass\n",
        f"{_SAME}[alternate-4-2-False]",
    ),
    Mutant(
        "nodes: what a parameter does not have is waited for",
        _SHARES,
        " for field in replicated if field.size_bytes(plan)]",
        " for field in replicated]",
        f"{_TESTS}::test_the_host_reads_nothing_once_all_is_there",
    ),
    Mutant(
        "nodes: a rank without residuals writes no part",
        "commhooks/checkpoint/parts.py",
        "    if not own and not shares and saved",
        "    if not own and saved",
        "with_accelerate/test_accelerate_saving.py::test_ranks_that_own_nothing_resume",
    ),
    Mutant(
        "nodes: the main process says that there are no residuals if it has none",
        "commhooks/checkpoint/parts.py",
        "[] if shares or name in own else None",
        "[] if name in own else None",
        "with_accelerate/test_accelerate_saving.py::test_ranks_that_own_nothing_resume",
    ),
    Mutant(
        "nodes: the residual of a sum is measured as that of a mean",
        _HIERARCHY,
        "        self.ranks_per_residual = nodes.ranks_per_node\n",
        "",
        f"{_TESTS}::test_norms_are_those_of_the_share",
    ),
    Mutant(
        "nodes: norms of gradients are those of all parameters",
        "commhooks/hook/learning_hook.py",
        "if plan.compressed and keeps(plan.name)}",
        "if plan.compressed}",
        f"{_TESTS}::test_norms_are_those_of_the_share",
    ),
    Mutant(
        "nodes: the first rank owns everything",
        _SHARES,
        "        owners[name] = load.index(min(load))\n",
        "        owners[name] = 0\n",
        "engine/test_which_nodes.py::test_owners_share_the_work",
    ),
    Mutant(
        "nodes: ranks with consecutive numbers are one node, whatever the launcher says",
        "commhooks/comm/nodes.py",
        "[rank for rank, each in enumerate(places) if each == place]",
        "[rank for rank in range(group.size()) if rank * len(set(places)) // group.size() == int(place[-1])]",
        "engine/test_which_nodes.py::test_which_ranks_are_a_node",
    ),
    Mutant(
        "nodes: a saved mean covers this rank's parameters only",
        "commhooks/checkpoint/learned_state.py",
        "            self._rebase(collected)\n",
        "            state.local_shared = True\n",
        f"{_TESTS}::test_resume_is_bit_equal",
    ),
    Mutant(
        "nodes: the plan counts the residuals of the whole model",
        "commhooks/hook/learning_hook.py",
        '            LATEST_PASS if session.has_run else "",\n            session.consensus.arrangement,\n',
        '            LATEST_PASS if session.has_run else "",\n',
        "engine/test_hierarchy.py::test_the_plan_shows_what_a_rank_of_a_node_needs",
    ),
    Mutant(
        "nodes: the plan forgets what the node's ranks send each other",
        "commhooks/engine/hierarchy.py",
        "copies=own.copies + copies)",
        "copies=own.copies)",
        "engine/test_hierarchy.py::test_the_plan_shows_what_a_rank_of_a_node_needs",
    ),
]

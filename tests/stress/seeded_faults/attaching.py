"""Seeded faults. What is attached: requests, options, names and replicas that the ranks compare."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "the first pass with static_graph has no last bucket",
        "commhooks/gradients/ddp.py",
        "            is_last = self._read == self._parameters\n",
        "",
        "engine/test_first_pass.py::test_a_pass_of_several_buckets_in_every_mode_of_ddp[powerSGD, torch-two dtypes]",
    ),
    Mutant(
        "a copy of a model takes the hook along",
        "commhooks/hook/copies.py",
        "        return _copied, (self.__qualname__,)\n",
        "        return Registered, (self.__qualname__, self.func)\n",
        "hook/test_copies.py::test_a_copy_averages_without_the_hook",
    ),
    Mutant(
        "nobody asks what the others attach",
        "commhooks/hook/attach.py",
        "    choice = check_requests(described, source.described(), plan, runner.kernel_support(), source)\n",
        "    choice = (check_requests, described, plan, runner.choice)[3]\n",
        "engine/test_disagreement.py::test_different_requests",
    ),
    Mutant(
        "a group whose ranks all have the number 0 is taken",
        "commhooks/hook/request_check.py",
        "        if ranks != list(range(group.size())):\n",
        "        if False:\n",
        "hook/test_groups_of_others.py::test_ranks_without_numbers_are_refused",
    ),
    Mutant(
        "ranks in different numbers of groups make a new one",
        "commhooks/comm/groups.py",
        "    _count_alike(within, device)\n",
        "",
        "comm/test_groups.py::test_ranks_in_different_numbers_of_groups",
    ),
]

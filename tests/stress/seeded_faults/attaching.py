"""Seeded faults. What is attached: requests, options, names and replicas that the ranks compare."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "a copy of a model takes the hook along",
        "commhooks/hook/copies.py",
        "        return _copied, (self._name,)\n",
        "        return Registered, (self._name, self._function)\n",
        "hook/test_copies.py::test_a_copy_averages_without_the_hook",
    ),
    Mutant(
        "the function in a copy of a model does nothing",
        "commhooks/hook/copies.py",
        "        if self._function is None:\n",
        "        if False:\n",
        "hook/test_copies.py::test_the_function_in_a_copy_says_that_it_has_no_hook",
    ),
    Mutant(
        "replicas that differ go unseen",
        "commhooks/hook/replica_check.py",
        "        if others:\n",
        "        if len(others) == len(rows):\n",
        "hook/test_divergence.py::test_one_changed_bit_is_found",
    ),
    Mutant(
        "a fingerprint without the order",
        "commhooks/hook/replica_check.py",
        "(columns * (factors | 1)).sum()",
        "columns.sum() + 0 * factors[0]",
        "hook/test_divergence.py::test_a_fingerprint_sees_every_bit_and_the_order",
    ),
    Mutant(
        "ranks without data are compared",
        "commhooks/hook/comm_hook.py",
        "taking_part=in_backward()",
        "taking_part=True or in_backward()",
        "hook/test_divergence.py::test_a_rank_without_data_is_left_out",
    ),
    Mutant(
        "nobody asks what the others attach",
        "commhooks/hook/attach.py",
        "    choice = check_requests(asked, runner.offer(source.names.known()), source)\n",
        "    _, choice = (check_requests, asked), runner.choice\n",
        "engine/test_disagreement.py::test_different_requests",
    ),
    Mutant(
        "only the rank without a compiler knows",
        "commhooks/engine/kernel_choice.py",
        "            return cls(cannot=str(error))\n",
        "            raise\n",
        "compressors/powersgd/test_fused_kernel.py::test_one_rank_without_a_compiler",
    ),
    Mutant(
        "YAML takes 4 for True",
        "commhooks/compressors/config.py",
        "            wrong = _is_bool(hint) and isinstance(value, (int, float)) and not isinstance(value, bool)\n",
        "            wrong = False\n",
        "compressors/test_config_channels.py::test_all_channels_accept_and_refuse_the_same",
    ),
    Mutant(
        "exclude: case does not matter",
        "commhooks/gradients/exclude.py",
        "fnmatch.fnmatchcase(name, pattern)",
        "fnmatch.fnmatchcase(name.lower(), pattern.lower())",
        "gradients/test_exclude.py::test_globs",
    ),
    Mutant(
        "exclude: what is excluded is compressed all the same",
        "commhooks/engine/known_buckets.py",
        "ParameterInfo.of(slot.name, slot.parameter, self._names, config, layout.sparse)",
        "ParameterInfo(slot.name, slot.parameter, layout.sparse)",
        "gradients/test_exclude.py::test_what_is_excluded_is_averaged_exactly",
    ),
    Mutant(
        "exclude: the ranks do not compare it",
        "commhooks/hook/request_check.py",
        "isinstance(v, plain) or (type(items) is list and all(isinstance(item, plain) for item in items))",
        "isinstance(v, plain)",
        "gradients/test_exclude.py::test_ranks_must_exclude_the_same_and_rank_0_warns",
    ),
    Mutant(
        "exclude: only the first name of a tied parameter counts",
        "commhooks/gradients/names.py",
        "list(all_names.get(id(p), [name]))",
        "[name]",
        "gradients/test_exclude.py::test_the_second_name_of_a_tied_parameter_excludes_it",
    ),
    Mutant(
        "exclude: a bare registration ignores it",
        "commhooks/gradients/names.py",
        "        if patterns:\n            raise HookRunError(",
        "        if False:\n            raise HookRunError(",
        "gradients/test_exclude.py::test_a_bare_registration_has_no_names",
    ),
    Mutant(
        "exclude: YAML makes text of what is in the list",
        "commhooks/compressors/config.py",
        "            if not _is_list_of_text(value):\n                raise",
        "            if not isinstance(value, list):\n                raise",
        "compressors/test_config_errors.py::test_python_and_yaml_refuse_the_same_values",
    ),
]

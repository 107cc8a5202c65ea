"""Seeded faults. Models sharded by `fully_shard`: buffers, the end of a pass, and what all shards must agree on."""

from seeded_faults.mutant import Mutant

_SOURCE, _SHARD, _TESTS = "commhooks/gradients/fully_shard.py", "commhooks/gradients/local_shard.py", "fully_shard"
_MODES = f"{_TESTS}/test_fully_shard_modes.py"
_BAD_STEP = f"{_TESTS}/test_fully_shard_transactions.py::test_a_bad_step_changes_nothing_anywhere"
_CHECKPOINTS = f"{_TESTS}/test_fully_shard_checkpoints.py"
_SETUPS = f"{_TESTS}/test_fully_shard_other_setups.py"
_EXACT = f"{_TESTS}/test_fully_shard_gradients.py::test_an_all_reduce_in_the_hook_is_the_mean"

MUTANTS = [
    Mutant(
        "parameters hold the source of their gradients for ever",
        _SOURCE,
        "register_post_accumulate_grad_hook(on_accumulated)",
        "register_post_accumulate_grad_hook(self._on_accumulated)",
        f"{_TESTS}/test_fully_shard_metrics.py::test_deleted_models_are_freed",
    ),
    Mutant(
        "each group of replicas commits its shards for itself",
        "commhooks/engine/session.py",
        "        if self.binding.shard_group is not None:\n            good =",
        "        if False:\n            good =",
        _BAD_STEP,
    ),
    Mutant(
        "one good shard is enough",
        "commhooks/comm/shards.py",
        "    bad = (~good).to(torch.int32).view(1)\n",
        "    bad = -good.to(torch.int32).view(1)\n",
        _BAD_STEP,
    ),
    Mutant(
        "the ranks with other shards do not compare their steps",
        "commhooks/engine/agreement.py",
        "    _check_steps([row[0] for row in table])\n    return agreement\n",
        "    return agreement\n",
        f"{_TESTS}/test_fully_shard_transactions.py::test_ranks_with_different_shards_are_at_one_step",
    ),
    Mutant(
        "the ranks with other shards wait for one that has failed",
        "commhooks/comm/shards.py",
        "    except CommHookError as error:\n        failure = error\n",
        "    except CommHookError:\n        raise\n",
        f"{_TESTS}/test_fully_shard_transactions.py::test_a_disagreement_of_some_is_an_error_on_all",
    ),
    Mutant(
        "hooks are compared among the replicas of each shard only",
        "commhooks/hook/request_check.py",
        "    if len({key for (key,) in table}) > 1:\n",
        "    if False:\n",
        f"{_TESTS}/test_fully_shard_refusals.py::test_different_hooks_are_refused_on_all_ranks",
    ),
    Mutant(
        "every group of replicas logs for itself",
        "commhooks/comm/shards.py",
        "    return group.rank() == 0 and (shard_group is None or shard_group.rank() == 0)\n",
        "    return group.rank() == 0\n",
        f"{_TESTS}/test_fully_shard_refusals.py::test_one_rank_of_the_model_speaks",
    ),
    Mutant(
        "accumulated gradients are averaged again",
        _SOURCE,
        "                    shard.parameter.grad = None\n",
        "",
        f"{_MODES}::test_accumulated_gradients",
    ),
    Mutant(
        "accumulated gradients are lost",
        _SOURCE,
        "            if shard.parameter.grad is not None:\n                earlier.add_(shard.parameter.grad)\n"
        "            shard.parameter.grad = earlier\n",
        "            pass\n",
        f"{_MODES}::test_accumulated_gradients",
    ),
    Mutant(
        "averages are not written back where FSDP has cast the gradient",
        _SOURCE,
        "                    grad.copy_(piece.view(grad.shape))\n",
        "                    pass\n",
        f"{_MODES}::test_options",
    ),
    Mutant(
        "gradients in padded buffers keep the average of their replica",
        "commhooks/gradients/local_shard.py",
        "        return torch.cat([piece for _, piece in self.pieces(self.flat, padded=True)])\n",
        "        return torch.cat([piece for _, piece in self.pieces(self.flat, padded=False)])\n",
        _EXACT,
    ),
    Mutant(
        "padding is forgotten",
        _SHARD,
        "        largest = -(-size // mesh.size())\n",
        "        largest = size // mesh.size()\n",
        _EXACT,
    ),
    Mutant(
        "the bucket is sent before FSDP has divided it",
        _SOURCE,
        "        current.filling = UnitBuffer(flat)\n",
        "        current.filling = UnitBuffer(flat.clone())\n",
        _EXACT,
    ),
    Mutant(
        "a unit with parameters unknown to the hook is ignored",
        _SOURCE,
        "    if current.filling is not None:\n        raise HookRunError(\n",
        "    if False:\n        raise HookRunError(\n",
        f"{_TESTS}/test_fully_shard_refusals.py::test_parameters_that_came_later_are_an_error",
    ),
    Mutant(
        "an abandoned pass goes on in the next one",
        _SOURCE,
        "            self._pass = None  # it has ended in an exception\n",
        "            pass\n",
        f"{_MODES}::test_unusual_backward_passes",
    ),
    Mutant(
        "a reentrant checkpoint around the model hides the end of the pass",
        _SOURCE,
        "        self._running(within=_refuse_reentrant)\n",
        "        self._running()\n",
        f"{_MODES}::test_a_reentrant_checkpoint_around_the_model_is_refused",
    ),
    Mutant(
        "the pass is known to end only where buckets arrive",
        _SOURCE,
        "                tensor.register_hook(self._on_backward)\n",
        "                pass\n",
        f"{_MODES}::test_unusual_backward_passes",
    ),
    Mutant(
        "a parameter reduced twice is sent twice",
        _SOURCE,
        "        if again is not None:\n",
        "        if False:\n",
        f"{_MODES}::test_a_unit_that_is_reduced_twice_is_refused",
    ),
    Mutant(
        "a second hook replaces the first",
        _SOURCE,
        "            if count_accumulate_hooks(shard.parameter):\n",
        "            if False:\n",
        f"{_TESTS}/test_fully_shard_refusals.py::test_refused_in_attach",
    ),
    Mutant(
        "a hook that is registered after the attach sees the gradient of one replica",
        _SOURCE,
        "        if count_accumulate_hooks(parameter) > 1:",
        "        if False:",
        f"{_TESTS}/test_fully_shard_refusals.py::test_a_hook_on_a_parameter_that_came_later_is_refused",
    ),
    Mutant(
        "loaded state takes the dtype of the weights, not that of the reduction",
        "commhooks/engine/known_buckets.py",
        "replace(plan, dtype=known.layout.dtype)",
        "plan",
        f"{_SETUPS}::test_weights_and_reduction_of_different_widths",
    ),
    Mutant(
        "the residual of a shard whose whole parameter is not compressed is dropped",
        "commhooks/checkpoint/distributed.py",
        "    for name in entries.keys() & (residuals or {}):\n",
        "    for name in entries:\n",
        f"{_SETUPS}::test_a_shard_that_is_compressed_although_the_whole_is_not",
    ),
    Mutant(
        "shards are put together along the dimension of the new ones",
        "commhooks/checkpoint/reshard.py",
        "    for dim in (extent.dim, *range(len(whole))):\n",
        "    for dim in (extent.dim,):\n",
        f"{_SETUPS}::test_shards_along_another_dimension",
    ),
    Mutant(
        "every shard continues with the Q of the first one",
        "commhooks/checkpoint/reshard.py",
        "        return payloads[index]\n",
        "        return payloads[0]\n",
        f"{_CHECKPOINTS}::test_a_resumed_run_is_bit_equal",
    ),
    Mutant(
        "residuals are saved by one rank only, as if they were whole",
        _SHARD,
        "        return DTensor.from_local(\n            part,",
        "        return DTensor.from_local(\n            part.clone().zero_(),",
        f"{_CHECKPOINTS}::test_a_resumed_run_is_bit_equal",
    ),
    Mutant(
        "a new shard takes the Q of the last one that began before its end",
        "commhooks/checkpoint/reshard.py",
        "        if first_row <= begin:\n",
        "        if first_row < begin + extent.shape[dim]:\n",
        f"{_CHECKPOINTS}::test_a_new_shard_goes_on_with_the_q_of_the_one_that_held_its_first_row",
    ),
    Mutant(
        "each shard knows only whether its own residuals could be saved",
        "commhooks/checkpoint/distributed.py",
        "        exact = bool(gather_rows(own, source.shard_group, None, _WHAT).all())\n",
        "        gather_rows(own, source.shard_group, None, _WHAT)\n",
        f"{_CHECKPOINTS}::test_without_the_residuals_of_one_shard_none_are_loaded",
    ),
    Mutant(
        "which residuals are saved depends on the shard",
        "commhooks/hook/comm_hook.py",
        "self._runner.kept_residuals(self._source.whole)",
        "self._runner.kept_residuals(self._source.names)",
        f"{_CHECKPOINTS}::test_the_mean_residual_moves_to_another_number_of_shards",
    ),
]

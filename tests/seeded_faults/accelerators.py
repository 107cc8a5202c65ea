"""Faults of what runs on accelerators; the tests run it on CPU tensors."""

from seeded_faults.mutant import Mutant

_EXCHANGE, _STACK, _CODEC = "commhooks/masked_exchange.py", "commhooks/matrix_stack.py", "commhooks/codec.py"
_ORACLE = "test_masked_exchange.py::test_gradients_and_residuals_equal_the_oracle"
_HOST = "test_masked_exchange.py::test_every_dtype_and_wire_gives_what_the_host_form_gives"
_MASKS = "test_masked_commit.py::test_masks_decide_as_the_host_does"

MUTANTS = [
    Mutant(
        "behind a mask: a bad step is committed",
        _EXCHANGE,
        "            keep = good & alive\n",
        "            keep = alive\n",
        _MASKS,
    ),
    Mutant(
        "behind a mask: an idle layer is committed",
        _EXCHANGE,
        "            keep = good & alive\n",
        "            keep = good | (alive & False)\n",
        _ORACLE,
    ),
    Mutant(
        "behind a mask: an idle layer has a gradient",
        _EXCHANGE,
        "torch.mul(arrived, alive, out=stack.q).add_(poison)",
        "stack.q.copy_(arrived).add_(poison)",
        _ORACLE,
    ),
    Mutant(
        "behind a mask: a bad gradient looks good",
        _EXCHANGE,
        "out=stack.q).add_(poison)",
        "out=stack.q)",
        _HOST,
    ),
    Mutant(
        "behind a mask: the residual with the mean Q",
        _EXCHANGE,
        "stack.q[part], alpha=-1)",
        "stack.learned_q(self._draw_q).read(self._memory.q)[part], alpha=-1)",
        _ORACLE,
    ),
    Mutant(
        "behind a mask: padding remembers",
        _EXCHANGE,
        "            residuals.flatten(1)[:, stack.filled :].zero_()\n",
        "            pass\n",
        "test_masked_exchange.py::test_padding_remembers_nothing",
    ),
    Mutant(
        "behind a mask: the scale is not followed",
        _EXCHANGE,
        "                delta.addcmul_(residuals[part], self._residual_factor)\n",
        "                delta.add_(residuals[part])\n",
        "test_masked_exchange.py::test_a_scale_on_the_device_changes_nothing",
    ),
    Mutant(
        "behind a mask: an overflow of the wire is not seen",
        _EXCHANGE,
        'torch.where(torch.maximum(-low, high) > limit, float("nan"), alive.to(flags.dtype))',
        "alive",
        "test_hard_gradients.py::test_huge_ones_are_worked_off_or_refused",
    ),
    Mutant(
        "behind a mask: the host waits for the scale",
        "commhooks/loss_scale.py",
        "    if isinstance(scale, torch.Tensor) and not arithmetic.host_may_look(scale.device):\n",
        "    if False:\n",
        "test_masked_exchange.py::test_kernels_per_shape_and_no_wait",
    ),
    Mutant(
        "stacks: a loaded residual is not read",
        _STACK,
        "                view.copy_(known)\n",
        "                pass\n",
        "test_masked_exchange.py::test_resume",
    ),
    Mutant(
        "stacks: a lost residual comes back",
        _STACK,
        "            else:\n                view.zero_()\n",
        "            else:\n                pass\n",
        "test_masked_exchange.py::test_slices_follow_a_dict",
    ),
    Mutant(
        "stacks: a pickle of each whole",
        "commhooks/memory.py",
        "t.clone() if t.untyped_storage().nbytes() > t.nbytes else t",
        "t",
        "test_masked_exchange.py::test_a_pickled_state_holds_each_residual_once",
    ),
    Mutant(
        "stacks: gradients one by one",
        "commhooks/lowrank_scratch.py",
        "(stack_deltas and len(group) > 1)",
        "False",
        "test_masked_exchange.py::test_kernels_per_shape_and_no_wait",
    ),
    Mutant(
        "stacks: no shape is shared",
        "commhooks/matrix.py",
        "        return matrix.n, matrix.m, matrix.rank\n",
        "        return matrix.n, matrix.m, id(matrix)\n",
        "test_masked_exchange.py::test_kernels_per_shape_and_no_wait",
    ),
    Mutant(
        "stacks: missing directions stay missing",
        _CODEC,
        "torch.where(weak.unsqueeze(-1), torch.add(rows, refill, alpha=_NUDGE), rows)",
        "rows",
        "test_masked_exchange.py::test_orthonormal_for_hard_inputs",
    ),
    Mutant(
        "stacks: only what is found to be dependent is nudged",
        _CODEC,
        "_WEAK, _NUDGE = 1e-4, 1e-6",
        "_WEAK, _NUDGE = 1e-12, 1e-6",
        "test_masked_exchange.py::test_orthonormal_for_hard_inputs",
    ),
    Mutant(
        "stacks: orthonormalised once",
        _CODEC,
        "    for _ in range(3):\n        rows = torch.linalg.solve",
        "    for _ in range(1):\n        rows = torch.linalg.solve",
        "test_masked_exchange.py::test_orthonormal_for_hard_inputs",
    ),
    Mutant(
        "stacks: an exchange lives on",
        _EXCHANGE,
        "        return lambda i: self._draw_q(stack.matrices[i])\n",
        "        stack.draw = lambda i: self._draw_q(stack.matrices[i])\n        return stack.draw\n",
        "test_masked_exchange.py::test_no_exchange_outlives_its_pass",
    ),
    Mutant(
        "behind a mask: a scale of zero counts",
        "commhooks/loss_scale.py",
        "    return torch.where(scale.isfinite() & (scale > 0), scale, otherwise)\n",
        "    return scale\n",
        "test_masked_exchange.py::test_a_scale_of_zero_leaves_nothing_behind",
    ),
    Mutant(
        "stacks: Q is not scaled",
        _EXCHANGE,
        "        rows, missing = codec.unit_stack(q)\n",
        "        rows, missing = q.double(), codec.unit_stack(q)[1]\n",
        "test_fp16_wire.py::test_what_travels_grows_with_the_gradient_not_with_its_square",
    ),
    Mutant(
        "loss scale zero",
        "commhooks/loss_scale.py",
        "    if not (math.isfinite(scale) and scale > 0):\n",
        "    if math.isnan(scale):\n",
        "test_loss_scale.py::test_a_scale_that_is_none",
    ),
    Mutant(
        "the host waits for events",
        "commhooks/clocks.py",
        "        self.collect(wait=False)\n",
        "        self.collect(wait=True)\n",
        "test_clocks.py::test_training_waits_for_no_event",
    ),
    Mutant(
        "events that have not passed are read",
        "commhooks/clocks.py",
        "                elif not (begin.query() and end.query()):\n                    return\n",
        "",
        "test_clocks.py::test_what_the_device_has_not_done_is_counted_later",
    ),
]

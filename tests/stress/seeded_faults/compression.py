"""Seeded faults. The compressed exchange: codec, wire, buckets, steps, the state of a running hook."""

from tests.stress.seeded_faults.mutant import Mutant

_EARLIER = (
    "        for earlier in self.running[:-1]:\n"
    "            if earlier.has_round_left and not earlier.is_held:\n"
    "                earlier.advance()\n"
)

MUTANTS = [
    Mutant(
        "alternate: P and Q do not take turns",
        "commhooks/compressors/powersgd/exchange.py",
        "[x.name in self.p for x in work.matrices]",
        "[False for x in work.matrices]",
        "compressors/powersgd/test_powersgd_against_oracle.py::test_gradients_and_residuals_equal_the_oracle",
    ),
    Mutant(
        "fused: missing directions are not told",
        "commhooks/compressors/powersgd/native/unit_rows.h",
        "        x->missing += norm <= call->number;\n",
        "",
        "compressors/powersgd/test_codec.py::test_orthonormal_whatever_comes_in",
    ),
    Mutant(
        "fused: a part of Q's sum is lost",
        "commhooks/compressors/powersgd/native/form_q.h",
        "for (part = 1; part",
        "for (part = 2; part",
        "compressors/powersgd/test_codec.py::test_products",
    ),
    Mutant(
        "inexact for ever after a commit that failed",
        "commhooks/engine/held_state.py",
        "            self.state.local_missing = self.torn = False\n",
        "            pass\n",
        "gradients/test_fully_shard_failures.py::test_the_commit_after_one_that_failed_is_whole_again",
    ),
    Mutant(
        "residuals reset at the rebuild",
        "commhooks/engine/known_buckets.py",
        "            layout = read_layout(bucket.flat, bucket.parameters, names)\n",
        "            layout = read_layout(bucket.flat, bucket.parameters, names)\n"
        '            self._state["residual"].clear()\n',
        "gradients/test_layout_independence.py",
    ),
    Mutant(
        "each bucket is committed by its own verdict",
        "commhooks/engine/backward_pass.py",
        "            each.advance(good)\n",
        "            each.advance(bool(each.finite))\n",
        "engine/test_nonfinite.py",
    ),
    Mutant(
        "non-finite numbers not noticed",
        "commhooks/comm/wire.py",
        '    return torch.maximum(-low, high) < float("inf")\n',
        "    return torch.ones((), dtype=torch.bool, device=reduced.device)\n",
        "engine/test_nonfinite.py",
    ),
    Mutant(
        "the loss scale of a skipped step",
        "commhooks/engine/held_state.py",
        "        if verdict is not False:\n            before",
        "        self.state.loss_scale = loss_scale\n        if verdict is not False:\n            before",
        "gradients/test_loss_scale.py::test_a_changing_scale_changes_nothing",
    ),
    Mutant(
        "wait inside the hook",
        "commhooks/engine/backward_pass.py",
        "        for earlier in self.running[:-1]:\n",
        "        for earlier in self.running:\n",
        "comm/test_collectives.py",
    ),
    Mutant(
        "Q of a bucket before P of the next",
        "commhooks/engine/backward_pass.py",
        f"        exchange.advance()\n{_EARLIER}",
        f"{_EARLIER}        exchange.advance()\n",
        "comm/test_collectives.py",
    ),
    Mutant(
        "residual of the averaged projection",
        "commhooks/compressors/powersgd/torch_products.py",
        "(deltas[k], self.p[i], self.q[i], out",
        "(deltas[k], self.p[i], self.q[i] if mean_q is None else mean_q[k], out",
        "compressors/powersgd/test_powersgd_against_oracle.py",
    ),
    Mutant(
        "rounding of the wire not fed back",
        "commhooks/comm/wire.py",
        "    factor.copy_(out)\n    factor.mul_(world_size)\n",
        "",
        "compressors/powersgd/test_powersgd_cases.py",
    ),
    Mutant(
        "batched: idle parameters lose their residual",
        "commhooks/compressors/powersgd/host_kernel.py",
        "                        if slot not in idle:\n",
        "                        if True:\n",
        "compressors/powersgd/test_batched_powersgd.py::test_a_parameter_that_no_rank_uses_keeps_its_residual",
    ),
    Mutant(
        "memory order taken for logical order",
        "commhooks/gradients/layout.py",
        "    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)\n",
        "    order = list(range(parameter.dim()))\n",
        "gradients/test_parameter_kinds.py",
    ),
    Mutant(
        "the user's precision switches apply",
        "commhooks/gradients/precision.py",
        '            switch.fp32_precision = "ieee"\n',
        "            pass\n",
        "gradients/test_precision.py",
    ),
    Mutant(
        "residual does not follow the loss scale",
        "commhooks/engine/session.py",
        "group.size(), loss_scale / state.loss_scale, ",
        "group.size(), 1.0, ",
        "gradients/test_loss_scale.py",
    ),
]

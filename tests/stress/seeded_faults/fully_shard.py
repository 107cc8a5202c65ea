"""Seeded faults. Models sharded by `fully_shard`: buffers, the end of a pass, and what all shards must agree on."""

from tests.stress.seeded_faults.mutant import Mutant

_SHARD = "commhooks/gradients/local_shard.py"
_MODES = "gradients/test_fully_shard_modes.py"
_CHECKPOINTS = "checkpoint/test_fully_shard_checkpoints.py"

MUTANTS = [
    Mutant(
        "one good shard is enough",
        "commhooks/comm/shards.py",
        "    bad = (~good).to(torch.int32).view(1)\n",
        "    bad = -good.to(torch.int32).view(1)\n",
        "engine/test_fully_shard_transactions.py::test_a_bad_step_changes_nothing_anywhere",
    ),
    Mutant(
        "accumulated gradients are averaged again",
        _SHARD,
        "                shard.parameter.grad = None\n",
        "",
        f"{_MODES}::test_accumulated_gradients",
    ),
    Mutant(
        "averages are not written back where FSDP has cast the gradient",
        _SHARD,
        "                    grad.copy_(piece.view(grad.shape))\n",
        "                    pass\n",
        f"{_MODES}::test_options",
    ),
    Mutant(
        "the bucket is sent before FSDP has divided it",
        "commhooks/gradients/fully_shard.py",
        "        current.filling = UnitBuffer(flat)\n",
        "        current.filling = UnitBuffer(flat.clone())\n",
        "gradients/test_fully_shard_gradients.py::test_an_all_reduce_in_the_hook_is_the_mean",
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
]

"""Seeded faults. The quantised exchange: scales, shares, both roundings, what is not committed."""

from seeded_faults.mutant import Mutant

_QUANTIZED = "commhooks/compressors/quantized"
_ORACLE = "compressors/quantized/test_quantized_against_oracle.py::test_averages_and_residuals_are_those_of_the_oracle"

MUTANTS = [
    Mutant(
        "quantised: what the rounding of the mean loses is not times the number of ranks",
        f"{_QUANTIZED}/torch_kernel.py",
        "own[:count].mul_(messages.world_size)",
        "own[:count]",
        _ORACLE,
    ),
    Mutant(
        "quantised: a parameter without a gradient loses its residual",
        f"{_QUANTIZED}/torch_kernel.py",
        "            used = has_gradient.index_select(0, self._slot_of_block).unsqueeze(1)\n",
        "            pass\n",
        _ORACLE,
    ),
    Mutant(
        "quantised: on an accelerator a step that is not finite is committed",
        f"{_QUANTIZED}/torch_kernel.py",
        "        torch.where(keep, lost, before, out=before)\n",
        "        before.copy_(lost)\n",
        "compressors/quantized/test_quantized_cases.py::test_masks_keep_the_residual_of_a_step_that_is_not_finite",
    ),
    Mutant(
        "quantised: on an accelerator a residual takes the loss scale of a step that is not committed",
        f"{_QUANTIZED}/torch_kernel.py",
        "        factor = chosen(good, factor, 1.0)\n",
        "",
        "compressors/test_every_compressor.py::test_a_scale_that_changes_with_an_overflow_changes_no_bit",
    ),
    Mutant(
        "quantised: the padding keeps what was there",
        f"{_QUANTIZED}/torch_kernel.py",
        "                delta[here.stop : end].zero_()\n",
        "                pass\n",
        "compressors/quantized/test_quantized_cases.py::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
    Mutant(
        "quantised: inf has a scale",
        f"{_QUANTIZED}/blocks.py",
        "        top.add_(top * 0)  # inf becomes NaN\n",
        "",
        "compressors/quantized/test_blocks.py::test_what_is_not_finite_makes_its_block_nan_and_no_other",
    ),
    Mutant(
        "quantised: denormal scales are used",
        f"{_QUANTIZED}/blocks.py",
        "torch.where(top < info.tiny, 0, top)",
        "top",
        "compressors/quantized/test_blocks.py::test_blocks_without_a_usable_scale_stay",
    ),
    Mutant(
        "quantised: the owner of a block depends on the bucket",
        f"{_QUANTIZED}/shares.py",
        "crc32(name.encode())",
        "number",
        "compressors/quantized/test_shares.py::test_another_layout_changes_no_bit",
    ),
    Mutant(
        "quantized_all_reduce: zeros are no numbers, and keep the residual",
        "commhooks/hook/quantized_all_reduce.py",
        "fill_(1)",
        "fill_(int(flat.any()))",
        "hook/test_quantized_all_reduce.py::test_what_is_not_finite_makes_its_block_nan_and_changes_no_residual",
    ),
    Mutant(
        "an all-gather counts as an all-reduce of all ranks' parts",
        "commhooks/comm/collective.py",
        "        return -(-whole // 2)\n",
        "        return whole\n",
        "compressors/test_every_compressor.py::test_replicas_are_equal_and_send_what_is_planned_in_one_order",
    ),
    Mutant(
        "every rank is sent this rank's own row",
        "commhooks/comm/messages.py",
        "isend(rows[other],",
        "isend(rows[here],",
        "comm/test_messages.py::test_the_same_as_gloos_collectives",
    ),
    Mutant(
        "the memory of abandoned messages is free at once",
        "commhooks/comm/messages.py",
        "        in_flight.add(self)\n",
        "",
        "comm/test_messages.py::test_abandoned_messages_change_nothing",
    ),
]

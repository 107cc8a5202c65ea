"""Seeded faults. Quantising in torch and C: scales, shares, roundings, what is not committed; PowerSGD's factors."""

from tests.stress.seeded_faults.mutant import Mutant

_QUANTIZED = "commhooks/compressors/quantized"
_ORACLE = "compressors/quantized/test_quantized_against_oracle.py::test_averages_and_residuals_are_those_of_the_oracle"
_BITS = "compressors/quantized/test_native_blocks.py::test_the_bits_are_those_of_torch"
_POWERSGD = "commhooks/compressors/powersgd"
_FACTORS_TESTS = "compressors/powersgd/test_quantised_factors.py"

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
        "quantised: the owner of a block depends on the bucket",
        f"{_QUANTIZED}/shares.py",
        "crc32(name.encode())",
        "number",
        "compressors/quantized/test_shares.py::test_another_layout_changes_no_bit",
    ),
    Mutant(
        "native quantising: the residual is not multiplied by the factor",
        f"{_QUANTIZED}/native/codes.h",
        "factor * residual[i] + delta[i]",
        "(factor > 0) * residual[i] + delta[i]",
        _BITS,
    ),
    Mutant(
        "native quantising: a block that is not full has other numbers than zero behind",
        f"{_QUANTIZED}/native/codes.h",
        "i < half ? 8 :",
        "i < half ? 0 :",
        "hook/test_quantized_all_reduce.py::test_the_result_is_within_its_bound_of_the_mean",
    ),
    Mutant(
        "native quantising: the owner leaves out the ranks before it",
        f"{_QUANTIZED}/native/blocks.c",
        "if (rank != call->rank)",
        "if (rank > call->rank)",
        _BITS,
    ),
    Mutant(
        "quantised factors: what is lost of Q is not in the residual",
        f"{_POWERSGD}/message.py",
        "            factor.sub_(part.view_as(factor))\n",
        "            pass\n",
        f"{_FACTORS_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: vectors are rounded without error feedback",
        f"{_POWERSGD}/compressor.py",
        "as_it_is=self.config.use_error_feedback)",
        "as_it_is=True)",
        f"{_FACTORS_TESTS}::test_nothing_but_factors_is_rounded_without_error_feedback",
    ),
    Mutant(
        "kernel: it reads numbers of another dtype",
        "commhooks/compressors/native/tables.py",
        "    fits = tensor.dtype == dtype and ",
        "    fits = ",
        "compressors/test_native_sources.py::test_c_gets_no_address_of_anything_else",
    ),
]

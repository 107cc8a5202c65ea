"""Seeded faults. The native kernel of the quantised hooks: every operation of torch's form, in its order."""

from tests.stress.seeded_faults.mutant import Mutant

_QUANTIZED = "commhooks/compressors/quantized"
_BITS = "compressors/quantized/test_native_blocks.py::test_the_bits_are_those_of_torch"

MUTANTS = [
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
        "native quantising: residuals are written although the step is not committed",
        f"{_QUANTIZED}/native_kernel.py",
        "if self._error_feedback and bool(good):",
        "if self._error_feedback:",
        "compressors/quantized/test_quantized_cases.py::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
]

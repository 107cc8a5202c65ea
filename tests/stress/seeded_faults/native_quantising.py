"""Seeded faults. The native kernel of the quantised hooks: every operation of torch's form, in its order."""

from seeded_faults.mutant import Mutant

_QUANTIZED = "commhooks/compressors/quantized"
_BITS = "compressors/quantized/test_native_blocks.py::test_the_bits_are_those_of_torch"

MUTANTS = [
    Mutant(
        "native quantising: what rounding loses is multiplied and subtracted at once",
        f"{_QUANTIZED}/native_blocks.py",
        '"-ffp-contract=off"',
        '"-ffp-contract=fast"',
        _BITS,
    ),
    Mutant(
        "native quantising: ties go away from zero",
        f"{_QUANTIZED}/native/codes.h",
        "(IS_FLOAT ? __builtin_rintf(x) : __builtin_rint(x))",
        "((x) < 0 ? -(REAL)(int)(0.5 - (x)) : (REAL)(int)((x) + 0.5))",
        _BITS,
    ),
    Mutant(
        "native quantising: inf has a scale",
        f"{_QUANTIZED}/native/codes.h",
        '    if (!(largest <= LARGEST)) return __builtin_nan(""); /* inf or NaN */\n',
        "",
        "compressors/quantized/test_quantized_cases.py::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
    Mutant(
        "native quantising: denormal scales are used",
        f"{_QUANTIZED}/native/codes.h",
        "scale < TINY ? 0 : scale",
        "scale",
        _BITS,
    ),
    Mutant(
        "native quantising: the largest scale is not kept to",
        f"{_QUANTIZED}/native/codes.h",
        "    if (scale > call->most) scale = call->most;\n",
        "",
        _BITS,
    ),
    Mutant(
        "native quantising: the residual is not multiplied by the factor",
        f"{_QUANTIZED}/native/codes.h",
        "factor * residual[i] + delta[i]",
        "(factor > 0) * residual[i] + delta[i]",
        _BITS,
    ),
    Mutant(
        "native quantising: what the rounding of the mean loses is not times the number of ranks",
        f"{_QUANTIZED}/native/blocks.c",
        "        if (call->ranks > 1) multiply(delta, call->ranks, n);\n",
        "",
        _BITS,
    ),
    Mutant(
        "native quantising: the owner leaves out the ranks before it",
        f"{_QUANTIZED}/native/blocks.c",
        "if (rank != call->rank)",
        "if (rank > call->rank)",
        _BITS,
    ),
    Mutant(
        "native quantising: the ranks are added from the last to the first",
        f"{_QUANTIZED}/native/blocks.c",
        "        for (size_t rank = 0; rank < call->ranks; rank++) {",
        "        for (size_t rank = call->ranks; rank-- > 0;) {",
        _BITS,
    ),
    Mutant(
        "native quantising: codes of 4 bits change places",
        f"{_QUANTIZED}/native/codes.h",
        "encode_some(delta + half, codes, scale, n - half, 7, 8, 4)",
        "encode_some(delta + half, codes, scale, n - half, 7, 7, 4)",
        _BITS,
    ),
    Mutant(
        "native quantising: a part of a parameter is left out",
        f"{_QUANTIZED}/native/pieces.h",
        "    return least(pieces(x->numel, x->block), (part + 1) * part_blocks(x));",
        "    return least(pieces(x->numel, x->block), (part + 1) * part_blocks(x) - (part > 0));",
        _BITS,
    ),
    Mutant(
        "native quantising: residuals are written although the step is not committed",
        f"{_QUANTIZED}/native_kernel.py",
        "if self._error_feedback and bool(good):",
        "if self._error_feedback:",
        "compressors/quantized/test_quantized_cases.py::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
    Mutant(
        "native quantising: a parameter without a gradient loses its residual",
        f"{_QUANTIZED}/native_kernel.py",
        "return residuals[slot.name] if used else None",
        "return residuals[slot.name]",
        _BITS,
    ),
    Mutant(
        "native quantising: a residual that stays keeps the old loss scale",
        f"{_QUANTIZED}/native_kernel.py",
        "            residuals[slot.name].mul_(factor)\n",
        "            pass\n",
        _BITS,
    ),
    Mutant(
        "native quantising: the kernel is used although fused is False",
        "commhooks/compressors/native/choice.py",
        "    if fused is False or not library",
        "    if not library",
        "compressors/quantized/test_native_machines.py::test_nothing_is_missing_where_the_kernel_does_not_apply",
    ),
    Mutant(
        "native quantising: the build is known by its source alone",
        f"{_QUANTIZED}/native_blocks.py",
        "        digest.update(results_of(load(dtype), dtype))\n",
        "        pass\n",
        "compressors/quantized/test_native_blocks.py::test_a_build_that_joins_operations_is_another_one",
    ),
]

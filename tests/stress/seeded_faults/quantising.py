"""Seeded faults. The quantised exchange: scales, shares, both roundings, what is not committed."""

from tests.stress.seeded_faults.mutant import Mutant

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
        "quantised: the owner of a block depends on the bucket",
        f"{_QUANTIZED}/shares.py",
        "crc32(name.encode())",
        "number",
        "compressors/quantized/test_shares.py::test_another_layout_changes_no_bit",
    ),
]

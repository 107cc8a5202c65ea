"""Seeded faults. PowerSGD with quantised factors: what is fed back, what is never rounded, what is not finite."""

from tests.stress.seeded_faults.mutant import Mutant

_POWERSGD = "commhooks/compressors/powersgd"
_TESTS = "compressors/powersgd/test_quantised_factors.py"

MUTANTS = [
    Mutant(
        "quantised factors: what is lost of Q is not in the residual",
        f"{_POWERSGD}/message.py",
        "            factor.sub_(part.view_as(factor))\n",
        "            pass\n",
        f"{_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: vectors are rounded without error feedback",
        f"{_POWERSGD}/compressor.py",
        "as_it_is=self.config.use_error_feedback)",
        "as_it_is=True)",
        f"{_TESTS}::test_nothing_but_factors_is_rounded_without_error_feedback",
    ),
]

"""Seeded faults. PowerSGD with quantised factors: what is fed back, what is never rounded, what is not finite."""

from seeded_faults.mutant import Mutant

_POWERSGD = "commhooks/compressors/powersgd"
_TESTS = "compressors/powersgd/test_quantised_factors.py"

MUTANTS = [
    Mutant(
        "quantised factors: what is lost of Q is not in the residual",
        f"{_POWERSGD}/quantised_message.py",
        "            factor.sub_(part.view_as(factor))\n",
        "            pass\n",
        f"{_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: on an accelerator what is lost of Q is not in the residual",
        f"{_POWERSGD}/device_kernel.py",
        "        now.last.subtract_lost([self.q.flat])\n",
        "",
        f"{_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: what is lost of the only factor of a step is not in the residual",
        f"{_POWERSGD}/host_kernel.py",
        "        now.last.subtract_lost(self._sent(now))  #",
        "        pass  #",
        f"{_TESTS}::test_averages_and_residuals_are_those_of_the_oracle",
    ),
    Mutant(
        "quantised factors: what is lost of vectors is not in their residual",
        "commhooks/compressors/quantized/torch_kernel.py",
        "        lost = self._of_slots\n",
        "        lost = 0 * self._of_slots\n",
        f"{_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: the padding of blocks keeps NaN",
        f"{_POWERSGD}/quantised_message.py",
        "        kernel.delta[first:].zero_()\n",
        "",
        f"{_TESTS}::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
    Mutant(
        "quantised factors: a vector that is not finite does not stop the step",
        f"{_POWERSGD}/quantised_message.py",
        '        self._bad.copy_(torch.where(averaged.finite, 0.0, float("nan")))\n',
        "",
        f"{_TESTS}::test_one_number_that_is_not_finite_anywhere_stops_the_step",
    ),
    Mutant(
        "quantised factors: vectors are rounded without error feedback",
        f"{_POWERSGD}/compressor.py",
        "as_it_is=self.config.use_error_feedback)",
        "as_it_is=True)",
        f"{_TESTS}::test_nothing_but_factors_is_rounded_without_error_feedback",
    ),
    Mutant(
        "quantised factors: an element of P Q^T does not fit into the bucket",
        f"{_POWERSGD}/compressor.py",
        " / math.sqrt(max(x.rank for x in matrices))",
        "",
        f"{_TESTS}::test_what_a_committed_step_gives_fits_into_a_bucket_of_float16",
    ),
    Mutant(
        "quantised factors: parts of factors are quantised and not factors",
        f"{_POWERSGD}/quantised_message.py",
        "self.packed * step.world_size)",
        "self.packed)",
        f"{_TESTS}::test_nothing_is_lost",
    ),
    Mutant(
        "quantised factors: a loaded state has no wrapper",
        "commhooks/compressors/base.py",
        "        made = copy.copy(self)",
        "        made = type(self)(self.config, self.wire_dtype)",
        "compressors/test_every_compressor.py::test_resume_is_bit_equal[powerSGD, int8 wrapper-mean]",
    ),
    Mutant(
        "quantised factors: vectors travel twice",
        f"{_POWERSGD}/workspace.py",
        "for slot in new.beside",
        "for slot in ()",
        f"{_TESTS}::test_the_plan_knows_bytes_and_memory",
    ),
]

"""Seeded faults. Counters, clocks, norms, samples, and what logs them."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "waiting is codec time",
        "commhooks/comm/clocks.py",
        "-seconds if waiting else seconds",
        "0.0 if waiting else seconds",
        "hook/test_metrics.py::test_waiting_is_not_codec_time",
    ),
    Mutant(
        "a sample of this rank alone",
        "commhooks/hook/cosine.py",
        "                dist.all_reduce(gradient, group=self._group())\n",
        "                pass\n",
        "hook/test_metrics.py::test_the_cosine_is_right_and_leaves_no_trace",
    ),
    Mutant(
        "residuals are told with the loss scale",
        "commhooks/hook/norms.py",
        "name: norm / factor for",
        "name: norm for",
        "hook/test_metrics.py::test_norms",
    ),
]

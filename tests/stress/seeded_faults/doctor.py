"""Seeded faults. `commhooks doctor`."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "the doctor leaves the random state moved",
        "commhooks/tools/doctor/run.py",
        "    finally:\n        restore_random()\n",
        "    finally:\n",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "the doctor measures the model itself",
        "commhooks/tools/doctor/copies.py",
        "copy.deepcopy(ddp_model.module)",
        "ddp_model.module",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
    Mutant(
        "each rank believes its own clock",
        "commhooks/tools/doctor/measure.py",
        "measured.step_ms.append(1000 * max(step))",
        "measured.step_ms.append(1000 * passed)",
        "tools/test_doctor.py::test_a_training_goes_on_as_if_nobody_had_asked",
    ),
]

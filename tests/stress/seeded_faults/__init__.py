"""The seeded faults of `mutants.py`, a module for each area. A new one goes into the list of its area."""

from seeded_faults import (
    accelerate,
    accelerate_settings,
    accelerators,
    attaching,
    compression,
    doctor,
    engine,
    kernels,
    late_answers,
    lightning,
    metrics,
    native_quantising,
    nodes,
    plan,
    quantised_factors,
    quantising,
    saving,
    trainer,
)

AREAS = (
    attaching,
    compression,
    engine,
    kernels,
    accelerators,
    late_answers,
    saving,
    lightning,
    accelerate,
    accelerate_settings,
    trainer,
    metrics,
    nodes,
    doctor,
    plan,
    quantised_factors,
    quantising,
    native_quantising,
)
MUTANTS = [mutant for area in AREAS for mutant in area.MUTANTS]

"""The seeded faults of `mutants.py`, a module for each area. A new one goes into the list of its area."""

from tests.stress.seeded_faults import (
    accelerate,
    accelerators,
    attaching,
    auto,
    compression,
    engine,
    fully_shard,
    lightning,
    local_steps,
    quantising,
    saving,
    users,
)

MUTANTS = [
    *accelerate.MUTANTS,
    *accelerators.MUTANTS,
    *attaching.MUTANTS,
    *auto.MUTANTS,
    *compression.MUTANTS,
    *engine.MUTANTS,
    *fully_shard.MUTANTS,
    *lightning.MUTANTS,
    *local_steps.MUTANTS,
    *quantising.MUTANTS,
    *saving.MUTANTS,
    *users.MUTANTS,
]

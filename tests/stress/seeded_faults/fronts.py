"""Seeded faults. The front ends beside `lightning.pytorch`: `pytorch_lightning`, Fabric, values of Hydra."""

from tests.stress.seeded_faults.mutant import Mutant

FABRIC = "with_lightning/test_fabric.py"
TWIN = "with_lightning/test_pytorch_lightning.py"

MUTANTS = [
    Mutant(
        "Fabric does not restore",
        "lightning_commhooks/fabric_strategy.py",
        "        for each in take_over:\n            each()\n",
        "",
        f"{FABRIC}::test_a_resumed_training_is_bit_equal",
    ),
    Mutant(
        "names are registered with lightning.pytorch only",
        "lightning_commhooks/__init__.py",
        '"lightning": "lightning_pytorch", "pytorch_lightning": "pytorch_lightning"',
        '"lightning": "lightning_pytorch"',
        f"{TWIN}::test_names_are_registered_at_once",
    ),
]

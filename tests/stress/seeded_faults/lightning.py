"""Seeded faults. `lightning_commhooks`: strategies and checkpoints, with Fabric."""

from tests.stress.seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "FSDP2 of Lightning: every batch of an accumulated gradient is sent",
        "lightning_commhooks/fsdp2.py",
        "        root.set_requires_gradient_sync(False)\n",
        "        pass\n",
        "with_lightning/test_lightning_fsdp2.py::test_gradients_are_accumulated_before_they_are_sent",
    ),
    Mutant(
        "FSDP2 of Lightning: any mesh will do",
        "lightning_commhooks/fsdp2.py",
        "elif data.device_mesh.mesh.flatten().tolist() != shards.mesh.tolist():",
        "elif False:",
        "with_lightning/test_lightning_fsdp2.py::test_what_cannot_work_is_refused",
    ),
    Mutant(
        "FSDP2 checkpoints: a save that was interrupted is loaded",
        "commhooks/hook/hook_folder.py",
        "self._broadcast(self.last_file.is_file())",
        "self._broadcast(self._path.is_dir())",
        "with_lightning/test_lightning_fsdp2_folder.py::test_a_folder_that_is_incomplete_or_of_other_weights_is_not_loaded",
    ),
    Mutant(
        "Lightning: checkpoints of the web are run",
        "lightning_commhooks/strategy.py",
        "weights_only = True if weights_only is None else weights_only",
        "pass",
        "checkpoint/test_hostile_files.py::test_lightning_reads_checkpoints_of_the_web_with_weights_only_too",
    ),
    Mutant(
        "a joint save in an exception",
        "lightning_commhooks/checkpoint.py",
        "    return trainer.interrupted or in_signal_handler()\n",
        "    return in_signal_handler()\n",
        "with_lightning/test_interrupted_trainer.py::test_what_ends_a_training_leaves_a_checkpoint_that_resumes",
    ),
    Mutant(
        "Lightning: a validation of replicas that are sharded sees those of each rank",
        "lightning_commhooks/hooked_strategy.py",
        "        super().on_validation_start()\n        self.end_round()\n",
        "        super().on_validation_start()\n",
        "with_lightning/test_lightning_local_steps.py::test_a_validation_ends_the_round_of_replicas_that_are_sharded",
    ),
    Mutant(
        "Fabric does not restore",
        "lightning_commhooks/fabric_strategy.py",
        "        for each in take_over:\n            each()\n",
        "",
        "with_lightning/test_fabric.py::test_a_resumed_training_is_bit_equal",
    ),
]

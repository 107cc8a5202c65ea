"""Seeded faults. `lightning_commhooks`: strategy and checkpoints."""

from seeded_faults.mutant import Mutant

MUTANTS = [
    Mutant(
        "FSDP2 checkpoints: a folder that cannot be removed is an error on rank 0 only",
        "lightning_commhooks/fsdp2.py",
        "        if failed := self.broadcast(failed):\n",
        "        if failed:\n",
        "with_lightning/test_lightning_fsdp2_folder.py::test_what_is_in_the_way_of_a_save",
    ),
    Mutant(
        "FSDP2 checkpoints: new weights beside the hook of the save before",
        "lightning_commhooks/fsdp2.py",
        "            HookFolder(path).remove()\n",
        "            pass\n",
        "with_lightning/test_lightning_fsdp2_folder.py::test_a_folder_that_is_incomplete_or_of_other_weights_is_not_loaded",
    ),
    Mutant(
        "FSDP2 checkpoints: a save that was interrupted is loaded",
        "lightning_commhooks/hook_folder.py",
        "return self._last_file.is_file()",
        "return self._path.is_dir()",
        "with_lightning/test_lightning_fsdp2_folder.py::test_a_folder_that_is_incomplete_or_of_other_weights_is_not_loaded",
    ),
    Mutant(
        "FSDP2 checkpoints: what is no tensor may run code",
        "lightning_commhooks/hook_folder.py",
        "        torch.load(value, weights_only=True)\n",
        "",
        "with_lightning/test_lightning_fsdp2_folder.py::test_what_is_no_plain_data_is_not_read",
    ),
    Mutant(
        "FSDP2 checkpoints: residuals for a hook that had none",
        "commhooks/checkpoint/distributed.py",
        'elif residuals and "parameters" in payload:',
        "elif residuals:",
        "with_lightning/test_lightning_fsdp2_folder.py::test_the_state_of_another_hook",
    ),
    Mutant(
        "a fit with shards resumes without its hook",
        "lightning_commhooks/fsdp2.py",
        "        if self.broadcast(HookFolder(path).is_complete):\n",
        "        if False:\n",
        "with_lightning/test_lightning_fsdp2.py::test_a_resumed_fit_is_bit_equal",
    ),
    Mutant(
        "the replicas of a fit with shards train on the same samples",
        "lightning_commhooks/fsdp2.py",
        '        return {"num_replicas": self.world_size, "rank": self.global_rank}\n',
        '        return {"num_replicas": 2, "rank": self.global_rank % 2}\n',
        "with_lightning/test_lightning_fsdp2.py::test_replicas_of_shards_train_as_one_replica",
    ),
    Mutant(
        "the hook of an earlier fit stays on the shards",
        "lightning_commhooks/fsdp2.py",
        "            self._comm_hook.detach()  # of an earlier fit\n",
        "            pass\n",
        "with_lightning/test_lightning_fsdp2.py::test_fits_follow_each_other",
    ),
    Mutant(
        "Lightning: no environment without a module",
        "lightning_commhooks/strategy.py",
        "        if self.lightning_module is not None:\n            self._settle",
        "        assert self.lightning_module is not None\n        if True:\n            self._settle",
        "with_lightning/test_lightning_training.py::test_trains_as_with_ddp_strategy",
    ),
    Mutant(
        "pytorch_lightning: no environment without a module",
        "lightning_commhooks/strategy.py",
        "        if self.lightning_module is not None:\n            self._settle",
        "        assert self.lightning_module is not None\n        if True:\n            self._settle",
        "with_lightning/test_pytorch_lightning.py::test_the_environment_may_be_set_up_before_fit",
    ),
    Mutant(
        "shards: nobody says that the environment needs the module",
        "lightning_commhooks/fsdp2.py",
        "        if self.lightning_module is None:\n            raise HookConfigError(",
        "        if False:\n            raise HookConfigError(",
        "with_lightning/test_lightning_fsdp2.py::test_the_environment_needs_the_module",
    ),
    Mutant(
        "Lightning does not restore",
        "lightning_commhooks/strategy.py",
        "        if take_over is not None:\n            take_over()\n",
        "        if take_over is not None:\n            pass\n",
        "with_lightning/test_lightning_resume.py",
    ),
    Mutant(
        "Lightning: checkpoints of the web are run",
        "lightning_commhooks/strategy.py",
        "weights_only=True if weights_only is None else weights_only",
        "weights_only=weights_only",
        "checkpoint/test_hostile_files.py::test_lightning_reads_checkpoints_of_the_web_with_weights_only_too",
    ),
    Mutant(
        "Lightning: the optimizers load before the payload is checked",
        "lightning_commhooks/strategy.py",
        "        hook = self._comm_hook\n        take_over = None\n",
        "        super().load_optimizer_state_dict(checkpoint)\n"
        "        hook = self._comm_hook\n        take_over = None\n",
        "checkpoint/test_hostile_files.py::test_the_optimizers_wait_until_the_payload_has_been_checked",
    ),
    Mutant(
        "a joint save in an exception",
        "lightning_commhooks/checkpoint.py",
        "    return trainer.interrupted or in_signal_handler()\n",
        "    return in_signal_handler()\n",
        "with_lightning/test_interrupted_trainer.py::test_what_ends_a_training_leaves_a_checkpoint_that_resumes",
    ),
    Mutant(
        "a joint save in the requeue signal",
        "lightning_commhooks/checkpoint.py",
        "    return trainer.interrupted or in_signal_handler()\n",
        "    return trainer.interrupted\n",
        "with_lightning/test_interrupted_trainer.py::test_the_requeue_signal_at_different_steps_and_in_mid_backward",
    ),
]

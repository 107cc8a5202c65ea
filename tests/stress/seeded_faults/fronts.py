"""Seeded faults. The front ends beside `lightning.pytorch`: `pytorch_lightning`, Fabric, values of Hydra."""

from seeded_faults.mutant import Mutant

FABRIC = "with_lightning/test_fabric.py"
TWIN = "with_lightning/test_pytorch_lightning.py"

MUTANTS = [
    Mutant(
        "Fabric: the strict of a load is not the hook's",
        "lightning_commhooks/fabric_strategy.py",
        "strict=strict and self._request.strict",
        "strict=self._request.strict",
        "with_lightning/test_fabric.py::test_the_strict_of_a_load_is_the_hooks_too",
    ),
    Mutant(
        "Fabric does not restore",
        "lightning_commhooks/fabric_strategy.py",
        "        for each in take_over:\n            each()\n",
        "",
        f"{FABRIC}::test_a_resumed_training_is_bit_equal",
    ),
    Mutant(
        "Fabric saves the residuals of rank 0 only",
        "lightning_commhooks/fabric_strategy.py",
        "gather=True",
        "gather=False",
        f"{FABRIC}::test_a_resumed_training_is_bit_equal",
    ),
    Mutant(
        "Fabric: one hook is changed before the other is checked",
        "lightning_commhooks/fabric_strategy.py",
        "        take_over = [hook.prepare_load(saved[name], strict) for name, hook in hooks.items() "
        "if name in saved]\n",
        "        take_over = []\n        for name, hook in hooks.items():\n"
        "            hook.load_state_dict(saved[name])\n",
        f"{FABRIC}::test_a_damaged_state_of_one_hook_changes_none",
    ),
    Mutant(
        "Fabric: every model has the first hook",
        "lightning_commhooks/fabric_strategy.py",
        "if ddp in (model, inner) or ddp.module is inner",
        "if True",
        f"{FABRIC}::test_each_model_has_a_hook_that_is_saved_under_its_name",
    ),
    Mutant(
        "Fabric: a hook is left out of a checkpoint without a word",
        "lightning_commhooks/fabric_strategy.py",
        "        elif self._hooks and not self._warned_about_saving:\n",
        "        elif False:\n",
        f"{FABRIC}::test_what_loses_the_state_is_a_warning",
    ),
    Mutant(
        "Fabric: residuals ignore the loss scale",
        "lightning_commhooks/fabric_strategy.py",
        "            loss_scale=loss_scale(self.precision, self.root_device),\n",
        "",
        f"{FABRIC}::test_residuals_follow_the_loss_scale",
    ),
    Mutant(
        "names are registered with lightning.pytorch only",
        "lightning_commhooks/__init__.py",
        '"lightning": "lightning_pytorch", "pytorch_lightning": "pytorch_lightning"',
        '"lightning": "lightning_pytorch"',
        f"{TWIN}::test_names_are_registered_at_once",
    ),
    Mutant(
        "the twin imports lightning",
        "lightning_commhooks/pytorch_lightning.py",
        "    from pytorch_lightning import Callback\n",
        "    import lightning.pytorch\n    from pytorch_lightning import Callback\n",
        f"{TWIN}::test_neither_package_imports_the_other",
    ),
    Mutant(
        "a callback of the other package is accepted",
        "lightning_commhooks/twins.py",
        "    if here is not None and given is not None and here != given:\n",
        "    if False:\n",
        f"{TWIN}::test_a_callback_of_the_other_package_is_an_error",
    ),
    Mutant(
        "the twin's strategy adds the callback of lightning.pytorch",
        "lightning_commhooks/strategy.py",
        "            ours = [self.checkpoint_callback()]\n",
        "            from lightning_commhooks import CommHookCheckpoint\n\n            ours = [CommHookCheckpoint()]\n",
        f"{TWIN}::test_a_resumed_fit_is_bit_equal",
    ),
    Mutant(
        "interpolations reach a user's factory",
        "commhooks/hook/request.py",
        '        hook_options = plain("hook_options: ", hook_options)\n',
        "",
        "hook/test_hydra_values.py",
    ),
    Mutant(
        "a container inside a config stays one",
        "commhooks/compressors/config.py",
        'value = plain(f"{type(self).__name__}: {name}: ", getattr(self, name))\n',
        "value = getattr(self, name)\n",
        "hook/test_hydra_values.py::test_a_value_that_is_not_there_is_an_error_with_its_name",
    ),
]

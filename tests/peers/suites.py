"""Suites of peers whose tests are not in their packages: pytest runs them from a checkout.

A module here imports the tests from the checkout and puts our hooks in place. Nothing of the
checkout is copied or changed. Which case cannot pass with a hook, and why, is in `EXPLAINED`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = "COMMHOOKS_PEERS_SOURCE"
"""The variable with the folder of the checkout."""


@dataclass(frozen=True)
class Suite:
    """Describes a suite.

    Attributes:
        repository: of which a checkout is needed.
        files: what the module imports, below the checkout.
        module: the module here that pytest runs.
        hooks: the names that the module knows.
        apart: whether each case needs processes of its own.
        left_out: cases that are not run, and why.
    """

    repository: str
    files: tuple[str, ...]
    module: str
    hooks: tuple[str, ...]
    apart: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def is_in(self, folder: Path) -> bool:
        return all((folder / file).is_file() for file in self.files)


FSDP2 = "test/distributed/_composable/fsdp"
FIXTURE = "test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked"
SUITES = {
    "accelerate_state": Suite(
        "huggingface/accelerate",
        ("tests/test_state_checkpointing.py",),
        "accelerate_state_peer",
        ("powerSGD", "int8"),
        left_out={
            "test_map_location": "needs a GPU",
            "test_can_resume_training_checkpoints_relative_path": (
                "every rank would make a folder of its own"
            ),
        },
    ),
    "fsdp2": Suite(
        "pytorch/pytorch",
        (f"{FSDP2}/test_fully_shard_comm.py", f"{FSDP2}/test_fully_shard_training.py"),
        "fsdp2_peer",
        ("exact", "int8"),
    ),
    "lightning": Suite(
        "Lightning-AI/pytorch-lightning",
        ("tests/tests_pytorch/strategies/test_ddp_integration_comm_hook.py",),
        "lightning_peer",
        ("commhooks",),
        apart=True,
    ),
    "torchft": Suite(
        "meta-pytorch/torchft",
        (
            *(f"{FIXTURE}_updates_{number}.json" for number in range(6)),
            f"{FIXTURE}_failure_recovery_0.json",
        ),
        "torchft_peer",
        ("diloco",),
    ),
    "transformers": Suite(
        "huggingface/transformers",
        ("tests/trainer/test_trainer_checkpointing.py", "tests/trainer/trainer_test_utils.py"),
        "transformers_peer",
        ("powerSGD", "int8", "diloco"),
        left_out={
            "test_save_collator_tokenizer_by_default": "downloads",
            "test_can_resume_training_lm": "downloads",
            "test_multiple_peft_adapters": "downloads",
            "test_resume_training_with_randomness": "transformers skips it",
            "test_save_checkpoints": "counts the steps of one process",
            "test_resume_from_interrupted_training": "counts the steps of one process",
        },
    ),
}

# Where a case fails with a hook and passes without, and why it must. docs/reliability.md has it for
# readers. With torch 2.13.0, Accelerate 1.15.0, torchft 0.2.0.
_EXACT_CPU = ("test_DistributedDataParallelCPU", "test_DistributedDataParallelCPU_grad_is_view")
_ROUNDED = (
    "test_script",
    "test_sync",
    *_EXACT_CPU,
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
)
EXPLAINED = {
    (case, "fp16_compress"): "float16 rounds, by more than the case allows" for case in _ROUNDED
}
EXPLAINED |= {
    (f"test_weights_before_every_step[{number}]", "diloco"): (
        "torchft leaves none, half or all of a replica's own weights there; commhooks adds what it"
        " has trained while the fragment travelled"
    )
    for number in range(1, 6)
}
EXPLAINED |= {
    (f"TestFullyShardCommunication::{case}", hook): (
        "it counts FSDP2's own collectives, in whose place are others"
    )
    for case in (
        "test_fully_shard_communication_count",
        "test_manual_reshard_with_reshard_after_forward_false",
    )
    for hook in ("exact", "int8")
}
EXPLAINED[("test_training_parity", "diloco")] = (
    "its ranks train apart between outer steps, with a higher learning rate"
)
EXPLAINED |= {
    (f"test_post_local_sgd_model_averaging{which}", "commhooks"): reason
    for which, reason in (
        ("", "it waits for a call of torch's averager; commhooks averages in its own exchange"),
        ("_raises", "commhooks refuses a ZeroRedundancyOptimizer in its own words"),
    )
}
EXPLAINED |= {
    (case, "powerSGD"): "it expects the exact mean, and this hook approximates"
    for case in _EXACT_CPU
}

"""Where a case fails with a hook of ours and passes without, and why it must. docs/reliability.md has it for readers.

With torch 2.13.0 and Accelerate 1.15.0.
"""

_ROUNDS = "float16 rounds, by more than the case allows"
_APPROXIMATES = "it expects the exact mean, and this hook approximates"

EXPLAINED = {
    ("accelerate test_script", "fp16_compress"): _ROUNDS,
    ("accelerate test_sync", "fp16_compress"): _ROUNDS,
    **{
        (f"torch test_{name}", "fp16_compress"): _ROUNDS
        for name in (
            "DistributedDataParallelCPU",
            "DistributedDataParallelCPU_grad_is_view",
            "accumulate_gradients_no_sync",
            "accumulate_gradients_no_sync_grad_is_view",
        )
    },
    ("torch test_DistributedDataParallelCPU", "powerSGD"): _APPROXIMATES,
    ("torch test_DistributedDataParallelCPU_grad_is_view", "powerSGD"): _APPROXIMATES,
}
"""(peer and case, hook) -> why."""

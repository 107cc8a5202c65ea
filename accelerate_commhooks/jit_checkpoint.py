"""The Trainer's checkpoint on SIGTERM (`enable_jit_checkpoint`), at a moment when hook and weights are of one step."""

from typing import Any

from transformers import Trainer
from transformers.trainer_jit_checkpoint import JITCheckpointCallback


class BetweenSteps(JITCheckpointCallback):
    """Saves before or after a step.

    transformers 5.23 also saves between the backward pass and the optimizer's step. By then the hook has taken part in
    a step that the weights have not made: whoever resumes would repeat it on the residual that it left.
    """

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for `on_step_end`, which follows."""


def save_between_steps(trainer: Trainer) -> None:
    """Replace the callback by which `trainer` saves on SIGTERM, if it does."""
    if not trainer.args.enable_jit_checkpoint:
        return  # a callback of this class would be the user's
    own = trainer.pop_callback(JITCheckpointCallback)  # the first one: the Trainer's
    if isinstance(own, JITCheckpointCallback):
        ours = BetweenSteps()
        ours.trainer, ours.jit_manager = own.trainer, own.jit_manager
        trainer.add_callback(ours)

"""Names of metrics."""

NOT_OF_POWERSGD = (
    "chosen_at",
    "outer_gradient_norm",
    "outer_gradient_cosine",
    "members",
    "members_steps_per_s",
    "members_weight",
    "members_waited_s",
)
"""Metrics that only other hooks have."""

"""What a hook says of itself in numbers: `CommHook.stats`, and the line after the first pass."""

from typing import Any

from commhooks.comm.counters import has_clock
from commhooks.errors import log_summary, logger_of
from commhooks.gradients.source import GradientSource
from commhooks.hook.protocol import Hook
from commhooks.request import HookRequest

logger = logger_of(__name__)


def statistics(name: str, hook: Hook, source: GradientSource) -> dict[str, Any]:
    """See `CommHook.stats`."""
    details = hook.stats()  # first, because it updates the counters
    status = hook.status()
    counters = hook.counters
    clocks = counters.clocks
    clocks.collect(wait=True)
    counts = {
        "backward_passes": counters.backward_passes,
        "compressed_steps": counters.compressed_steps if status.counts_outcomes else None,
        "nonfinite_steps": counters.nonfinite_steps if status.counts_outcomes else None,
        "collectives": counters.collectives,
        "collectives_last_pass": counters.last_pass.collectives,
        "bytes_sent": counters.bytes_sent,
        "bytes_sent_last_pass": counters.last_pass.bytes_sent,
        "bytes_inside_nodes": counters.bytes_inside_nodes,
        "bytes_uncompressed": counters.bytes_uncompressed,
        "compression_rate": (
            counters.bytes_uncompressed / counters.bytes_sent if counters.bytes_sent else None
        ),
        "codec_s": clocks.total.codec_s,
        "codec_s_last_pass": clocks.last_pass.codec_s,
        "waiting_s": clocks.total.waiting_s,
        "waiting_s_last_pass": clocks.last_pass.waiting_s,
        "handshakes": counters.handshakes,
        "last_issued": counters.last_issued or None,
    }
    if not status.counts_bytes:
        counts |= dict.fromkeys(_OF_COLLECTIVES)
    parameters = source.names.named_parameters().values()
    if not (status.counts_bytes and all(has_clock(parameter.device) for parameter in parameters)):
        counts |= dict.fromkeys(_OF_CLOCKS)
    shown = {"hook": name} | {key: details.get(key) for key in _OF_HOOK} | counts
    so_far = {
        key: None if shown[key] is None else count for key, count in counters.cumulative().items()
    }
    return shown | {"so_far": so_far}


_OF_HOOK = (
    "kernel",
    "chosen",
    "chosen_at",
    "step",
    "step_in_round",
    "members",
    "members_steps_per_s",
    "members_weight",
    "members_waited_s",
    "members_since",
    "outer_gradient_norm",
    "outer_gradient_cosine",
)
_OF_COLLECTIVES = (
    "collectives",
    "collectives_last_pass",
    "bytes_sent",
    "bytes_sent_last_pass",
    "bytes_inside_nodes",
    "compression_rate",
)
"""Unknown for a user's function, and without a hook."""
_OF_CLOCKS = ("codec_s", "codec_s_last_pass", "waiting_s", "waiting_s_last_pass")


def log_first_pass(request: HookRequest, hook: Hook, source: GradientSource) -> None:
    """Log what the hook does, in one line, and its warnings. Called on the logging rank."""
    summary = hook.summary()
    use = hook.status().use
    subject = request.name
    if summary.details:
        subject += f" ({'; '.join(summary.details)})"
    wire = "" if request.wrapper is None else f"{request.wrapper} on the wire"
    effect = ", ".join(filter(None, (summary.effect, wire)))
    if summary.alone is None:
        return
    if source.group.size() == 1 and hook.members is None:
        unit = "rank" if source.shard_group is None else "replica"
        effect = f"there is one {unit}, so nothing is sent{summary.alone}"
    elif use is not None and use.plain:
        effect = f"plain all-reduce until step {use.begins}{use.or_later}, then {effect}"
    log_summary(f"{subject}: {effect}" if effect else subject)
    for warning in summary.warnings:
        logger.warning("%s", warning)

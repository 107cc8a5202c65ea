"""What a saved state must be to go on with, and what rank 0 says about it."""

import contextlib
from collections.abc import Callable, Iterator

from commhooks.checkpoint.distributed import from_distributed, is_distributed
from commhooks.checkpoint.payload import REPLICAS_EQUAL, check_header
from commhooks.errors import PayloadError, logger_of, shown
from commhooks.gradients.source import GradientSource
from commhooks.hook.announce import say
from commhooks.hook.runner import Runner
from commhooks.request import HookRequest

logger = logger_of(__name__)


@contextlib.contextmanager
def located(place: object, remedy: str) -> Iterator[None]:
    """Let a PayloadError of the body begin with the place of the saved state. `remedy`: what to do if it is damaged."""
    try:
        yield
    except PayloadError as error:
        damaged = "damaged" in str(error) or "not the state" in str(error)
        raise PayloadError(f"{place}: {error}" + (f". {remedy}" if damaged else "")) from error


def nothing_saved(place: object, why: str, hook: str) -> str:
    """A warning for a load from `place`, where the hook of this name has no state, because of `why`."""
    return (
        f"{place} holds no state of a communication hook ({why}): hook {hook!r} goes on with the memory that it has, "
        "which is none in a new run."
    )


def checked_state(
    saved: object, runner: Runner, request: HookRequest, source: GradientSource, strict: bool | None
) -> Callable[[], None]:
    """Check a state that `CommHook.state_dict` has returned. Returns a function that takes it over. For `strict` see
    `CommHook.load_state_dict`.

    Raises:
        PayloadError: `saved` is damaged or does not fit; nothing was changed.
    """
    strict = request.strict if strict is None else strict
    content = check_header(from_distributed(saved, source) if is_distributed(saved) else saved)
    if not strict and runner.is_logging_rank:
        say(
            f"{request.name}: strict=False: this load leaves out what does not fit, also of a wrong checkpoint. Remove "
            "strict=False when this run has saved again"
        )
    if not content.get(REPLICAS_EQUAL, True) and runner.is_logging_rank:
        logger.warning(
            "the checkpoint is of hook %s, which averages nothing: the ranks had drifted apart, and the weights "
            "saved with it are those of one of them.",
            shown(content["hook"]),
        )
    if content["hook"] == request.name:
        take_over = runner.saved_state.prepare_load(content, strict)

        def resume() -> None:
            take_over()
            if runner.is_logging_rank and content["step"] > 0:
                resumed = runner.saved_state.resumed(content)
                say(f"{request.name} resumed at {runner.step_is} {content['step']}{resumed}")

        return resume
    text = f"the saved state is of hook {shown(content['hook'])}, this one is {request.name!r}"
    if strict:
        raise PayloadError(
            f"{text}. Attach the saved hook to continue with its memory, or give strict=False beside "
            "hook=... or in the load to begin this one with fresh memory"
        )
    if runner.is_logging_rank:
        logger.warning("%s: it begins with fresh memory (strict=False)%s", text, runner.saved_state.not_begun_anew)
    return runner.saved_state.begin_anew

"""What a `CommHookKwargs` asks for: by its own arguments, or by those fields of Accelerate's handler that request a
hook of torch, for which the one of commhooks is taken. Its other fields are DDP's arguments."""

from typing import TYPE_CHECKING, Any

from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType

from accelerate_commhooks.settings import STOCK_HOOK_FIELDS, VARIABLE
from commhooks.errors import HookConfigError
from commhooks.hook.for_plugins import ARGUMENTS, HookRequest, check_choice

if TYPE_CHECKING:
    from accelerate_commhooks.handler import CommHookKwargs

_NO = DDPCommunicationHookType.NO


def checked_request(handler: "CommHookKwargs") -> HookRequest:
    """What the fields of `handler` ask for now: those of Accelerate's handlers may be changed.

    Raises:
        HookConfigError: as `CommHookKwargs`.
    """
    if not isinstance(handler.dim, int):
        raise HookConfigError(
            f"CommHookKwargs({handler.dim!r}): the first positional argument is DDP's `dim`; "
            f"write CommHookKwargs(hook={handler.dim!r})"
        )
    hook, options, wrapper = handler.hook, handler.hook_options, handler.wrapper
    stock = stock_requests(handler)
    if stock and any(each is not None for each in (hook, options, wrapper)):
        raise HookConfigError(
            f"{' and '.join(stock)} beside {'hook' if hook is not None else 'hook_options or wrapper'}=: both ask "
            "for a communication hook, and DDP takes one only. Keep hook= (with hook_options= and wrapper=)"
        )
    if stock:
        hook, options, wrapper = _translated(handler)
    elif hook is None and "hook" not in handler.given:
        raise HookConfigError(
            "CommHookKwargs needs hook=, such as 'powerSGD', or settings from `accelerate-commhooks launch` or a YAML "
            f"file named in {VARIABLE}. hook=None is DDP without a hook"
        )
    given = {name: getattr(handler, name) for name in ARGUMENTS}
    request = HookRequest.parse(**given | {"hook": hook, "hook_options": options, "wrapper": wrapper})
    if request.config is not None:
        request.config.resolved(handler.total_steps)  # a fraction needs total_steps
    return request


class RunValues:
    """Fields of a handler that are set for one run, by transformers' Trainer. The next run begins with the user's."""

    def __init__(self) -> None:
        self._of_users: dict[str, tuple[Any, Any]] = {}  # the user's value, and the one that was set

    def users(self, handler: object, name: str) -> Any:
        """The user's value; also one that was assigned since the field was set for a run."""
        value = getattr(handler, name)
        theirs, set_for_run = self._of_users.get(name, (value, value))
        return theirs if value == set_for_run else value

    def set(self, handler: object, name: str, value: Any) -> None:
        self._of_users[name] = (self.users(handler, name), value)
        setattr(handler, name, value)


def stock_requests(handler: DistributedDataParallelKwargs) -> list[str]:
    """The names of the set fields that request a hook."""
    return [name for name in STOCK_HOOK_FIELDS if getattr(handler, name) not in (_NO, "no", None, {})]


def _translated(handler: DistributedDataParallelKwargs) -> tuple[str, dict[str, Any] | None, str | None]:
    """`hook`, `hook_options` and `wrapper` of `CommHookKwargs` that correspond to the three fields."""
    hook = _choice("comm_hook", handler.comm_hook, list(DDPCommunicationHookType))
    wrappers = [_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
    wrapper = _choice("comm_wrapper", handler.comm_wrapper, wrappers)
    if hook is None:
        given = "comm_wrapper" if wrapper is not None else "comm_state_option"
        raise HookConfigError(f"{given} without comm_hook: there is no communication hook that it could be for")
    return hook, handler.comm_state_option or None, wrapper


def _choice(name: str, value: Any, allowed: list[DDPCommunicationHookType]) -> str | None:
    """The name of an enum member, or the string itself; None for "no"."""
    text = getattr(value, "value", value)
    if text is not None:
        check_choice(name, text, tuple(choice.value for choice in allowed))
    return None if text == _NO.value else text

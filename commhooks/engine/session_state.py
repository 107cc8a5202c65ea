"""The base of hook states that users make before a model is known."""

from collections.abc import Callable
from typing import Any

import torch

from commhooks.engine.consensus import Binding
from commhooks.engine.session import Session


class SessionState:
    """Base of hook states that own a session, such as `PowerSGDState`. `attach` binds them to the model."""

    session: Session

    def bind(self, binding: Binding, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        """Bind the state to a model; `attach` calls this on every rank. `model`: the module that DDP wraps; `function`:
        the hook.

        Raises:
            AttachError: the state is bound to another model already.
        """
        raise NotImplementedError

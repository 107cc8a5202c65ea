"""Find what is from `pytorch_lightning`, the twin of `lightning.pytorch` with classes of its own."""

from collections.abc import Iterable

TWIN = "pytorch_lightning"


def of_the_twin(objects: Iterable[object]) -> list[str]:
    """What of `objects` is an instance of the twin's classes: "ModelCheckpoint (a pytorch_lightning...Callback)"."""
    found = []
    for each in objects:
        classes = [base for base in type(each).__mro__ if base.__module__.partition(".")[0] == TWIN]
        if classes:
            found.append(f"{type(each).__name__} (a {classes[-1].__module__}.{classes[-1].__qualname__})")
    return found


def unlike_the_trainer(objects: Iterable[object]) -> str | None:
    """A warning about objects of the twin in a `lightning.pytorch.Trainer`; None if there are none."""
    found = of_the_twin(objects)
    if not found:
        return None
    return (
        f"this Trainer is from lightning.pytorch, and these are from {TWIN}: {', '.join(found)}. The Trainer does not "
        f"know them for what they are, a checkpoint callback for example: replace every import of {TWIN}"
    )

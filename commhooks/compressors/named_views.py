"""One tensor whose pieces are the entries of a dict, so that learned state kept by name can be processed together."""

from collections.abc import Callable, Mapping, Sequence

import torch

Fill = Callable[[int], torch.Tensor]


class NamedViews:
    """
    Args:
        names: per entry its name, its offset in `whole` and its shape.
        whole: the memory of the entries, 1-D.
    """

    def __init__(self, names: Sequence[tuple[str, int, tuple[int, ...]]], whole: torch.Tensor) -> None:
        self.whole = whole
        self._views = {name: whole[begin : begin + torch.Size(own).numel()].view(own) for name, begin, own in names}

    def gather(self, entries: Mapping[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """Copy `entries` into the whole tensor and return it. A missing entry i becomes `fill(i)`, or zeros. Does not
        change the dict."""
        for i, (name, view) in enumerate(self._views.items()):
            known = entries.get(name)
            if known is view:
                continue
            if known is not None:
                if known.is_cuda:  # allocated on another stream, and may be freed before this stream has copied it
                    known.record_stream(torch.cuda.current_stream(known.device))
                view.copy_(known)
            elif fill is not None:
                view.copy_(fill(i))
            else:
                view.zero_()
        return self.whole

    def bind(self, entries: dict[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """As `gather`, and replace each entry of the dict by its piece of the whole tensor."""
        whole = self.gather(entries, fill)
        entries.update(self._views)
        return whole

"""State that is no trained weight is rank 0's: buffers, frozen parameters, optimizers, the GradScaler.

Rank 0's state is consistent in itself, whatever it is: moments, 8-bit codes with their scales, the vectors of a
spectral norm, observers that begin at infinity, teachers that follow the student, masks. The mean of such numbers is
often none of them. On a sharded model rank 0 is the rank of the first replica that holds the same shard.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from commhooks.comm import collectives
from commhooks.comm.collectives import Send, agreement_key, broadcast_first, checksum, gather_rows, gather_texts
from commhooks.comm.counters import Counters
from commhooks.errors import logger_of
from commhooks.gradients.loss_scale import LossScale, scaler_of
from commhooks.gradients.names import own_name
from commhooks.gradients.source import GradientSource
from commhooks.local_steps import state_tree
from commhooks.local_steps.fragments import layouts, packed, write_back
from commhooks.local_steps.optimizers import OptimizerSteps
from commhooks.local_steps.state_tree import CannotBeMade, Tree

logger = logger_of(__name__)

_WHAT = "the state that is rank 0's"
_PIECE_BYTES = 64 * 2**20
_ALIGNED = 16  # bytes, so that a part of a message can be seen as numbers of any type


class CommonState:
    """All ranks call the methods at the same point of the training.

    Args:
        hook: its name, for messages.
        loss_scale: as of `attach`; the GradScaler that it belongs to is rank 0's, too, if that can be told.
        counters: count what is sent.
        logs: this rank logs what concerns all.
    """

    def __init__(
        self,
        hook: str,
        source: GradientSource,
        optimizers: OptimizerSteps,
        loss_scale: Callable[[], LossScale] | None,
        counters: Counters,
        *,
        logs: bool,
    ) -> None:
        self._hook, self._logs, self._loss_scale = hook, logs, loss_scale
        self._source, self._optimizers, self._counters = source, optimizers, counters

    # ---- rank 0's ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def share(self, *, optimizers: bool) -> list[str]:
        """Let all ranks go on with what rank 0 has. What is equal on all ranks is not sent.

        Args:
            optimizers: share the optimizers and the GradScaler, too, and not only the buffers and frozen parameters.

        Returns:
            What still differs, because only some ranks have it; the same on all ranks.
        """
        own, tensors = dict(self._parts(optimizers=optimizers)), list[torch.Tensor]()
        described = {label: state_tree.described(value, tensors) for label, value in own.items()}
        sums = self._checksums(tensors)
        group, device = self._source.group, self._source.device
        key = torch.tensor([agreement_key(described), agreement_key(sums)], device=device)
        same, all_same = (len(each.unique()) == 1 for each in gather_rows(key, group, self._counters, _WHAT).T)
        if same and all_same:
            return []
        first = described if same else state_tree.from_bytes(self._of_first(state_tree.to_bytes(described)))
        leaves, mine = dict(state_tree.leaves(first)), dict(state_tree.leaves(described))
        here = [mine.get(path) for path in leaves]
        fits = [own is not None and own.form == leaf.form for own, leaf in zip(here, leaves.values(), strict=True)]
        row = [(sums[own.number], True) if own and fit else (0, False) for own, fit in zip(here, fits, strict=True)]
        rows = gather_rows(torch.tensor(row, device=device).view(-1, 2), group, self._counters, _WHAT)
        wanted = (rows != rows[0]).any(0).any(1).tolist()
        arrived = self._receive([leaf for leaf, each in zip(leaves.values(), wanted, strict=True) if each], tensors)
        left = [label for label in own if label not in first] + [label for label in first if label not in own]
        if group.rank() != 0:
            for label, tree in first.items():
                try:
                    self._set(label, own.get(label), tree, arrived)
                    if label in left:
                        left.remove(label)
                except CannotBeMade:
                    left.append(label)
        if same:
            return []
        found = gather_texts("\n".join(left if group.rank() else ()), group, device, _WHAT)
        return sorted({each for text in found for each in text.splitlines()})

    def _parts(self, *, optimizers: bool) -> Iterator[tuple[str, Any]]:
        """What is rank 0's, by a name for messages."""
        module, trained = self._source.module, self._source.names.known()
        known = {id(each) for each in trained.values()}
        if module is not None:
            yield from ((f"buffer {name}", each) for name, each in module.named_buffers())
        for name, each in self._source.weights().items():
            if id(each) not in known and own_name(name) not in trained:
                yield f"frozen parameter {name}", each
        if not optimizers:
            return
        for label, optimizer in self._labelled_optimizers().items():
            parameters = _parameters(optimizer)
            yield (
                label,
                {
                    "state": {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state},
                    "groups": [{k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups],
                    "of": self._names_of(parameters),
                },
            )
        if (scaler := scaler_of(self._loss_scale)) is not None:
            yield "the GradScaler", scaler.state_dict()

    def _set(self, label: str, own: Any, tree: Tree, arrived: Mapping[int, torch.Tensor]) -> None:
        """Let what this rank has under `label` be as on rank 0.

        Raises:
            CannotBeMade: this rank has nothing of the kind.
        """
        kind, _, name = label.partition(" ")
        optimizer = self._labelled_optimizers().get(label)
        if kind == "buffer" and (own is not None or tree[0] != "own"):
            self._set_buffer(name, state_tree.rebuilt(own, tree, arrived))
        elif own is None:
            raise CannotBeMade
        elif optimizer is not None:
            parts, parameters = tree[1], _parameters(optimizer)
            if state_tree.rebuilt(None, parts["of"], {}) != self._names_of(parameters):
                raise CannotBeMade
            states = parts["state"][1]
            for place, parameter in enumerate(parameters):
                if place in states:
                    before = optimizer.state.get(parameter)
                    optimizer.state[parameter] = state_tree.rebuilt(before, states[place], arrived, like=parameter)
                else:
                    optimizer.state.pop(parameter, None)
            for mine, theirs in zip(optimizer.param_groups, parts["groups"][1], strict=True):
                for key, each in theirs[1].items():
                    mine[key] = state_tree.rebuilt(mine.get(key), each, arrived)
        elif kind == "frozen":
            if state_tree.rebuilt(own, tree, arrived) is not own:
                raise CannotBeMade
        elif (scaler := scaler_of(self._loss_scale)) is not None:
            scaler.load_state_dict(state_tree.rebuilt(own, tree, arrived))

    def _set_buffer(self, name: str, value: Any) -> None:
        module, (owner, _, own) = self._source.module, name.rpartition(".")
        assert module is not None
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            raise CannotBeMade from None
        if own in dict(holder.named_buffers(recurse=False)):
            if getattr(holder, own) is not value:
                setattr(holder, own, value)
        else:
            holder.register_buffer(own, value)

    def _labelled_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        found: dict[str, torch.optim.Optimizer] = {}
        for each in self._optimizers.known():
            label = f"the state of {type(each).__name__} with {len(_parameters(each))} parameters"
            same = sum(other.startswith(label) for other in found)
            found[label + (f" ({same + 1})" if same else "")] = each
        return found

    def _names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        names = dict(zip(map(id, self._source.stepped()), self._source.names.known(), strict=True))
        return [names.get(id(each), str(tuple(each.shape))) for each in parameters]

    def _checksums(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        by_device: dict[torch.device, list[int]] = {}
        for place, each in enumerate(tensors):
            by_device.setdefault(each.device, []).append(place)
        sums = [0] * len(tensors)
        for places in by_device.values():
            read = torch.stack([checksum(tensors[place]) for place in places]).tolist()
            for place, value in zip(places, read, strict=True):
                sums[place] = value
        return sums

    def _of_first(self, own: bytes) -> bytes:
        group, device = self._source.group, self._source.device
        length = torch.tensor([len(own)], device=device)
        broadcast_first(length, group, None, _WHAT)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == 0:
            content.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        content = content.to(device)
        broadcast_first(content, group, self._counters, _WHAT)
        return bytes(content.cpu().tolist())

    def _receive(self, leaves: Sequence[state_tree.Leaf], own: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Rank 0's tensors, by their numbers there. `own`: of rank 0 those that it sends."""
        found: dict[int, torch.Tensor] = {}
        for piece in _pieces(leaves):
            sizes = [_padded(each.nbytes) for each in piece]
            message = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._source.device)
            parts = [part[: each.nbytes] for part, each in zip(message.split(sizes), piece, strict=True)]
            if self._source.group.rank() == 0:
                for part, each in zip(parts, piece, strict=True):
                    part.copy_(own[each.number].detach().contiguous().view(-1).view(torch.uint8))
            broadcast_first(message, self._source.group, self._counters, _WHAT)
            found |= {
                each.number: part.view(each.dtype).view(each.shape) for part, each in zip(parts, piece, strict=True)
            }
        return found

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def differing_weights(self) -> list[str]:
        """The names of the trained weights that are not equal on all ranks."""
        known = self._source.names.known()
        own = torch.tensor(self._checksums(list(known.values())), dtype=torch.int64, device=self._source.device)
        rows = gather_rows(own, self._source.group, self._counters, "whether the weights are equal")
        return [name for name, same in zip(known, (rows == rows[0]).all(0).tolist(), strict=True) if not same]

    @torch.no_grad()
    def equalize(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Average weights that should be equal on all ranks, with a warning, if they are not."""
        if not parameters.keys() & set(self.differing_weights()):
            return
        if self._logs:
            logger.warning(
                "hook %s: the weights differ between ranks at the first backward pass, as after a training that ended "
                "in mid-round: all ranks begin from their mean.",
                self._hook,
            )
        self._source.before_weights_change()
        group = self._source.group
        for layout in layouts(parameters):
            send = Send(packed(layout).div_(group.size()), what="the weights to begin from", last=True)
            write_back(layout, collectives.start(send, group, self._counters, "").wait())


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pieces(leaves: Sequence[state_tree.Leaf]) -> Iterator[list[state_tree.Leaf]]:
    """Up to `_PIECE_BYTES` in a piece, but at least one."""
    piece: list[state_tree.Leaf] = []
    size = 0
    for each in leaves:
        if piece and size + each.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(each)
        size += each.nbytes
    if piece:
        yield piece


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

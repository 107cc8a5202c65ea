"""A hook that averages weights, once in several steps: between two outer steps every rank trains on its own gradients.

A round is `sync_every` backward passes, of which those of one step with a closure count once. An outer step comes
after the optimizer's step that follows the last of them, or the pass at which it is the turn of a part of the weights
(`outer_steps.py`), and before anything that looks at the model as a whole: a joint save, and `CommHook.synchronize`.
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from commhooks.checkpoint.learned_state import SavedLearnedState
from commhooks.comm.collective import gather_rows, new_future
from commhooks.comm.counters import RoundCounters
from commhooks.comm.nodes import Nodes
from commhooks.comm.shards import good_on_all
from commhooks.comm.wire import all_finite
from commhooks.compressors.cast import AllReduce, AllReduceCompressor
from commhooks.compressors.local_steps.exchange import ANCHOR, norm_and_cosine
from commhooks.engine.arrangement import EqualInNodes
from commhooks.engine.immediate import reduce_and_count
from commhooks.engine.session import Session
from commhooks.gradients.bucket import Bucket
from commhooks.gradients.names import ParameterNames
from commhooks.gradients.precision import compute_dtype
from commhooks.gradients.source import Future, GradientSource
from commhooks.gradients.torch_private import sparse_values
from commhooks.gradients.training_events import BeforeForward, OptimizerSteps
from commhooks.gradients.weights import copied, set_weights
from commhooks.hook.engine_hook import EngineHook
from commhooks.hook.means import MeansOfRanks
from commhooks.hook.outer_steps import OuterSteps
from commhooks.hook.request import HookRequest
from commhooks.hook.round_warnings import RoundWarnings
from commhooks.hook.unused import Use


class LocalStepsHook(EngineHook):
    """
    Args:
        session: runs outer steps, on buckets of weights; its counters are `RoundCounters`.
        scaled: there is a GradScaler, by which a rank may skip a step. Then the ranks agree, in the last pass of a
            round, whether none will; otherwise the round goes on, because one that skips would be late for the outer
            step, and meet the others in collectives of the user's. The same for every turn in a round.
    """

    step_is = "round"

    def __init__(self, request: HookRequest, source: GradientSource, session: Session, *, scaled: bool) -> None:
        super().__init__(request, source, session)
        assert isinstance(session.counters, RoundCounters)
        self._passes = session.counters
        self._exact = AllReduceCompressor(AllReduce())
        self._averages_gradients = False  # in the running pass: it is one of the first `start_iter` ones
        self._nodes: Nodes | None = None
        sizes = [each.numel() for each in source.stepped()]
        self._outer = OuterSteps(session, list(source.names.known().values()), sizes)
        self._in_round = self._begun = 0  # passes that count, the same on all ranks, of the round and of the run
        self._weights_agree = True
        self._scaled, self._due = scaled, False
        self._finite: list[torch.Tensor] = []
        self._moments_differ = self._buffers_differ = False
        self._to_anchor = False  # the weights may not be those of the anchor, which was loaded
        self._trained_in_mode = True  # `Module.training` of the latest pass
        self._means = MeansOfRanks(request.name, source, self._passes, says=self.is_logging_rank)
        self._warn = RoundWarnings(request.name, self._passes, self.rank, says=self.is_logging_rank)
        self._discarded = 0  # outer steps of this run
        # Bound methods would keep this object, and with it the learned state, as long as torch's hooks.
        this = weakref.ref(self)
        self._thread: int | None = None  # that of the training
        self._optimizers = OptimizerSteps(source.stepped(), functools.partial(_after_steps, this))
        # Before torch's own hooks: those of fully_shard gather the weights.
        self._before_forward = self._module().register_forward_pre_hook(BeforeForward(self), prepend=True)
        self._still_sent = source.let_ranks_differ()

    def _between(self, nodes: Nodes) -> EqualInNodes:
        # The mean of the gradients keeps the weights of a node's ranks equal.
        self._nodes = nodes
        return EqualInNodes(nodes)

    # ---- backward passes ---------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket) -> Future:
        if bucket.is_first:
            self._begin_local_pass(bucket)
        flat = bucket.flat
        self._passes.gradients_of_pass(bucket.nbytes)
        if self._scaled and not self._averages_gradients and self._outer.due(self._in_round + 1):
            self._finite.append(all_finite(sparse_values(flat) if flat.is_sparse else flat))
        if self._averages_gradients:
            future = reduce_and_count(self._exact, bucket, self._source.group, self._passes)
        elif self._nodes is not None:
            future = reduce_and_count(self._exact, bucket, self._nodes.node, self._passes, over="node")
        else:
            future = new_future(flat.device)
            future.set_result(flat)
        if bucket.is_last:
            self.end_pass()
        return future

    def _begin_local_pass(self, first: Bucket) -> None:
        module, state, start = self._module(), self._session.state, self._session.compressor.start_step
        self._session.consensus.reach(self._source.group, first.flat)
        self._passes.begin_gradients()
        if not self._optimizers.repeats:
            self._begun += 1
            self._averages_gradients = self._passes.cumulative()["backward_passes"] <= start
        self._buffers_differ = any(True for _ in module.buffers())
        self._trained_in_mode = module.training
        self._finite.clear()
        if not self._averages_gradients and len(state[ANCHOR.key]) < len(known := self._source.names.known()):
            # A distributed checkpoint does not say which of them were zero.
            missing = {n: p for n, p in known.items() if n not in state[ANCHOR.key]}
            self._means.equalize(list(missing.values()))
            state[ANCHOR.key].update(copied(missing))

    def end_pass(self) -> None:
        repeated = self._optimizers.passed()
        if self._averages_gradients:
            return
        self._moments_differ, self._weights_agree = True, False
        if repeated:
            return
        if self._outer.due(self._in_round + 1) and self._all_step():
            self._due = True
            self._optimizers.expect()
        self._in_round += 1

    def _all_step(self) -> bool:
        """Whether no rank will skip the step of this pass, as far as that can happen; or one needs the outer step: its
        weights are not finite, and so its gradients never will be. The same on all ranks."""
        if not self._scaled:
            return True
        good = self._on_all_shards(torch.stack(self._finite).all())
        lost = not good and not self._on_all_shards(
            torch.stack([all_finite(each) for each in self._source.names.known().values()]).all()
        )
        row = torch.tensor([good, lost], device=self._source.device, dtype=torch.int64)
        rows = gather_rows(row, self._source.group, self._passes, "whether all gradients are finite")
        return bool(rows[:, 0].all() or rows[:, 1].any())

    def _on_all_shards(self, good: torch.Tensor) -> bool:
        shards = self._source.shard_group
        return bool(good if shards is None else good_on_all(good, shards, "all shards"))

    def kept_fields(self, names: ParameterNames) -> dict[str, dict[str, torch.dtype]]:
        dtypes = {name: compute_dtype(each.dtype) for name, each in names.known().items()}
        return {each.key: dict(dtypes) for each in self._session.compressor.state_fields}

    @contextlib.contextmanager
    def residuals(self) -> Iterator[tuple[Mapping[str, torch.Tensor], float]]:
        yield {}, 1.0  # they are of weights, and cannot be compared with gradients

    @property
    def replicas_agree(self) -> bool:
        return self._weights_agree

    @property
    def round(self) -> tuple[int | None, float | None, float | None]:
        works = [known.work for known in self._session.consensus.buckets if known.used and known.work is not None]
        return self._in_round, *norm_and_cosine(works)

    # ---- outer steps -------------------------------------------------------------------------------------------------

    def after_steps(self) -> None:
        """The optimizers have stepped all parameters since the last pass of the round."""
        if self._due:
            self._outer_step()

    @torch.no_grad()
    def before_forward(self, module: torch.nn.Module) -> None:
        """Before a step of training: make up for an outer step for which the optimizers were waited for in vain, such
        as those that torch does not know; and after a load begin from the anchor, of which this rank's weights may not
        be."""
        self._thread = threading.get_ident()
        if self._to_anchor:
            self._to_anchor = False
            self._go_to_anchor()
        # A model may be trained in evaluation mode. A forward pass in another mode may be one of rank 0 alone.
        if self._due and not self._optimizers.stepping and module.training == self._trained_in_mode:
            self._warn.late()
            self._outer_step()
        self._means.note_buffers()

    @torch.no_grad()
    def _outer_step(self, *, early: bool = False) -> None:
        """All ranks must call this, between the same two steps. `early`: end the round, although it is not its turn."""
        self._due = False
        self._optimizers.forget()
        self._source.before_weights_change()
        if early:
            self._outer.end_round()
        if early or self._outer.advance(self._in_round):
            self._average_buffers()
            self._in_round, self._weights_agree = 0, early or self._outer.immediate
        self._note_discarded()

    def _average_buffers(self) -> None:
        self._buffers_differ = False
        self._means.average_buffers()

    def _note_discarded(self) -> None:
        """After an outer step: if weights were not finite on some rank, go back to the anchor with all of them."""
        if self._outer.discarded == self._discarded:
            return
        self._discarded = self._outer.discarded
        self._go_to_anchor()  # other parts may not be finite, either
        if parameters := self._optimizers.begin_anew():
            self._warn.begun_anew(parameters)
        self._warn.discarded(self._discarded)

    def _go_to_anchor(self) -> None:
        self._source.before_weights_change()
        set_weights(self._source.names.known(), self._session.state[ANCHOR.key])

    # ---- where the model is looked at as a whole ---------------------------------------------------------------------

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        def share() -> None:
            if self._weights_agree:
                self._average_buffers()
            else:
                self._outer_step(early=True)
            if optimizers:
                self._means.average_moments(self._optimizers)
                self._moments_differ = False

        differ = self._buffers_differ or not self._weights_agree or (optimizers and self._moments_differ)
        if differ and self._thread not in (None, threading.get_ident()):
            self._warn.in_another_thread()
            return False
        with torch.inference_mode(False), torch.no_grad():  # frameworks validate in inference mode
            return self._together(share, limit_s) if differ else True

    def saved_alone(self, content: dict[str, Any]) -> dict[str, Any]:
        if not self._weights_agree:
            self._warn.saved_alone()
            return content | {"exact": False}
        return content

    def load(self, take_over: Callable[[], None]) -> None:
        self._outer.forget(patiently=True)  # what is on its way would count as a step of the loaded state
        take_over()
        self._in_round, self._due, self._moments_differ, self._buffers_differ = 0, False, False, False
        self._weights_agree = True
        self._to_anchor = bool(self._session.state[ANCHOR.key])
        self._means.forget_buffers()
        self._optimizers.forget()

    def _together(self, work: Callable[[], None], limit_s: float) -> bool:
        """Do `work`, which communicates, if all ranks come within the limit. Returns whether it is done."""
        assert isinstance(self.saved_state, SavedLearnedState)
        saver = self.saved_state.joint_save()
        if saver is None or self.world_size == 1:
            work()
            return True
        reason = saver.run(-self._begun, lambda _: work(), limit_s)
        if reason and self.rank == saver.logging_rank:
            self._warn.not_averaged(reason)
        return not reason

    def _module(self) -> torch.nn.Module:
        module = self._source.module
        assert module is not None  # a hook like this one is attached to models only, and ends with them
        return module

    def use(self) -> Use:
        found, compressor = super().use(), self._session.compressor
        assert found is not None
        return dataclasses.replace(
            found,
            plain=self._averages_gradients,
            acts=found.begins + compressor.passes_per_exchange,
            missing="averaged no weights",
            remedy=f"{found.remedy}, or sync_every",
        )

    def effect(self) -> str:
        buffers = any(True for _ in self._module().buffers())
        more = "; DDP no longer broadcasts buffers, which are averaged with the weights" if buffers else ""
        return f"{super().effect()} on average{more}"

    def alone(self) -> str:
        return (
            ". Outer steps are done as among several, so that the run can go on with any number of them; hook=None "
            "trains without"
        )

    def problems(self) -> list[str]:
        found = list(self._still_sent)
        if self._request.check_every is not None and not self._outer.immediate:
            found.append(
                "check_every compares weights when they should be equal on all ranks: with fragments or delay that is "
                "after a save or a validation only"
            )
        return [f"hook {self._request.name}: {each}" for each in found]

    def stop(self) -> None:
        self._outer.forget()
        self._optimizers.close()
        self._before_forward.remove()


def _after_steps(hook: "weakref.ref[LocalStepsHook]") -> None:
    alive = hook()
    if alive is not None:
        alive.after_steps()

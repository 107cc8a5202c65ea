"""PowerSGD's learned state besides residuals: Q, how it is saved, and how it is fitted to another rank."""

import torch

from commhooks.compressors.powersgd.matrix_plan import MatrixPlan
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.gradients.layout import memory_order


class _Factor(StateField):
    """Q of a matrix, transposed: `r x m`."""

    def shape(self, plan: UnitPlan) -> tuple[int, int]:
        assert isinstance(plan, MatrixPlan)
        return plan.rank, plan.m

    def refit(self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None) -> torch.Tensor | None:
        """Truncate to the new rank; additional rows are taken from `initial`. Without it they are zero, and the codec
        replaces zero rows."""
        rank, rows = self.shape(plan)[0], len(value)
        if not rank:
            return None
        if rows >= rank:
            return value[:rank].clone()
        refitted = value.new_zeros(rank, value.shape[1]) if initial is None else initial.to(value)
        refitted[:rows] = value
        return refitted


class FactorQ(_Factor):
    """Q of a parameter, saved as `r x (the other dimensions in logical order)`."""

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        rest = memory_order(parameter)[1:]
        q = value.detach().to("cpu", copy=True)
        view = q.view(q.shape[0], *(parameter.size(dim) for dim in rest))
        return view.permute(0, *(1 + rest.index(dim) for dim in sorted(rest))).contiguous()

    def from_saved(self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int) -> torch.Tensor | None:
        order = memory_order(parameter)
        if row_dim != order[0]:  # the memory format has changed: other elements form a row now
            return None
        rest = order[1:]
        ordered = sorted(rest)
        return saved.detach().permute(0, *(1 + ordered.index(dim) for dim in rest)).reshape(saved.shape[0], -1)

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        rank, m = self.shape(plan)
        if rank and value.shape[1] != m:
            return f"a Q with {value.shape[1]} rows for {plan.name}, which needs {m}"
        return None


class BucketQ(_Factor):
    """Q of a bucket that is compressed as one matrix, saved without conversion."""

    def refit(self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None) -> torch.Tensor | None:
        return super().refit(value, plan, initial) if value.shape[1] == self.shape(plan)[1] else None

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        # The size of the matrix is unknown before DDP has built its buckets: a Q of another size is replaced later.
        return None


Q = FactorQ("q")
BUCKET_Q = BucketQ("q", per="bucket")

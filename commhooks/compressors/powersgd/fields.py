"""PowerSGD's learned state besides residuals: the factors, how they are saved, and how they are fitted to another
rank."""

import torch

from commhooks.compressors.powersgd.matrix_plan import MatrixPlan
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.gradients.layout import memory_order


class FactorQ(StateField):
    """Q of a parameter, transposed: `r x m`; saved as `r x (the other dimensions in logical order)`."""

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        assert isinstance(plan, MatrixPlan)
        return plan.rank, plan.m

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

    def refit(self, value: torch.Tensor, plan: UnitPlan, fresh: torch.Tensor | None) -> torch.Tensor | None:
        """Truncate to the new rank; additional rows are taken from `fresh`."""
        assert isinstance(plan, MatrixPlan)
        if not plan.rank:
            return None
        rows, rank = value.shape[0], plan.rank
        if rows >= rank or fresh is None:
            return value[:rank].clone()
        refitted = fresh.to(value)
        refitted[:rows] = value
        return refitted

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        assert isinstance(plan, MatrixPlan)
        if plan.rank and value.shape[1] != plan.m:
            return f"a Q with {value.shape[1]} rows for {plan.name}, which needs {plan.m}"
        return None


class FactorP(StateField):
    """P of a parameter, transposed: `r x n`. With `alternate`, present only while it is newer than Q."""

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        assert isinstance(plan, MatrixPlan)
        return plan.rank, plan.n

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return value.detach().to("cpu", copy=True)

    def from_saved(self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int) -> torch.Tensor | None:
        return saved.detach() if row_dim == memory_order(parameter)[0] else None

    def refit(self, value: torch.Tensor, plan: UnitPlan, fresh: torch.Tensor | None) -> torch.Tensor | None:
        """Truncate to the new rank; additional rows are zero, and the codec replaces zero rows."""
        assert isinstance(plan, MatrixPlan)
        if not plan.rank:
            return None
        p = torch.zeros(plan.rank, value.shape[1], dtype=value.dtype)
        rows = min(plan.rank, value.shape[0])
        p[:rows] = value[:rows]
        return p

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        assert isinstance(plan, MatrixPlan)
        if plan.rank and value.shape[1] != plan.n:
            return f"a P of shape {tuple(value.shape)} for {plan.name}, which needs {(plan.rank, plan.n)}"
        return None


class BucketQ(StateField):
    """Q of a bucket that is compressed as one matrix, `r x m`, saved without conversion."""

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        assert isinstance(plan, MatrixPlan)
        return plan.rank, plan.m

    def refit(self, value: torch.Tensor, plan: UnitPlan, fresh: torch.Tensor | None) -> torch.Tensor | None:
        assert isinstance(plan, MatrixPlan)
        if value.shape[1] != plan.m:
            return None
        return FactorQ.refit(self, value, plan, fresh)  # type: ignore[arg-type]

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        # The size of the matrix is unknown before DDP has built its buckets: a Q of another size is replaced later.
        return None


Q = FactorQ("q")
P = FactorP("p")
BUCKET_Q = BucketQ("q", per="bucket")

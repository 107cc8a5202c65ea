"""The quantised all-reduce with error feedback, written plainly: loops over ranks, parameters and
blocks of Python floats, without the package's code. Without regard to numbers that are very large,
very small or not finite.
"""

import zlib

Vectors = dict[str, list[float]]


class OracleRanks:
    """Ranks that average one set of gradients.

    Attributes:
        residuals: per rank and parameter, what was not sent yet.
    """

    def __init__(
        self, world_size: int, levels: int, block_size: int, compressed: dict[str, int]
    ) -> None:
        """`levels`: the largest code. `compressed`: number of elements of each compressed
        parameter.
        """
        self._world_size = world_size
        self._levels = levels
        self._block_size = block_size
        self.residuals: list[Vectors] = [
            {name: [0.0] * numel for name, numel in compressed.items()} for _ in range(world_size)
        ]

    def step(self, gradients: list[Vectors]) -> Vectors:
        """One gradient per rank in, the average out. A parameter without a gradient on any rank is
        left out.
        """
        average: Vectors = {}
        for name in gradients[0]:
            of_ranks = [of_rank[name] for of_rank in gradients]
            if name not in self.residuals[0]:
                average[name] = [
                    sum(column) / self._world_size for column in zip(*of_ranks, strict=True)
                ]
            elif not any(any(numbers) for numbers in of_ranks):
                average[name] = [0.0] * len(of_ranks[0])
            else:
                average[name] = self._compressed(name, of_ranks)
        return average

    def _compressed(self, name: str, gradients: list[list[float]]) -> list[float]:
        numel = len(gradients[0])
        size = self._block_size
        world_size = self._world_size
        blocks = -(-numel // size)
        average = []
        for block in range(blocks):
            inside = range(block * size, min(numel, (block + 1) * size))
            owner = (zlib.crc32(name.encode()) + block * world_size // blocks) % world_size
            deltas = [
                [gradient[i] + residual[name][i] for i in inside]
                for gradient, residual in zip(gradients, self.residuals, strict=True)
            ]
            sent = [
                delta if rank == owner else self._rounded(delta)
                for rank, delta in enumerate(deltas)
            ]
            mean = [sum(column) / world_size for column in zip(*sent, strict=True)]
            arrived = self._rounded(mean)
            average += arrived
            for place, i in enumerate(inside):
                for rank, residual in enumerate(self.residuals):
                    residual[name][i] = deltas[rank][place] - sent[rank][place]
                self.residuals[owner][name][i] += world_size * (mean[place] - arrived[place])
        return average

    def _rounded(self, block: list[float]) -> list[float]:
        scale = max(abs(x) for x in block) / self._levels
        return [round(x / scale) * scale if scale else 0.0 for x in block]  # `round`: ties to even

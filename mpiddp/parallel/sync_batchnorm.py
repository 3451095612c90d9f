"""Batch normalisation with statistics over the batches of all ranks."""

import math
from typing import Any

import numpy as np

from mpiddp.autograd import Tensor
from mpiddp.device import array_namespace
from mpiddp.distributed import ProcessGroup, all_gather_single, all_reduce, is_initialized
from mpiddp.distributed.groups import GroupLike, known, resolve
from mpiddp.nn import Module
from mpiddp.nn.normalization import BatchNorm, Normalization, affine, along_channels, blend
from mpiddp.typing import Array, DTypeLike

from .weights import current_weight


def merged(counts: Array, means: Array, squares: Array) -> tuple[int, Array, Array]:
    """Merge the statistics of several parts of a batch. Return count, means and sums of squared deviations of all.

    The arguments are the parts' counts (parts,), means and sums of squared deviations (parts, C). A count may be 0.
    """
    total, weights = int(counts.sum()), counts[:, None]
    mean = (weights * means).sum(axis=0) / max(total, 1)
    return total, mean, (squares + weights * (means - mean) ** 2).sum(axis=0)


class _NormalizeAcrossRanks(Normalization):
    """Normalisation over all axes but the second, and over the batches of all ranks."""

    def forward(
        self, x: Array, weight: Array, bias: Array, eps: float, group: ProcessGroup, statistics: list[Any]
    ) -> Array:
        xp = array_namespace(x)
        self.axes, self.weight, self.group = (0, *range(2, x.ndim)), weight, group
        channels = x.shape[1]
        count = math.prod(x.shape[axis] for axis in self.axes)
        mine = xp.zeros(2 * channels + 1, dtype=np.float64)
        mine[0] = count
        if count:
            mean = x.mean(axis=self.axes, keepdims=True)
            centred = x - mean
            mine[1 : channels + 1] = mean.reshape(-1)
            mine[channels + 1 :] = (centred * centred).sum(axis=self.axes)
        everybody = xp.empty((group.size(), mine.size), dtype=np.float64)
        all_gather_single(everybody, mine, group)
        self.count, means, squares = merged(
            everybody[:, 0], everybody[:, 1 : channels + 1], everybody[:, channels + 1 :]
        )
        if self.count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(x.shape)} on this rank"
                f" and {self.count} values on all"
            )
        variance = squares / self.count
        self.inverse = along_channels((1 / xp.sqrt(variance + eps)).astype(x.dtype), x.ndim)
        self.normal = x - along_channels(means.astype(x.dtype), x.ndim)
        self.normal *= self.inverse
        statistics += [means, squares / (self.count - 1)]
        return affine(self.normal, weight, bias)

    def gradient_of_input(self, grad: Array) -> Array:
        channels, normal = grad.shape[1], self.normal
        # The sums over ranks have to be sums of weighted gradients. The gradient that this method returns is not
        # weighted: the reducer weights the parameters' gradients later.
        factor = current_weight.get()
        sums = array_namespace(grad).zeros(2 * channels, dtype=np.float64)
        if factor != 0:
            sums[:channels] = grad.sum(axis=self.axes)
            sums[channels:] = (grad * normal).sum(axis=self.axes)
            sums *= 1 if factor is None else factor
        all_reduce(sums, group=self.group)
        sums /= self.count * (factor or 1)
        sums = sums.astype(grad.dtype)
        for_x: Array = grad - along_channels(sums[:channels], grad.ndim)
        for_x -= normal * along_channels(sums[channels:], grad.ndim)
        for_x *= self.inverse * self.weight
        return for_x


class SyncBatchNorm(BatchNorm):
    """Batch normalisation of (N, C, ...) over the batches of all ranks (``torch.nn.SyncBatchNorm``), on CPUs too.

    In evaluation, on one rank and before `init_process_group` the layer is plain batch normalisation. Batches may
    differ in size. A rank without samples must run an empty batch, because the other ranks wait for its sums. Every
    rank raises ValueError if all batches together have fewer than two values a channel. Each rank sends ``2 C + 1``
    float64 numbers in forward and ``2 C`` in backward.

    Parameters
    ----------
    num_features, eps, momentum, dtype
        The parameters of ``nn.BatchNorm2d``.
    process_group : ProcessGroup, optional

    Examples
    --------
    >>> net = dist.SyncBatchNorm.convert_sync_batchnorm(net)  # doctest: +SKIP
    >>> ddp = dist.DistributedDataParallel(net)  # doctest: +SKIP
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        process_group: GroupLike = None,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(num_features, eps, momentum, dtype=dtype)
        if process_group is not None:
            resolve(process_group)  # it raises TypeError if this is no group
        self.process_group = process_group

    def forward(self, input: Any) -> Tensor:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {input.ndim}D input)")
        if input.shape[1] == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")
        return super().forward(input)

    def normalize(self, input: Any) -> Tensor:
        group = known(self.process_group) if is_initialized() else None
        if not self.training or group is None or group.size() == 1:
            return super().normalize(input)
        scale, shift = along_channels(self.weight, input.ndim), along_channels(self.bias, input.ndim)
        statistics: list[Array] = []
        output: Tensor = _NormalizeAcrossRanks.apply(input, scale, shift, self.eps, group, statistics)
        for running, new in zip((self.running_mean, self.running_var), statistics, strict=True):
            blend(running, new.astype(running.dtype), self.momentum)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: GroupLike = None) -> Module:
        """Return ``module`` with every batch normalisation in it replaced, in place, by a synchronised one.

        Parameters and statistics stay the same objects. Call this before `DistributedDataParallel` wraps the module.

        Parameters
        ----------
        module : Module
        process_group : ProcessGroup, optional
        """
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm):
            twin = cls.__new__(cls)
            vars(twin).update(vars(module), process_group=process_group)
            return twin
        for name, child in list(module.named_children()):
            converted = cls.convert_sync_batchnorm(child, process_group)
            if converted is not child:
                setattr(module, name, converted)
        return module

"""DistributedDataParallel: a model whose gradients are averaged over all ranks while backward runs."""

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiddp.autograd import Function, Tensor, is_grad_enabled, queue_callback
from mpiddp.nested import children
from mpiddp.nn import Module
from mpiddp.nn.random import set_step
from mpiddp.typing import Array

from .reducer import Reducer
from .sync_batchnorm import SyncBatchNorm
from .virtual_ranks import PartialSums
from .weights import rank_weight
from .wrapper import Wrapper


class DistributedDataParallel(Wrapper, Module):
    """A replica of a model on every rank, with gradients averaged over all ranks, as in torch.

    As in torch, each gradient is multiplied by ``fl(1/N)``, and the products are summed. If there are at most 8 ranks,
    all on one x86 node, they are summed in rank order. Only parameters that require a gradient when the model is
    wrapped are averaged. To train others later, call `detach` and wrap the module again. To copy or pickle a model,
    copy or pickle its ``module``, and wrap the copy on all ranks.

    Parameters
    ----------
    module : Module
        The model. The arrays of its parameters are moved side by side in memory, and with ``init_sync`` they get the
        first rank's values.
    device_ids, output_device, dim, check_reduction, gradient_as_bucket_view, batched_grad_copy
        Accepted for compatibility with torch. A model is always on the device of its arrays, and gradients are always
        views of their bucket.
    broadcast_buffers : bool, optional
        Older name of ``forward_sync_buffers``. With False buffers are not copied when the model is wrapped, either.
    init_sync : bool
        Copy the first rank's parameters and buffers to all ranks when the model is wrapped.
    process_group : ProcessGroup, optional
    bucket_cap_mb : float, optional
        Size in MiB at which a bucket is full. The default is 25, and 1 for the last bucket, because no computation
        overlaps with the communication of that bucket. torch makes the first bucket small instead.
    bucket_cap_mb_list : sequence of float, optional
        The caps of the first, second, ... bucket; the last cap holds for all later buckets, too.
    find_unused_parameters : bool
        Allow parameters without a gradient. If no rank has a gradient of a parameter, its ``grad`` stays None.
        Otherwise ranks without one contribute zeros.
    static_graph : bool
        Promise that all iterations use the same parameters as the first one.
    mixed_precision
        Not offered; see `fp16_compress_hook` and `bf16_compress_hook`.
    forward_sync_buffers : bool, optional
        Copy the first rank's buffers before a forward in training, if a backward has reduced gradients since the last
        copy. The default is True, unless ``broadcast_buffers`` is False.
    skip_all_reduce_unused_params : bool
        With ``find_unused_parameters``: do not send buckets that hold only unused parameters. All ranks must have the
        same unused parameters; otherwise they send different buckets, which is a `MismatchError`. A rank without
        samples must run an empty batch.
    virtual_ranks : int, optional
        The number of micro-batches into which the batch of each step is divided, on any number of ranks from 1 to
        ``virtual_ranks``. A rank computes its micro-batches one after the other, in `steps` or `micro_batch`. The model
        then has the same bits on any number of ranks. Parameters must be float32 or float64, on the host. A rank with
        ``s`` micro-batches holds up to log2(s), rounded up, additional copies of the gradients.

    Raises
    ------
    RuntimeError
        Ranks have models with different parameters (every rank raises it), or no parameter requires a gradient.
    ValueError
        An inner DistributedDataParallel averages some of the parameters already, or an option is out of range.

    References
    ----------
    S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Examples
    --------
    >>> model = dist.DistributedDataParallel(net)  # doctest: +SKIP
    >>> F.nll_loss(model(images), labels).backward()  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    _is_grad_enabled = staticmethod(is_grad_enabled)
    _queue_callback = staticmethod(queue_callback)
    _module_type = Module
    _sync_batchnorm_type = SyncBatchNorm

    def _register_output_hook(self, output: Any) -> Any:
        return hooked(output, self._reducer)

    @property
    def virtual_ranks(self) -> int | None:
        """The number of virtual ranks on all ranks together; None if the model has none."""
        return self._options.virtual_ranks

    @property
    def own_virtual_ranks(self) -> range:
        """The virtual ranks of this rank; RuntimeError if the model has none."""
        return self._partial().mine

    def _partial(self) -> PartialSums:
        partial = self._reducer.partial
        if partial is None:
            raise RuntimeError("this model has no virtual ranks: wrap it by DistributedDataParallel(virtual_ranks=...)")
        return partial

    @contextmanager
    def micro_batch(
        self, virtual_rank: int, *step: int, n_samples: float = 1, total: float | None = None
    ) -> Iterator[None]:
        """Return a context for the forward and backward of one micro-batch, that of ``virtual_rank``.

        A step consists of one context for each of `own_virtual_ranks`, in this order. The first one resets the
        gradients. The backward in the last one sums the gradients of all virtual ranks, over all ranks. A micro-batch
        without a backward contributes zeros. Dropout masks depend on the seed, ``virtual_rank`` and ``step``. After the
        step the buffers have the values that virtual rank 0 has left.

        Parameters
        ----------
        virtual_rank : int
        *step : int
            The number of the step, in one number or several.
        n_samples, total : float
            The numbers of samples in this micro-batch and in all micro-batches of the step. Gradients are averaged over
            samples. By default all micro-batches have the same weight.
        """
        partial = self._partial()
        if virtual_rank != partial.mine[partial.done]:
            raise ValueError(
                f"the next micro-batch of this step is that of virtual rank {partial.mine[partial.done]}, got"
                f" {virtual_rank}: each rank runs all of its own, {partial.mine}, in order; a loader gives them if its"
                f" batch_sampler is a GlobalBatchSampler with virtual_ranks={partial.virtual_ranks}"
            )
        total = partial.virtual_ranks * n_samples if total is None else total
        weight = rank_weight(n_samples, total)
        first, last = partial.done == 0, partial.done == len(partial.mine) - 1
        buffers = self._buffer_arrays()
        if first:
            self.zero_grad()
            self._buffers_before = [x.copy() for x in buffers]
        else:
            _copy_to(buffers, self._buffers_before)
        set_step(*step, stream=virtual_rank)
        partial.at_last = last
        try:
            with self.weighted(n_samples, total) if last else self.no_sync():
                yield
            if not last:
                self._reducer.keep(weight)
        except BaseException:
            partial.reset()
            raise
        if first:
            self._buffers_after = [x.copy() for x in buffers]
        if last:
            _copy_to(buffers, self._buffers_after)
            self._broadcast_buffers(0)

    def steps(self, loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """Yield, for each step, an iterator over this rank's micro-batches, which runs each in its `micro_batch`.

        Parameters
        ----------
        loader : DataLoader
            A loader whose batch sampler is a `GlobalBatchSampler` with the same ``virtual_ranks``.

        Examples
        --------
        >>> sampler = GlobalBatchSampler(data, batch_size=64, virtual_ranks=8)  # doctest: +SKIP
        >>> for micro_batches in model.steps(DataLoader(data, batch_sampler=sampler)):  # doctest: +SKIP
        ...     for images, labels in micro_batches:
        ...         F.nll_loss(model(images), labels).backward()
        ...     optimizer.step()
        """
        batches = iter(loader)
        for first in batches:
            yield self._micro_batches(first, batches, loader)

    def _micro_batches(self, first: Any, following: Iterator[Any], loader: Any) -> Iterator[Any]:
        for batch in itertools.chain([first], itertools.islice(following, len(self.own_virtual_ranks) - 1)):
            share = loader.current
            if share is None:
                raise ValueError(
                    "steps() needs a DataLoader whose batch_sampler is a GlobalBatchSampler(virtual_ranks=)"
                )
            place = (share.virtual_rank, share.epoch, share.index)
            with self.micro_batch(*place, n_samples=share.samples, total=share.global_samples):
                yield batch


def _copy_to(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[...] = source


class _OutputHook(Function):
    """The identity function on an output of the model. Its backward runs first, and calls `Reducer.begin`."""

    def forward(self, x: Array, reducer: Reducer) -> Array:
        self.reducer = reducer
        return x

    def backward(self, grad: Array) -> tuple[Array, None]:
        self.reducer.begin()
        return grad, None


def hooked(output: Any, reducer: Reducer) -> Any:
    """Return a nested output with `_OutputHook` applied to its tensors.

    Tensors in an object of an unknown type get no hook. The first gradient then calls `Reducer.begin`.
    """
    if isinstance(output, Tensor):
        return _OutputHook.apply(output, reducer) if output.requires_grad else output
    found = children(output)
    if found is not None:
        return found[1]([hooked(value, reducer) for value in found[0]])
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        record: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            # Only object.__setattr__ can set a field of a frozen dataclass.
            object.__setattr__(record, field.name, hooked(getattr(output, field.name), reducer))
        return record
    reducer.expect_backward()
    return output

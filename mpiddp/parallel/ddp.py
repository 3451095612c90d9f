"""DistributedDataParallel: a model whose gradients are averaged over all ranks while backward runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from mpiddp.autograd import Function, Tensor, is_grad_enabled
from mpiddp.distributed import ProcessGroup
from mpiddp.distributed.groups import GroupLike, member
from mpiddp.nn import Module, Parameter
from mpiddp.typing import Array

from .join import Join, Joinable, JoinHook
from .naive import current_share, sample_share
from .plan import MIB
from .reducer import CommHook, Reducer
from .replicas import broadcast_arrays, check_equal_values, check_same_parameters
from .shadow import Shadow, announce
from .sync_batchnorm import SyncBatchNorm
from .timeline import Timeline, asked_for

BufferHook = Callable[[Any, dict[str, Array]], Any]


class BufferCommHookLocation(Enum):
    """When a hook on buffers runs (torch's ``_BufferCommHookLocation``)."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class _BackwardBegins(Function):
    """The identity on an output; its backward, the first of all, tells the reducer."""

    def forward(self, x: Array, reducer: Reducer) -> Array:
        self.reducer = reducer
        return x

    def backward(self, grad: Array) -> tuple[Array, None]:
        self.reducer.begin()
        return grad, None


def _announcing(output: Any, reducer: Reducer) -> Any:
    """Return ``output`` with every tensor in it replaced by one that announces its backward."""
    if isinstance(output, Tensor):
        return _BackwardBegins.apply(output, reducer) if output.requires_grad else output
    if isinstance(output, dict):
        twin = copy.copy(output)
        for key, value in output.items():
            twin[key] = _announcing(value, reducer)
        return twin
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_announcing(value, reducer) for value in output))
    if isinstance(output, (list, tuple)):
        return type(output)(_announcing(value, reducer) for value in output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        record: Any = copy.copy(output)
        for field in dataclasses.fields(output):
            # Object's own, because a frozen one has no other.
            object.__setattr__(record, field.name, _announcing(getattr(output, field.name), reducer))
        return record
    if output is not None:
        reducer.arm()  # whatever hides in there, the first gradient tells
    return output


def _caps_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> list[int] | None:
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError("give bucket_cap_mb or bucket_cap_mb_list, not both")
    caps = (
        bucket_cap_mb_list if bucket_cap_mb_list is not None else [bucket_cap_mb] if bucket_cap_mb is not None else None
    )
    if caps is None:
        return None
    if not caps or min(caps) <= 0:
        raise ValueError(f"bucket caps must be positive numbers of MiB, got {list(caps)}")
    return [int(cap * MIB) for cap in caps]


class DistributedDataParallel(Module, Joinable):
    """A model that every rank holds, and whose gradients are the averages over all ranks.

    Parameters
    ----------
    module : Module
        The model. Its parameters' arrays are moved side by side in memory; their values become those of the first rank.
    device_ids, output_device
        Accepted for compatibility, at most one: a model lives where its arrays do.
    dim, check_reduction
        Accepted for compatibility.
    broadcast_buffers : bool, optional
        Older name of ``forward_sync_buffers``; False also leaves the buffers as they are at construction.
    init_sync : bool, default True
        Check that all ranks hold the same parameters and copy values from the first rank.
    process_group : ProcessGroup, optional
        The ranks; all by default.
    bucket_cap_mb : float, optional
        Size in MiB at which a bucket is closed, followed exactly. By default 25, and 1 for the bucket that closes last,
        which nothing can hide (torch makes the first one small).
    bucket_cap_mb_list : sequence of float, optional
        Sizes of the first, second, ... bucket.
    find_unused_parameters : bool, default False
        Allow backward to leave parameters without a gradient. What is unused on all ranks keeps ``grad`` None, what is
        unused on some gets the average with zeros.
    gradient_as_bucket_view : bool
        Accepted for compatibility; gradients are always views of their bucket: they are born there.
    static_graph : bool, default False
        The same parameters are unused in every iteration: learned in the first.
    forward_sync_buffers : bool, optional
        Copy the buffers (running statistics) of the first rank before every forward that follows a reduced backward.
        Default True.

    Raises
    ------
    RuntimeError
        On every rank, if ranks hold different parameters; if there is none that requires a gradient.
    ValueError
        If the module holds a wrapper that averages some of the parameters already; if an option is out of range.

    Notes
    -----
    Default scaling as torch's, bit for bit: each gradient times ``fl(1/N)``, then summed, in rank order. Sends every
    gradient once per backward. The memory of the gradients is the memory that is sent.

    What is averaged are the parameters that require a gradient at construction: to train others later, `detach`, and
    wrap the model again.

    References
    ----------
    S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    ``torch.nn.parallel.DistributedDataParallel``.

    Examples
    --------
    >>> model = dist.DistributedDataParallel(net)  # doctest: +SKIP
    >>> F.nll_loss(model(images), labels).backward()  # doctest: +SKIP
    >>> optimizer.step()  # doctest: +SKIP
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        bucket_cap_mb_list: Sequence[float] | None = None,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, Module):
            raise TypeError(f"DistributedDataParallel needs an mpiddp.nn.Module, got {type(module).__name__}")
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        group = member(process_group, "DistributedDataParallel")
        if group is None:
            raise ValueError("DistributedDataParallel: this rank is not a member of process_group")
        self.module = module
        self.process_group: ProcessGroup = group
        self._ignored: frozenset[str] = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, p) for name, p in module.named_parameters() if name not in self._ignored]
        trained = [(name, p) for name, p in named if p.requires_grad]
        wrapped = {id(p) for each in module.modules() if isinstance(each, type(self)) for p in each.parameters()}
        twice = [name for name, p in trained if id(p) in wrapped]
        if twice:
            raise ValueError(
                f"a DistributedDataParallel inside of the module averages {twice[0]} already: wrap the whole only, or"
                " name what is wrapped to set_params_and_buffers_to_ignore_for_model"
            )
        if not trained:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a"
                " gradient."
            )
        if init_sync:
            check_same_parameters(named, group)
            buffers = self._buffers_to_sync() if broadcast_buffers is not False else []
            broadcast_arrays([parameter.data for _, parameter in named] + buffers, group)
        self._forward_sync_buffers = (
            forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers is not False
        )
        self._reducer = Reducer(
            trained, group, _caps_bytes(bucket_cap_mb, bucket_cap_mb_list), find_unused_parameters, static_graph
        )
        self.timeline = asked_for(group)
        self._reduce = True
        self._divide_by_all = True
        self._backwards_at_sync = 0
        self._buffer_hook: tuple[object, BufferHook, BufferCommHookLocation] | None = None

    def _named_buffers_to_sync(self) -> dict[str, Array]:
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in self._ignored}

    def _buffers_to_sync(self) -> list[Array]:
        return list(self._named_buffers_to_sync().values())

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; the backward of what it returns reduces the gradients, unless under `no_sync`."""
        self._reducer.abandon()
        if is_grad_enabled():  # else an earlier forward's backward may still be to come
            self._reducer.arm(False)
        reduces = self._reduce and is_grad_enabled()
        syncs = self._will_sync_buffers()
        source, self._reducer.divisor = 0, None
        if self._join_config.enable:
            source = announce(self, reduces, syncs)
        if syncs:
            self._sync_buffers(source, BufferCommHookLocation.PRE_FORWARD)
        self._reducer.times.begin_forward()
        output = self.module(*inputs, **kwargs)
        self._reducer.times.end_forward()
        if syncs:
            self._sync_buffers(source, BufferCommHookLocation.POST_FORWARD)
        return _announcing(output, self._reducer) if reduces else output

    def skip_forward(self) -> None:
        """Take part in what a forward of the other ranks sends, on a rank that has no inputs for one."""
        if self._will_sync_buffers():
            self._sync_buffers(0, BufferCommHookLocation.PRE_FORWARD)
            self._sync_buffers(0, BufferCommHookLocation.POST_FORWARD)

    def _will_sync_buffers(self) -> bool:
        """Tell whether this forward synchronises buffers: it trains, and a backward has been reduced since."""
        return (
            self.training
            and self._reduce
            and self._forward_sync_buffers
            and self._backwards_at_sync != self._reducer.backwards
        )

    def _sync_buffers(self, source: int, now: BufferCommHookLocation) -> None:
        """Make the buffers those of ``source``, a rank of the group, or what the registered hook makes them."""
        if self._buffer_hook is None:
            if now is BufferCommHookLocation.PRE_FORWARD:
                broadcast_arrays(self._buffers_to_sync(), self.process_group, source)
                self._backwards_at_sync = self._reducer.backwards
            return
        state, hook, when = self._buffer_hook
        if when is not now:
            return
        for work in hook(state, self._named_buffers_to_sync()) or ():
            work.wait()
        self._backwards_at_sync = self._reducer.backwards

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: a forward inside has a backward that sends nothing.

        The next backward outside reduces the sum that has gathered.
        """
        outer, self._reduce = self._reduce, False
        try:
            yield
        finally:
            self._reduce = outer

    @contextmanager
    def weighted(self, n_samples: float, total: float | None = None) -> Iterator[None]:
        """Average over samples instead of ranks, which is exact when ranks hold different numbers of them.

        Concerns the backward that reduces; what was accumulated under `no_sync` before is weighted with it, so
        ``n_samples`` is to be each microbatch's where all of a rank's are equally large.

        Parameters
        ----------
        n_samples : float
            Samples that this rank's loss is the mean of. A rank that runs no backward still gets the average, to which
            it adds what it has accumulated, or nothing: ``with ddp.weighted(0, total): ddp.skip_forward()``.
        total : float, optional
            Samples of all ranks, where the loader knows it; else found by an all-reduce of 8 bytes.
        """
        if self._join_config.enable:
            raise RuntimeError("weighted() averages uneven inputs by itself: use it or join(), not both")
        outer, self._reducer.share = self._reducer.share, sample_share(n_samples, total, self.process_group)
        token = current_share.set(self._reducer.share)
        reduced = self._reducer.backwards
        try:
            yield
            if self._reduce and self._reducer.backwards == reduced:
                self._reducer.contribute_nothing()
        finally:
            self._reducer.share = outer
            current_share.reset(token)

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket instead of an all-reduce.

        Parameters
        ----------
        state : object
            Handed to the hook.
        hook : callable
            Gets the state and a `GradBucket`, whose buffer is not divided by anything, and returns a `Work` or a
            `Future` of an array or list of arrays: the averaged gradients, which are copied into the bucket unless
            they are its memory.
        """
        self._reducer.register_comm_hook(state, hook)

    def register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, named_buffers)`` synchronise the buffers instead of a broadcast from the first rank.

        Parameters
        ----------
        state : object
            Handed to the hook.
        hook : callable
            Gets the state and a dict of the buffers by name; writes to them, and returns None or a list of `Work` or
            `Future` to wait for.
        comm_hook_location : BufferCommHookLocation
            Whether it runs before forward or after it, where it sees what this batch has made of the buffers.

        Raises
        ------
        TypeError
            If it cannot be called.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        self._buffer_hook = state, hook, comm_hook_location

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that has finished contributes zeros until all have; then every rank gets the model of the one that had
        most. Where batches only differ in size, or the sampler may hand out empty ones, `weighted` is exact and this
        is not.

        Parameters
        ----------
        divide_by_initial_world_size : bool, default True
            Divide by the number of all ranks; False: by those that have inputs.
        enable : bool, default True
            False: do nothing.
        throw_on_early_termination : bool, default False
            Raise on all ranks as soon as one has no more inputs.

        Notes
        -----
        Two all-reduces of 8 and 24 bytes in each forward.

        Examples
        --------
        >>> with ddp.join():  # doctest: +SKIP
        ...     for x, y in loader:
        ...         loss_fn(ddp(x), y).backward()
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without inputs does; ``divide_by_initial_world_size`` is the one option."""
        if self._buffer_hook is not None:
            raise RuntimeError(
                "a rank without inputs cannot follow a hook on buffers: join() needs a model without one"
            )
        if self._has_sync_batchnorm():
            raise RuntimeError("a rank without inputs cannot follow SyncBatchNorm: use weighted() with empty batches")
        self._divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return Shadow(self)

    def _has_sync_batchnorm(self) -> bool:
        return any(isinstance(module, SyncBatchNorm) for module in self.module.modules())

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that hold the model."""
        return self.process_group

    @staticmethod
    def set_params_and_buffers_to_ignore_for_model(module: Module, params_and_buffers_to_ignore: Iterable[str]) -> None:
        """Leave parameters and buffers, by their names in ``module``, alone: neither synchronised nor reduced.

        Called before the model is wrapped (torch: ``_set_params_and_buffers_to_ignore_for_model``).
        """
        module._ddp_params_and_buffers_to_ignore = frozenset(params_and_buffers_to_ignore)

    def logging_data(self) -> dict[str, Any]:
        """Return what is to know of this wrapper: its layout and options, and where the last iterations' time went.

        Names are those of torch's ``_get_ddp_logging_data``; times are integers in nanoseconds.
        """
        return self._reducer.logging_data() | {
            "module_name": type(self.module).__name__,
            "rank": self.process_group.rank(),
            "world_size": self.process_group.size(),
            "backend_name": "mpi",
            "broadcast_buffers": self._forward_sync_buffers,
            "gradient_as_bucket_view": True,
            "has_sync_bn": self._has_sync_batchnorm(),
            "join_uneven_inputs": self._join_config.enable,
        }

    def bucket_order(self) -> list[int] | None:
        """Return the order of parameters' gradients that the buckets follow, or None before the first reduced backward.

        Buckets decide how sums are formed, so a checkpoint that is to resume to the same bits carries it.

        Returns
        -------
        list of int or None
            Numbers of the parameters that are trained, in the order of registration; the same on every rank.
        """
        return self._reducer.bucket_order()

    def install_bucket_order(self, order: Sequence[int]) -> None:
        """Make the buckets those of a wrapper with this `bucket_order`; collective over the group.

        Called before the first backward, of which they are then independent.

        Raises
        ------
        ValueError
            If it is not an order of this model's parameters.
        """
        self._reducer.install_bucket_order(order)

    def detach(self) -> None:
        """Let go of the model: its backward is a local matter again, and its gradients have no place in buckets."""
        self._reduce = False
        self._reducer.detach()

    def check_replicas(self) -> None:
        """Check that all ranks hold the same bits in every parameter.

        Raises
        ------
        MismatchError
            On every rank; names the rank and the parameter that differ.
        """
        named: list[tuple[str, Parameter]] = list(self.module.named_parameters())
        check_equal_values([(name, parameter.data) for name, parameter in named], self.process_group)

    @property
    def timeline(self) -> Timeline | None:
        """Where spans of forward, backward, buckets and waits are noted; assignable, on all ranks alike.

        By default what the environment variable ``MPIDDP_TIMELINE`` asks for.
        """
        return self._reducer.times.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._reducer.times.timeline = timeline

    @property
    def exposed_s(self) -> float:
        """Seconds that all backward passes so far have waited for communication at their ends."""
        return self._reducer.times.exposed_ns * 1e-9

    def bucket_sizes_bytes(self) -> list[int]:
        """Return the size of each bucket, in the order in which they are sent."""
        return self._reducer.bucket_sizes_bytes()

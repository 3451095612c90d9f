"""What every DistributedDataParallel does, whichever library its module and its autograd belong to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpiddp.distributed import ProcessGroup
from mpiddp.distributed.groups import GroupLike, member

from .buckets import caps_in_bytes
from .hooks import CommHook
from .join import DDPJoinHook, Join, Joinable, JoinHook, announce
from .naive import current_share, sample_share
from .reducer import Reducer
from .replicas import (
    BufferCommHookLocation,
    BufferHook,
    BufferSync,
    ModuleState,
    broadcast_arrays,
    check_equal_values,
    check_same_parameters,
)
from .timeline import Timeline, timeline_of_environment


class Wrapper(Joinable):
    """The base of a DistributedDataParallel: all of it that does not look into the module.

    A subclass is a module of its library too. It sets ``module``, calls `_replicate`, and defines the abstract methods.
    """

    module: Any
    training: bool
    process_group: ProcessGroup
    _state_type: type[ModuleState] = ModuleState
    _sync_batchnorm_type: type

    @staticmethod
    @abstractmethod
    def _is_grad_enabled() -> bool:
        """Tell whether autograd records."""

    @staticmethod
    @abstractmethod
    def _queue_callback(callback: Callable[[], object], /) -> None:
        """Call ``callback`` when the backward that runs now has made all gradients."""

    @abstractmethod
    def _register_output_hook(self, output: Any) -> Any:
        """Return ``output`` such that its backward calls ``self._reducer.begin`` first of all."""

    def _replicate(
        self,
        process_group: GroupLike,
        init_sync: bool,
        *,
        broadcast_buffers: bool | None,
        bucket_cap_mb: float | None,
        find_unused_parameters: bool,
        static_graph: bool,
        bucket_cap_mb_list: Sequence[float] | None,
        forward_sync_buffers: bool | None,
        skip_all_reduce_unused_params: bool,
    ) -> None:
        """Make all ranks' modules the same, and lay the gradients of this one out in buckets."""
        group = member(process_group, "DistributedDataParallel")
        if group is None:
            raise ValueError("DistributedDataParallel: this rank is not a member of process_group")
        self.process_group = group
        self._state = self._state_type(self.module)
        named = self._state.parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._check_trained([name for name, _ in trained])
        with_buffers = broadcast_buffers is not False
        self._forward_sync_buffers = with_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._buffer_sync = BufferSync(self._state, group)
        if init_sync:
            check_same_parameters(named, group)
            buffers = self._state.buffers().values() if with_buffers else ()
            broadcast_arrays([*(parameter.data for _, parameter in named), *buffers], group)
        self._reducer = Reducer(
            trained,
            group,
            caps_in_bytes(bucket_cap_mb, bucket_cap_mb_list),
            find_unused_parameters,
            static_graph,
            skip_all_reduce_unused_params,
            self._queue_callback,
        )
        self.timeline = timeline_of_environment(group)
        self._reduce = True
        self._divide_by_all = True

    def _check_trained(self, trained: Sequence[str]) -> None:
        """Refuse a module of which nothing is to be averaged, or something is averaged already."""
        inner = [each for each in self.module.modules() if isinstance(each, Wrapper)]
        averaged = {id(parameter) for each in inner for parameter in each.module.parameters()}
        twice = {name for name, parameter in self.module.named_parameters() if id(parameter) in averaged}
        for name in trained:
            if name in twice:
                raise ValueError(
                    f"a DistributedDataParallel inside of the module averages {name} already: wrap the whole only, or"
                    " name what is wrapped to set_params_and_buffers_to_ignore_for_model"
                )
        if not trained:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a"
                " gradient."
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; the backward of what it returns reduces the gradients, unless under `no_sync`."""
        recording = self._is_grad_enabled()
        self._reducer.abort_backward()
        if recording:  # else an earlier forward's backward may still be to come
            self._reducer.expect_backward(False)
        reduces, syncs = self._reduce and recording, self._will_sync_buffers()
        source, self._reducer.divisor = 0, None
        if self._join_config.enable:
            source, active = announce(self, reduces, syncs)
            if not self._divide_by_all:
                self._reducer.divisor = active
        if syncs:
            self._sync_buffers(source, BufferCommHookLocation.PRE_FORWARD)
        self._reducer.times.begin_forward()
        output = self.module(*inputs, **kwargs)
        self._reducer.times.end_forward()
        if syncs:
            self._sync_buffers(source, BufferCommHookLocation.POST_FORWARD)
        return self._register_output_hook(output) if reduces else output

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
            and self._buffer_sync.is_due(self._reducer.backwards)
        )

    def _sync_buffers(self, source: int, now: BufferCommHookLocation) -> None:
        self._buffer_sync.sync(source, self._reducer.backwards, now)

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
            it adds what it has accumulated, or nothing: ``with ddp.weighted(0, total): ddp.skip_forward()``. (Not under
            ``skip_all_reduce_unused_params``, where only a backward tells what is to be sent: run an empty batch.)
        total : float, optional
            Samples of all ranks, where the loader knows it; else found by an all-reduce of 8 bytes.
        """
        if self._join_config.enable:
            raise RuntimeError("weighted() averages uneven inputs by itself: use it or join(), not both")
        outer, self._reducer.weight = self._reducer.weight, sample_share(n_samples, total, self.process_group)
        token = current_share.set(self._reducer.weight)
        reduced = self._reducer.backwards
        try:
            yield
            # Inside of another weighted() the backward that reduces may be still to come.
            if self._reduce and self._reducer.backwards == reduced and (outer is None or n_samples == 0):
                self._reducer.shadow_backward()
        finally:
            self._reducer.weight = outer
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
        self._buffer_sync.register_hook(state, hook, comm_hook_location)

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
        if self._buffer_sync.has_hook:
            raise RuntimeError(
                "a rank without inputs cannot follow a hook on buffers: join() needs a model without one"
            )
        if self._has_sync_batchnorm():
            raise RuntimeError("a rank without inputs cannot follow SyncBatchNorm: use weighted() with empty batches")
        self._divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return DDPJoinHook(self._reducer, self._buffer_sync, self._state, self.process_group)

    def _has_sync_batchnorm(self) -> bool:
        return any(isinstance(each, self._sync_batchnorm_type) for each in self.module.modules())

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that hold the model."""
        return self.process_group

    @staticmethod
    def set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Iterable[str]) -> None:
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
        buckets = self._reducer.buckets
        return list(buckets.order) if buckets.settled else None

    def install_bucket_order(self, order: Sequence[int]) -> None:
        """Make the buckets those of a wrapper with this `bucket_order`; collective over the group.

        Called before the first backward, of which they are then independent.

        Raises
        ------
        ValueError
            If it is not an order of this model's parameters.
        """
        self._reducer.buckets.install_order(order)

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
        named = self._state_type(self.module, ()).parameters()
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
        return self._reducer.buckets.sizes_bytes()

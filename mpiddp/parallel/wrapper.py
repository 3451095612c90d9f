"""The common base of DistributedDataParallel for modules of mpiddp and of torch."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NoReturn

from mpiddp.distributed import ProcessGroup
from mpiddp.distributed.groups import GroupLike, known
from mpiddp.typing import Array

from .buckets import ParameterLike
from .hooks import CommHook, kind_of
from .join import Join, Joinable, JoinHook, agree
from .reducer import Options, Reducer
from .replicas import broadcast_arrays, check_equal_values, check_same_model
from .timeline import Timeline, timeline_of_environment
from .weights import current_weight, rank_weight


class Wrapper(Joinable):
    """The part of DistributedDataParallel that does not depend on the library of the wrapped module.

    A subclass is also a module of that library, mpiddp's or torch's.
    """

    module: Any
    training: bool
    process_group: ProcessGroup
    _sync_batchnorm_type: type

    _module_type: type[Any]
    _is_grad_enabled: Callable[[], bool]
    _queue_callback: Callable[[Callable[[], object]], None]
    """Function that makes autograd call its argument at the end of the running backward."""

    def _as_parameter(self, name: str, parameter: Any) -> ParameterLike:
        """Return a parameter of the module in the form that the buckets need."""
        return parameter  # type: ignore[no-any-return]

    def _as_array(self, buffer: Any) -> Array:
        return buffer  # type: ignore[no-any-return]

    @abstractmethod
    def _register_output_hook(self, output: Any) -> Any:
        """Set a hook on ``output`` that calls ``self._reducer.begin`` when its backward begins."""

    def __init__(
        self,
        module: Any,
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
        mixed_precision: object = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        forward_sync_buffers: bool | None = None,
        skip_all_reduce_unused_params: bool = False,
        batched_grad_copy: bool = False,
        virtual_ranks: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, self._module_type):
            raise TypeError(
                "mpiddp.DistributedDataParallel takes an mpiddp.nn.Module, and mpiddp.torch.DistributedDataParallel a"
                f" torch.nn.Module, got {kind_of(module)}"
            )
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        if mixed_precision is not None:
            raise ValueError(
                "DistributedDataParallel takes no mixed_precision: parameters and gradients keep their dtype; register"
                " fp16_compress_hook or bf16_compress_hook to send gradients in half precision"
            )
        self.module = module
        self.process_group = group = known(process_group)
        self._options = Options(
            broadcast_buffers,
            bucket_cap_mb,
            bucket_cap_mb_list,
            find_unused_parameters,
            static_graph,
            forward_sync_buffers,
            skip_all_reduce_unused_params,
            virtual_ranks,
        )
        if virtual_ranks is not None and not hasattr(self, "micro_batch"):
            raise ValueError(
                "virtual_ranks is for mpiddp.DistributedDataParallel, whose dropout follows them; leave it out"
            )
        if virtual_ranks is not None and any(isinstance(each, self._sync_batchnorm_type) for each in module.modules()):
            raise ValueError(
                "SyncBatchNorm needs all micro-batches at once, and virtual ranks run them one after the other: leave"
                " it out, so that batch norms take each micro-batch by itself"
            )
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._check_trained([name for name, _ in trained])
        with_buffers = broadcast_buffers is not False
        self._forward_sync_buffers = with_buffers if forward_sync_buffers is None else forward_sync_buffers
        check_same_model(named, {"init_sync": init_sync, **self._options._asdict()}, group)
        if init_sync:
            buffers = self._buffer_arrays() if with_buffers else ()
            broadcast_arrays([*(parameter.data for _, parameter in named), *buffers], group)
        self._reducer = Reducer(trained, group, self._options, self._queue_callback)
        self.timeline = timeline_of_environment(group)
        self._reduce = True
        self._divide_by_all = True
        self._broadcast_after = 0
        """The value of `Reducer.backwards` when the buffers were last copied from one rank to all; 0 before."""

    # Parameters and buffers are looked up each time, because a program may replace them.

    def _named_parameters(self) -> list[tuple[str, ParameterLike]]:
        named = self.module.named_parameters()
        return [(name, self._as_parameter(name, each)) for name, each in named if name not in self._ignored]

    def _buffer_arrays(self) -> list[Array]:
        return [self._as_array(each) for name, each in self.module.named_buffers() if name not in self._ignored]

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a DistributedDataParallel cannot be copied or pickled: copy or pickle ddp.module, and wrap the copy on all"
            " ranks"
        )

    def _check_trained(self, trained: Sequence[str]) -> None:
        """Raise an error if there is no parameter to average, or if an inner wrapper averages one of them already."""
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
        """Run the model; the backward of its output reduces the gradients, except under `no_sync`."""
        recording = self._is_grad_enabled()
        self._reducer.abort_backward()
        # A forward under no_grad changes nothing here, because the backward of an earlier forward may still follow it.
        if recording:
            self._reducer.expect_backward(False)
        reduces, syncs = self._reduce and recording, self._will_sync_buffers()
        if reduces and self._reducer.partial is not None:
            self._reducer.partial.check_turn()
        source, self._reducer.divisor = 0, None
        if self._join is not None:
            counted = Join.notify_join_context(self)  # None if this is not the first joinable of the `Join`
            _, _, source = agree(self.process_group, reduces, syncs, active=True)
            if counted is not None:
                counted.wait()
                if not self._divide_by_all:
                    self._reducer.divisor = int(counted.result()[0][0])
        if syncs:
            self._broadcast_buffers(source)
        began_ns = perf_counter_ns()
        output = self.module(*inputs, **kwargs)
        if self.timeline is not None:
            self.timeline.add("forward", "forward", began_ns, perf_counter_ns())
        return self._register_output_hook(output) if reduces else output

    def skip_forward(self) -> None:
        """Take part in the communication of the other ranks' forward. A rank without inputs calls this instead."""
        if self._will_sync_buffers():
            self._broadcast_buffers(0)

    def _will_sync_buffers(self) -> bool:
        return (
            self.training
            and self._reduce
            and self._forward_sync_buffers
            and self._broadcast_after != self._reducer.backwards
        )

    def _broadcast_buffers(self, source: int) -> None:
        """Copy the buffers of the group's rank ``source`` to all ranks."""
        broadcast_arrays(self._buffer_arrays(), self.process_group, source)
        self._broadcast_after = self._reducer.backwards

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context: the backward of a forward that runs in it does not communicate.

        Such gradients accumulate on this rank. The next backward of a forward outside the context reduces their sum.
        """
        outer, self._reduce = self._reduce, False
        try:
            yield
        finally:
            self._reduce = outer

    @contextmanager
    def weighted(self, n_samples: float, total: float | None = None) -> Iterator[None]:
        """Return a context in which gradients are averaged over samples instead of ranks.

        The average is exact also if ranks have different numbers of samples. The weight applies to the backward that
        reduces gradients, and to gradients that were accumulated under `no_sync` before.

        Parameters
        ----------
        n_samples : float
            The number of samples of which this rank's loss is the mean; with equal microbatches, the number in one of
            them. If all its backwards ran under `no_sync`, a rank contributes the gradients that they accumulated. A
            rank without samples contributes zeros: ``with ddp.weighted(0, total): ddp.skip_forward()``. With
            ``skip_all_reduce_unused_params`` such a rank has to run an empty batch, because only a backward tells which
            buckets are sent.
        total : float, optional
            The number of samples of all ranks. By default an all-reduce of 8 bytes finds it.
        """
        if self._join is not None:
            raise RuntimeError("weighted() averages uneven inputs by itself: use it or join(), not both")
        if self._reducer.weight is not None or not (self._reducer.partial and self._reducer.partial.at_last):
            self._without_virtual_ranks("a weight of a rank's samples is not the same")
        outer, self._reducer.weight = self._reducer.weight, rank_weight(n_samples, total, self.process_group)
        token = current_weight.set(self._reducer.weight)
        reduced = self._reducer.backwards
        try:
            yield
            # Inside another weighted() the reducing backward may still follow.
            if self._reduce and self._reducer.backwards == reduced and (outer is None or n_samples == 0):
                self._reducer.shadow_backward()
        finally:
            self._reducer.weight = outer
            current_weight.reset(token)

    def _without_virtual_ranks(self, what: str) -> None:
        if self._reducer.partial is not None:
            raise RuntimeError(f"{what} on any number of ranks: leave it or virtual_ranks out")

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce each bucket by calling ``hook(state, bucket)``; see `mpiddp.parallel.hooks`.

        The value of the hook's future is an array, or a list whose first element is one. The array is copied into the
        bucket, unless both are the same memory.
        """
        self._without_virtual_ranks("the result of a communication hook is not the same")
        self._reducer.register_comm_hook(state, hook)

    @property
    def comm_hook_state(self) -> object:
        """The state of the communication hook; None without a hook."""
        return self._reducer.comm_hook_state

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a loop in which ranks have different numbers of batches, as in torch.

        A rank that has no more batches joins: it contributes zeros to the other ranks' iterations. At the end every
        rank gets the model of a rank that joined last. Each forward costs all-reduces of 8 and 24 bytes. If batches
        differ in size, use `weighted` instead, whose averages are exact.

        Parameters
        ----------
        divide_by_initial_world_size : bool
            True divides sums of gradients by the number of all ranks, False by the number of ranks with inputs.
        enable, throw_on_early_termination : bool
            The options of `Join`.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for iterations in which this rank has no inputs.

        The only option is ``divide_by_initial_world_size``, as in `join`.
        """
        self._without_virtual_ranks("a step of ranks that have joined is not the same")
        if any(isinstance(each, self._sync_batchnorm_type) for each in self.module.modules()):
            raise RuntimeError("a rank without inputs cannot follow SyncBatchNorm: use weighted() with empty batches")
        self._divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return _RankWithoutInputs(self)

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.process_group

    @staticmethod
    def set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Iterable[str]) -> None:
        """Exclude parameters and buffers, by their names, from synchronisation and reduction.

        Call this before the module is wrapped. In torch the name of this function begins with an underscore.
        """
        module._ddp_params_and_buffers_to_ignore = frozenset(params_and_buffers_to_ignore)

    def bucket_order(self) -> list[int] | None:
        """Return the order of the trained parameters in the buckets, as their numbers in the order of registration.

        It is None until the first reduced backward, or `install_bucket_order`, has settled it. The order decides how
        sums are formed, so a checkpoint needs it to resume to the same bits.
        """
        buckets = self._reducer.buckets
        return list(buckets.order) if buckets.settled else None

    def install_bucket_order(self, order: Sequence[int]) -> None:
        """Restore a `bucket_order` before the first backward. All ranks call this together.

        ValueError if the order is that of another model.
        """
        self._reducer.buckets.install_order(order)

    def detach(self) -> None:
        """Undo the wrapping: a backward of the module no longer communicates, and its gradients leave the buckets."""
        self._reduce = False
        self._reducer.detach()

    def check_replicas(self) -> None:
        """Raise `MismatchError` on every rank unless the parameters have the same bits on all ranks.

        The error names a rank and the first parameter that differs there.
        """
        named = self.module.named_parameters()
        check_equal_values([(name, self._as_parameter(name, each).data) for name, each in named], self.process_group)

    @property
    def timeline(self) -> Timeline | None:
        """The timeline that records forward, backward, buckets and waits. The default is that of ``MPIDDP_TIMELINE``.

        A program that assigns a timeline has to do so on all ranks.
        """
        return self._reducer.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._reducer.timeline = timeline

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank has waited for communication at the ends of backward passes."""
        return self._reducer.exposed_ns * 1e-9

    def bucket_sizes_bytes(self) -> list[int]:
        """Return the sizes of the buckets, in the order in which they are sent."""
        return self._reducer.buckets.sizes_bytes()


class _RankWithoutInputs(JoinHook):
    """The hook of a rank without inputs. It contributes zeros to each iteration, and copies the final model."""

    def __init__(self, model: Wrapper) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Take part in one forward of the ranks with inputs, and in its backward if that reduces gradients."""
        model, reducer = self._model, self._model._reducer
        reduces, syncs, source = agree(model.process_group, False, False, active=False)
        if syncs:
            model._broadcast_buffers(source)
        if reduces:
            reducer.weight = 0
            try:
                reducer.shadow_backward()
            finally:
                reducer.weight = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of the highest rank among those that joined last."""
        model = self._model
        _, _, source = agree(model.process_group, False, False, active=is_last_joiner)
        arrays = [*(parameter.data for _, parameter in model._named_parameters()), *model._buffer_arrays()]
        broadcast_arrays(arrays, model.process_group, source)

"""mpiddp's DistributedDataParallel for modules of torch: the same Reducer, Layout and buckets.

torch's autograd makes the gradients; a hook on each parameter moves them into buckets of symmetric memory, of which
``grad`` is a view from then on. Tensors of the host's memory only: the backend "mpiddp" takes those of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from mpiddp import parallel
from mpiddp.distributed.groups import GroupLike, member
from mpiddp.parallel.buffers import BufferCommHookLocation, BufferSync
from mpiddp.parallel.join import Joinable
from mpiddp.parallel.plan import caps_in_bytes
from mpiddp.parallel.reducer import Reducer as ArrayReducer
from mpiddp.parallel.replicas import broadcast_arrays, check_equal_values, check_same_parameters
from mpiddp.parallel.shadow import announce
from mpiddp.typing import Array

from .arrays import as_array, as_tensor


class Parameter:
    """A parameter of torch's with the attributes of `mpiddp.nn.Parameter` that a reducer uses."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self._slot: Array | None = None
        self._view: torch.Tensor | None = None

    @property
    def data(self) -> Array:
        """Its memory."""
        return as_array(self.parameter)

    @data.setter
    def data(self, array: Array) -> None:
        self.parameter.data = as_tensor(array)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's name for its dtype."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.parameter.shape)

    @property
    def grad_slot(self) -> Array | None:
        """Its gradient's place in a bucket."""
        return self._slot

    @grad_slot.setter
    def grad_slot(self, slot: Array | None) -> None:
        self._slot, self._view = slot, None if slot is None else as_tensor(slot)

    @property
    def grad(self) -> Array | None:
        """Its gradient: the slot itself, where it is there."""
        found = self.parameter.grad
        if found is None:
            return None
        if self._view is not None and found.data_ptr() == self._view.data_ptr():
            return self._slot
        return as_array(found)

    @grad.setter
    def grad(self, array: Array | None) -> None:
        if array is not None and array is not self._slot:
            self.grad_slot = array
        self.parameter.grad = None if array is None else self._view

    def register_post_accumulate_grad_hook(self, hook: Callable[[Parameter], None]) -> Any:
        """Call ``hook`` with this one when its gradient is final."""
        return self.parameter.register_post_accumulate_grad_hook(lambda _: hook(self))


class Reducer(ArrayReducer):
    """The reducer, in torch's backward."""

    def _at_end_of_backward(self, callback: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(callback)


class Selection:
    """A module's parameters and buffers, but those that it names as to be ignored."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters and their names."""
        return [(name, each) for name, each in self._module.named_parameters() if name not in self._ignored]

    def buffers(self) -> dict[str, Array]:
        """Return the buffers' arrays by their names."""
        return {name: as_array(each) for name, each in self._module.named_buffers() if name not in self._ignored}

    def arrays(self) -> list[Array]:
        """Return the arrays of the parameters, then the buffers."""
        return [as_array(each) for _, each in self.parameters()] + list(self.buffers().values())


_Ours = parallel.DistributedDataParallel


class DistributedDataParallel(torch.nn.Module, Joinable):
    """A module of torch that every rank holds, and whose gradients are the averages over all ranks.

    Parameters
    ----------
    module : torch.nn.Module
        The model, in the host's memory. Its parameters' memory is moved side by side; their values become those of the
        first rank.
    process_group : mpiddp.ProcessGroup, optional
        The ranks; all by default. A group of torch's backend "mpiddp" has it as ``group``.
    device_ids, output_device, dim, gradient_as_bucket_view
        Accepted for compatibility.
    broadcast_buffers, init_sync, bucket_cap_mb, find_unused_parameters, static_graph
        As in `mpiddp.DistributedDataParallel`, whose other options these are too.
    bucket_cap_mb_list, forward_sync_buffers, skip_all_reduce_unused_params
        As there.

    Raises
    ------
    RuntimeError
        On every rank, if ranks hold different parameters; if there is none that requires a gradient.
    ValueError
        If a parameter is not in the host's memory; on a rank that is not in the group.

    Notes
    -----
    ``no_sync``, ``join``, ``weighted``, ``register_comm_hook``, ``register_buffer_comm_hook``, ``bucket_order`` and the
    others are those of `mpiddp.DistributedDataParallel`. Hooks see NumPy arrays.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        bucket_cap_mb_list: Sequence[float] | None = None,
        forward_sync_buffers: bool | None = None,
        skip_all_reduce_unused_params: bool = False,
    ) -> None:
        super().__init__()
        group = member(process_group, "DistributedDataParallel")
        if group is None:
            raise ValueError("DistributedDataParallel: this rank is not a member of process_group")
        self.module = module
        self.process_group = group
        self._selection = cast(Any, Selection(module))
        named = [(name, Parameter(each)) for name, each in self._selection.parameters()]
        trained: list[tuple[str, Any]] = [(name, each) for name, each in named if each.parameter.requires_grad]
        elsewhere = [name for name, each in named if not each.parameter.is_cpu]
        if elsewhere:
            raise ValueError(
                f"{elsewhere[0]} is on {dict(named)[elsewhere[0]].parameter.device}: this one reduces in the host's"
                ' memory; use torch.nn.parallel.DistributedDataParallel on init_process_group("mpiddp")'
            )
        if not trained:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a"
                " gradient."
            )
        with_buffers = broadcast_buffers is not False
        self._forward_sync_buffers = with_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._buffer_sync = BufferSync(self._selection, group)
        if init_sync:
            check_same_parameters(named, group)  # type: ignore[arg-type]
            arrays = self._selection.arrays()
            broadcast_arrays(arrays if with_buffers else arrays[: len(named)], group)
        self._reducer = Reducer(
            trained,
            group,
            caps_in_bytes(bucket_cap_mb, bucket_cap_mb_list),
            find_unused_parameters,
            static_graph,
            skip_all_reduce_unused_params,
        )
        self._reduce = True
        self._divide_by_all = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; the backward of what it returns reduces the gradients, unless under `no_sync`."""
        graded = torch.is_grad_enabled()
        self._reducer.abandon()
        reduces, syncs = self._reduce and graded, self._will_sync_buffers()
        if graded:
            self._reducer.arm(False)
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
        if reduces:
            self._announce_backward(output)
        return output

    def _announce_backward(self, output: Any) -> None:
        """Let the backward tell the reducer that it begins: by an output's gradient, or by the first parameter's."""
        self._reducer.arm()
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(lambda _: self._reducer.begin())

    def check_replicas(self) -> None:
        """Check that all ranks hold the same bits in every parameter; MismatchError on every rank where they do not."""
        named = [(name, as_array(each)) for name, each in self.module.named_parameters()]
        check_equal_values(named, self.process_group)

    def _has_sync_batchnorm(self) -> bool:
        return any(isinstance(each, torch.nn.SyncBatchNorm) for each in self.module.modules())

    # What does not look into the module is one and the same.
    no_sync = _Ours.no_sync
    weighted = _Ours.weighted
    skip_forward = _Ours.skip_forward
    register_comm_hook = _Ours.register_comm_hook
    register_buffer_comm_hook = _Ours.register_buffer_comm_hook
    join = _Ours.join
    join_hook = _Ours.join_hook
    join_process_group = _Ours.join_process_group
    logging_data = _Ours.logging_data
    bucket_order = _Ours.bucket_order
    install_bucket_order = _Ours.install_bucket_order
    detach = _Ours.detach
    timeline = _Ours.timeline
    exposed_s = _Ours.exposed_s
    bucket_sizes_bytes = _Ours.bucket_sizes_bytes
    _will_sync_buffers = _Ours._will_sync_buffers
    _sync_buffers = _Ours._sync_buffers

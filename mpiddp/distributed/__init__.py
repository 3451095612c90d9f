"""``torch.distributed`` on MPI: process groups, collectives, messages between two ranks, Python objects.

Importing it does not start MPI; `init_process_group` does. Names, arguments and results are torch's, unless a docstring
says otherwise. The calls have these arguments in common:

- Arrays are NumPy's or CuPy's, C-contiguous, aligned, in native byte order; or objects that hold such an array, as a
  Tensor does. Arrays of other libraries are taken without a copy (DLPack, buffer protocol).
- ``group`` : ProcessGroup, optional. Its ranks make the call; all ranks by default. On a rank that is no member the
  call warns and returns None, or -1 where it returns a number.
- ``src``, ``dst`` : int. A global rank. ``group_src`` and ``group_dst`` are ranks of the group instead.
- ``op`` : ReduceOp. The elementwise reduction, ``ReduceOp.SUM`` by default.
- ``async_op`` : bool. Return a `Work` at once, and leave the arrays alone until its ``wait()`` has returned.
- ``algorithm`` : str, optional. A name as in ``python -m mpiddp bench OPERATION --algorithm NAME``, equal on all ranks.
  It goes before ``MPIDDP_ALGORITHM``, which goes before the built-in table.
- ``timeout`` : timedelta, or seconds. The group's by default.
- ``device``, ``device_id``, ``device_ids``, ``pg_options``, ``backend``, ``backend_override``, ``group_desc``,
  ``group_name``, ``init_method``, ``store`` and ``use_batch`` have no effect unless a docstring describes one.

They raise:

- TypeError for an argument that is no array, and for a reduction that the dtype does not have.
- `ArrayError` for an array that cannot be sent or written to, or does not fit the other arrays of the call.
- ValueError for a rank outside of the group, for a destroyed group, and for an unknown algorithm.
- `MismatchError`, on every rank, if the ranks' calls differ in operation, size, dtype, root or reduction.
- `DistTimeoutError` after the time limit. A rank that waits inside MPI cannot raise it: the job ends with its text.
- `RankFailedError` if a rank has died and the others may go on, see `shrink_group`.
"""

from mpiddp import moved
from mpiddp.device import current_device, device_count, set_device
from mpiddp.errors import (
    ArrayError,
    DistBackendError,
    DistError,
    DistTimeoutError,
    MismatchError,
    RankFailedError,
)
from mpiddp.mpi.future import Future, collect_all, wait_all
from mpiddp.mpi.reduction import ReduceOp
from mpiddp.mpi.work import Work

from .backends import (
    Backend,
    default_pg_timeout,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from .coalescing import all_reduce_coalesced
from .collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from .device_mesh import DeviceMesh, init_device_mesh
from .groups import (
    GroupMember,
    ProcessGroup,
    get_global_rank,
    get_group_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_initialized,
)
from .init import (
    destroy_process_group,
    get_backend,
    get_backend_config,
    get_node_local_rank,
    init_process_group,
    is_available,
)
from .monitored import monitored_barrier
from .new_groups import new_group, new_subgroups, new_subgroups_by_enumeration, split_group
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .shrink import SHRINK_ABORT, SHRINK_DEFAULT, shrink_group
from .symmetric import symmetric_empty
from .trees import tree_all_reduce

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "ArrayError",
    "Backend",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistTimeoutError",
    "Future",
    "GroupMember",
    "MismatchError",
    "P2POp",
    "ProcessGroup",
    "RankFailedError",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "collect_all",
    "current_device",
    "default_pg_timeout",
    "destroy_process_group",
    "device_count",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_device",
    "shrink_group",
    "split_group",
    "symmetric_empty",
    "tree_all_reduce",
    "wait_all",
]

moved.explain(__name__)

"""``torch.distributed`` on MPI: process groups, collectives, messages between two ranks, Python objects.

To import this package does not start MPI; `init_process_group` does. Names, arguments and results are torch's, unless a
docstring says otherwise. The calls have these arguments in common:

- Arrays are NumPy's or CuPy's, C-contiguous, aligned, in native byte order; or objects that hold such an array, as a
  Tensor does. Arrays of other libraries are taken without a copy (DLPack, buffer protocol).
- ``group`` : ProcessGroup, optional. Its ranks make the call; all ranks by default. On a rank that is no member the
  call warns and returns None, or -1 where it returns a number.
- ``src``, ``dst`` : int. A global rank. ``group_src`` and ``group_dst`` are ranks of the group instead.
- ``op`` : ReduceOp. The elementwise reduction, ``ReduceOp.SUM`` by default.
- ``async_op`` : bool. Return a `Work` at once, and leave the arrays alone until its ``wait()`` has returned.
- ``algorithm`` : str, optional. A name as in ``python -m mpiddp bench OPERATION --algorithm NAME``, equal on all ranks.
  It goes before ``MPIDDP_ALGORITHM``, which goes before the built-in table.
- ``timeout`` : timedelta, or seconds. The limit of the group by default.
- ``device``, ``device_id``, ``device_ids``, ``pg_options``, ``backend``, ``backend_override``, ``group_desc``,
  ``group_name``, ``init_method``, ``store`` and ``use_batch`` have no effect unless a docstring describes one.

The calls raise:

- TypeError for an argument that is no array, and for a reduction that the dtype does not have.
- `ArrayError` for an array that cannot be sent or written to, or does not fit the other arrays of the call.
- ValueError for a rank outside of the group, for a destroyed group, and for an unknown algorithm.
- `MismatchError`, on every rank, if the ranks' calls differ in operation, size, dtype, root or reduction. The README
  of this package lists the differences that are not noticed.
- `DistTimeoutError` after the time limit. A rank that waits inside MPI can raise neither this error nor a
  MismatchError; the job prints the text and ends.
- `RankFailedError` if a rank has died and the others may go on, see `shrink_group`.
"""

from mpiddp import moved
from mpiddp.device import current_device as current_device, device_count as device_count, set_device as set_device
from mpiddp.errors import (
    ArrayError as ArrayError,
    DistBackendError as DistBackendError,
    DistError as DistError,
    DistTimeoutError as DistTimeoutError,
    MismatchError as MismatchError,
    RankFailedError as RankFailedError,
)
from mpiddp.mpi.future import Future as Future, collect_all as collect_all, wait_all as wait_all
from mpiddp.mpi.reduction import ReduceOp as ReduceOp
from mpiddp.mpi.work import Work as Work

from .backends import (
    Backend as Backend,
    default_pg_timeout as default_pg_timeout,
    is_backend_available as is_backend_available,
    is_gloo_available as is_gloo_available,
    is_mpi_available as is_mpi_available,
    is_nccl_available as is_nccl_available,
    is_torchelastic_launched as is_torchelastic_launched,
    is_ucc_available as is_ucc_available,
    is_xccl_available as is_xccl_available,
)
from .coalescing import all_reduce_coalesced as all_reduce_coalesced, tree_all_reduce as tree_all_reduce
from .collectives import (
    all_gather as all_gather,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_single as all_gather_single,
    all_reduce as all_reduce,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    broadcast as broadcast,
    gather as gather,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_single as reduce_scatter_single,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scatter as scatter,
)
from .device_mesh import DeviceMesh as DeviceMesh, init_device_mesh as init_device_mesh
from .groups import (
    GroupMember as GroupMember,
    ProcessGroup as ProcessGroup,
    get_global_rank as get_global_rank,
    get_group_rank as get_group_rank,
    get_pg_count as get_pg_count,
    get_process_group_ranks as get_process_group_ranks,
    get_rank as get_rank,
    get_world_size as get_world_size,
    group as group,
    is_initialized as is_initialized,
)
from .init import (
    destroy_process_group as destroy_process_group,
    get_backend as get_backend,
    get_backend_config as get_backend_config,
    get_node_local_rank as get_node_local_rank,
    init_process_group as init_process_group,
    is_available as is_available,
)
from .monitored import monitored_barrier as monitored_barrier
from .new_groups import (
    new_group as new_group,
    new_subgroups as new_subgroups,
    new_subgroups_by_enumeration as new_subgroups_by_enumeration,
    split_group as split_group,
)
from .objects import (
    all_gather_object as all_gather_object,
    broadcast_object_list as broadcast_object_list,
    gather_object as gather_object,
    recv_object_list as recv_object_list,
    scatter_object_list as scatter_object_list,
    send_object_list as send_object_list,
)
from .p2p import (
    P2POp as P2POp,
    batch_isend_irecv as batch_isend_irecv,
    irecv as irecv,
    isend as isend,
    recv as recv,
    send as send,
)
from .shrink import SHRINK_ABORT as SHRINK_ABORT, SHRINK_DEFAULT as SHRINK_DEFAULT, shrink_group as shrink_group
from .symmetric import symmetric_empty as symmetric_empty

moved.explain(__name__)

"""A torch process group that communicates through mpiddp.

``torch.distributed`` and torch's C++ call these methods, named as torch's functions; each lends its tensors to one
public function of mpiddp. A call that need not be asynchronous returns None: it is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from mpiddp import distributed as mpiddp
from mpiddp.mpi import recorder
from mpiddp.typing import Array

from . import cuda
from .arrays import Loan, is_plain
from .errors import translate, translated
from .symmetric import symmetric_empty
from .work import Work

Tensors = Sequence[torch.Tensor]

recorder.add_library(str(Path(torch.__file__).parent))  # the flight recorder shows the program's lines, not torch's

_OPS = {
    getattr(ReduceOp.RedOpType, name): getattr(mpiddp.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def _reduction(opts: Any) -> mpiddp.ReduceOp:
    """Return an option's reduction; SUM without options."""
    if opts is None:
        return mpiddp.ReduceOp.SUM
    op = opts.reduceOp
    return _OPS.get(op.op) or mpiddp.ReduceOp.PREMUL_SUM(float(op.__getstate__()[1]))


_NO_TIMEOUT_OF_ITS_OWN = default_pg_timeout.total_seconds()


def _seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None for torch's default or none at all.

    A call with one goes through mpiddp's queue, and raises; else mpiddp waits where waiting is shortest, and ends the
    job when the group's own 30 minutes are over.
    """
    found = None if timeout is None else timeout.total_seconds()
    return found if found is not None and 0 < found != _NO_TIMEOUT_OF_ITS_OWN else None


class Operations:
    """torch's communicating calls in a group of mpiddp; ``close`` takes the group when torch destroys its own."""

    def __init__(
        self, group: mpiddp.ProcessGroup, timeout: timedelta, close: Callable[[mpiddp.ProcessGroup], None]
    ) -> None:
        self.group = group
        self._close = close
        self.timeout = timeout
        self._timeout_s = _seconds(timeout)
        self._calls = 0
        self._coalesced: list[Work] | None = None

    # ---- names, and the little that torch asks a backend about

    def getBackendName(self) -> str:  # noqa: N802
        return "mpiddp"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory that the ranks of a node share; all ranks call it alike."""
        return symmetric_empty(size, dtype, self.group)

    @property
    def supports_splitting(self) -> bool:
        """False: torch must not split the group itself, but call ``new_group``."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """True: messages may be sent between `start_coalescing` and `end_coalescing`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout, self._timeout_s = timeout, _seconds(timeout)

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        """End the group; all its ranks call it."""
        if not self.group.link.closed:
            with translated():
                self._close(self.group)

    def abort(self) -> None:
        """Give the group up without the other ranks; nothing is freed before the program ends."""

    # ---- how every call is made

    def _call(
        self,
        function: Callable[..., mpiddp.Work | None],
        arguments: tuple[Any, ...],
        outputs: Tensors,
        loan: Loan,
        options: Any,
        **named: Any,
    ) -> Work | None:
        """Call a function of mpiddp, and return torch's Work, or None where the call is over."""
        return self._calls_of(function, [arguments], outputs, loan, options, **named)

    def _calls_of(
        self,
        function: Callable[..., mpiddp.Work | None],
        calls: Sequence[tuple[Any, ...]],
        outputs: Tensors,
        loan: Loan,
        options: Any,
        timeout_s: float | None = None,
        **named: Any,
    ) -> Work | None:
        """Make several calls of one function, which end as one."""
        calls = self._sum_integers(calls, named, loan)
        if loan.device is not None:
            place, loan.device = loan.device, None
            with cuda.on_stream(place):
                return self._calls_of(function, calls, outputs, loan, options, timeout_s, **named)
        self._calls += len(calls)
        limit_s = timeout_s or self._timeout_s
        try:
            if limit_s is None and options is not None and not options.asyncOp and self._coalesced is None:
                for arguments in calls:
                    function(*arguments, group=self.group, **named)
                loan.give_back()
                return None
            works = [function(*arguments, group=self.group, async_op=True, **named) for arguments in calls]
        except mpiddp.DistError as error:
            raise translate(error) from error
        return self._submitted(Work(works, outputs, loan, limit_s))  # type: ignore[arg-type]

    def _sum_integers(self, calls: Sequence[tuple[Any, ...]], named: dict[str, Any], loan: Loan) -> Sequence[Any]:
        """Turn an AVG of integers into a SUM that the loan divides; the first argument is the output."""
        average, total, rank = mpiddp.ReduceOp.AVG, mpiddp.ReduceOp.SUM, self.group.rank()
        given = (named.get("op"), *(calls[0] if calls else ()))
        if all(each is not average for each in given) or calls[0][0].dtype.kind not in "iu":
            return calls
        if named.get("group_dst", rank) == rank:
            for arguments in calls:
                loan.divide(arguments[0], self.group.size())
        if "op" in named:
            named["op"] = total
        return [tuple(total if each is average else each for each in arguments) for arguments in calls]

    def _submitted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def end_coalescing(self, device: Any = None) -> Work:
        """Return one Work for what has been submitted since `start_coalescing`."""
        collected, self._coalesced = self._coalesced or [], None
        return Work(collected, [each for work in collected for each in work.result()], Loan())

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # ---- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work | None:
        tensor, op = tensors[0], _reduction(opts)
        if (
            self._timeout_s is None
            and opts is not None
            and not opts.asyncOp
            and is_plain(tensor)
            and op is not mpiddp.ReduceOp.AVG
        ):
            # `_call` in half the time, which is felt at 8 bytes.
            self._calls += 1
            try:
                mpiddp.all_reduce((tensor.detach() if tensor.requires_grad else tensor).numpy(), op, self.group)
            except mpiddp.DistError as error:
                raise translate(error) from error
            return None
        if tensor.is_sparse:
            with translated():
                _all_reduce_sparse(tensor, op, self.group)
            return self._submitted(Work([], tensors, Loan()))
        loan = Loan()
        return self._call(mpiddp.all_reduce, (loan.output(tensor), op), tensors, loan, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        loan, op = Loan(), _reduction(opts)
        return self._calls_of(mpiddp.all_reduce, [(loan.output(each), op) for each in tensors], tensors, loan, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, tensor = Loan(), tensors[opts.rootTensor]
        root = opts.rootRank
        x = loan.input(tensor, moved=True) if root == self.group.rank() else loan.output(tensor, moved=True)
        return self._call(mpiddp.broadcast, (x,), tensors, loan, opts, group_src=root)

    def reduce(self, tensors: Tensors, opts: Any) -> Work | None:
        loan, tensor = Loan(), tensors[opts.rootTensor]
        root = opts.rootRank
        x = loan.output(tensor) if root == self.group.rank() else loan.input(tensor)
        return self._call(mpiddp.reduce, (x,), tensors, loan, opts, group_dst=root, op=_reduction(opts))

    def barrier(self, opts: Any = None) -> Work | None:
        return self._call(mpiddp.barrier, (), (), Loan(), opts, timeout_s=_seconds(getattr(opts, "timeout", None)))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        with translated():
            mpiddp.monitored_barrier(self.group, getattr(timeout, "timeout", timeout), wait_all_ranks)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> Work | None:
        return self.allgather_coalesced(list(zip(*output_tensors, strict=True)), input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: Any = None
    ) -> Work | None:
        """``output_lists[rank][index]``."""
        loan, calls, outputs = Loan(), [], []
        for index, tensor in enumerate(input_list):
            mine = [each[index] for each in output_lists]
            calls.append(([loan.output(each, moved=True) for each in mine], loan.input(tensor, moved=True)))
            outputs += mine
        return self._calls_of(mpiddp.all_gather, calls, outputs, loan, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Make several calls that end as one."""
        loan = Loan()
        pairs = zip(outputs, inputs, strict=True)
        calls = [(loan.output(output, moved=True), loan.input(each, moved=True)) for output, each in pairs]
        return self._calls_of(mpiddp.all_gather_single, calls, outputs, loan, opts)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any) -> Work | None:
        loan, mine = Loan(), output_tensors[0] if output_tensors else []
        lists = [loan.output(each, moved=True) for each in mine] if mine else None
        x = loan.input(input_tensors[0], moved=True)
        return self._call(mpiddp.gather, (x, lists), mine, loan, opts, group_dst=opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan = Loan()
        lists = [loan.input(each, moved=True) for each in input_tensors[0]] if input_tensors else None
        x = loan.output(output_tensors[0], moved=True)
        return self._call(mpiddp.scatter, (x, lists), output_tensors, loan, opts, group_src=opts.rootRank)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> Work | None:
        loan = Loan()
        inputs = [loan.input(each) for each in input_tensors[0]]
        x = loan.output(output_tensors[0])
        return self._call(mpiddp.reduce_scatter, (x, inputs, _reduction(opts)), output_tensors, loan, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work | None:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Make several calls that end as one."""
        loan, op = Loan(), _reduction(opts)
        pairs = zip(outputs, inputs, strict=True)
        calls = [(loan.output(output), loan.input(each), op) for output, each in pairs]
        return self._calls_of(mpiddp.reduce_scatter_single, calls, outputs, loan, opts)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work | None:
        loan = Loan()
        outputs = [loan.output(each, moved=True) for each in output_tensors]
        inputs = [loan.input(each, moved=True) for each in input_tensors]
        return self._call(mpiddp.all_to_all, (outputs, inputs), output_tensors, loan, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work | None:
        loan = Loan()
        outputs = self._parts(loan.output(output, moved=True), output, output_split_sizes)
        inputs = self._parts(loan.input(input, moved=True), input, input_split_sizes)
        return self._call(mpiddp.all_to_all, (outputs, inputs), (output,), loan, opts)

    def _parts(self, flat: Array, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[Array]:
        """Cut an array into the parts of the ranks: so many rows of the tensor each."""
        rows, size = tensor.shape[0] if tensor.ndim else 1, self.group.size()
        if not splits:
            if rows % size:
                raise ValueError(f"Tensor's dim 0 ({rows}) does not divide equally across group size {size}")
            splits = [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise ValueError(f"Split sizes {list(splits)} doesn't match total dim 0 size {rows} of {size} ranks")
        length, parts, start = flat.size // rows if rows else 0, [], 0
        for split in splits:
            parts.append(flat[start * length : (start + split) * length])
            start += split
        return parts

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """``dst`` is a rank of the group."""
        loan = Loan()
        return self._message(mpiddp.isend, loan.input(tensors[0], moved=True), tensors, loan, tag, group_dst=dst)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """``src`` is a rank of the group."""
        loan = Loan()
        return self._message(mpiddp.irecv, loan.output(tensors[0], moved=True), tensors, loan, tag, group_src=src)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        loan = Loan()
        return self._message(mpiddp.irecv, loan.output(tensors[0], moved=True), tensors, loan, tag)

    def _message(self, function: Any, x: Array, tensors: Tensors, loan: Loan, tag: int, **peer: int) -> Work:
        with translated(), contextlib.nullcontext() if loan.device is None else cuda.on_stream(loan.device):
            work = function(x, group=self.group, tag=tag, **peer)
        return self._submitted(Received([work], tensors, loan, self._timeout_s, self.group))

    # ---- older names

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_sparse = allreduce


class ProcessGroup(Operations, torch.distributed.ProcessGroup):
    """A group of mpiddp's as one of torch's.

    Since 2.15 torch also takes a Backend (`backend.Backend`), which this group has; but it hides a Backend's Works
    behind objects that can be waited for and not be asked.
    """

    def __init__(
        self, group: mpiddp.ProcessGroup, timeout: timedelta, close: Callable[[mpiddp.ProcessGroup], None]
    ) -> None:
        torch.distributed.ProcessGroup.__init__(self, group.rank(), group.size())
        Operations.__init__(self, group, timeout, close)
        self._name = self._description = ""
        self._backend: Any = None

    def own(self, backend: Any) -> None:
        """Take the Backend that torch's tools ask for."""
        self._backend = backend
        kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
        for device in self._device_types:
            self._register_backend(device, kind, backend)
        self._set_default_backend(kind)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in ("cpu", "cuda") if each == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend or self


class Received(Work):
    """A message; knows its sender by its rank in the group."""

    def __init__(
        self,
        works: Sequence[mpiddp.Work],
        tensors: Tensors,
        loan: Loan,
        timeout_s: float | None,
        group: mpiddp.ProcessGroup,
    ) -> None:
        super().__init__(works, tensors, loan, timeout_s)
        self._group = group

    def source_rank(self) -> int:
        return self._group.group_rank(super().source_rank())

    _source_rank = source_rank


def _all_reduce_sparse(tensor: torch.Tensor, op: mpiddp.ReduceOp, group: mpiddp.ProcessGroup) -> None:
    """Sum sparse tensors: every rank gets all indices and values."""
    if op is not mpiddp.ReduceOp.SUM:
        raise TypeError(f"sparse tensors can be reduced by SUM only, got {op}")
    mine = tensor.detach().coalesce()
    parts: list[Any] = [None] * group.size()
    mpiddp.all_gather_object(parts, (mine.indices().cpu().numpy(), mine.values().cpu().numpy()), group)
    indices = torch.cat([torch.from_numpy(part) for part, _ in parts], dim=1)
    values = torch.cat([torch.from_numpy(part) for _, part in parts])
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, device=tensor.device)
    with torch.no_grad():  # a detached one would get indices and values of its own
        tensor.copy_(total.coalesce())

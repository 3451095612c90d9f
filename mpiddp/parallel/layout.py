"""The layout: which bucket holds whose gradient. It follows the order in which gradients come.

Imports `plan`, which says who shares a bucket, and `bucket`, which makes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiddp.distributed import ProcessGroup, broadcast
from mpiddp.typing import Array

from .bucket import GradBucket, ParameterLike, lay_out
from .plan import DEFAULT_CAP_BYTES, plan

_logger = logging.getLogger("mpiddp")


class Place(NamedTuple):
    """Where a gradient is born."""

    bucket: GradBucket
    slot: Array


class Layout:
    """Some parameters' places in buckets.

    Parameters
    ----------
    parameters : sequence of Parameter
        In the order of registration, which numbers them; the same on all ranks.
    group : ProcessGroup
        The ranks. Making a layout, and whatever changes it, is collective over them.
    caps_bytes : sequence of int, optional
        See `mpiddp.parallel.plan.plan`.

    Attributes
    ----------
    order : list of int
        The parameters in the order in which their gradients are expected; the reverse of registration at first.
    buckets : list of GradBucket
        In the order in which they are sent.
    places : list of Place
        By the parameter's number.
    settled : bool
        Whether the order is there to stay.
    """

    def __init__(
        self, parameters: Sequence[ParameterLike], group: ProcessGroup, caps_bytes: Sequence[int] | None = None
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._caps_bytes = caps_bytes
        self._rebuilt = False
        self.settled = False
        self._arrange(list(reversed(range(len(parameters)))))

    def install_order(self, order: Sequence[int]) -> None:
        """Follow a known order from the start.

        Raises
        ------
        ValueError
            If it does not name each parameter once.
        """
        if sorted(order) != list(range(len(self._parameters))):
            raise ValueError(
                f"the order of buckets has to name each of {len(self._parameters)} trained parameters once, got"
                f" {len(order)} numbers: it is that of another model, or of one with other parameters frozen"
            )
        self._follow(list(order))
        self.settled = True

    def settle(self, order_here: Sequence[int] | None = None) -> None:
        """Follow for good the order in which gradients came on the first rank; None: the one that was expected."""
        if order_here is not None:
            agreed = np.array(order_here, dtype=np.int64)
            broadcast(agreed, group=self._group, group_src=0)
            self._follow(agreed.tolist())
        self.settled = True

    def _follow(self, order: list[int]) -> None:
        """Make buckets for gradients that come in ``order``, where they are not those that there are."""
        if list(map(set, self._plan(order))) != list(map(set, self._plan(self.order))):
            self._arrange(order)
            self._rebuilt = True
            if self._group.rank() == 0:
                _logger.info("buckets follow the order of gradients from now on: %s bytes", self.bucket_sizes_bytes())

    def _arrange(self, order: list[int]) -> None:
        """Lay the parameters out in buckets for gradients that come in ``order``."""
        chosen = self._plan(order)
        self.order = order
        self.buckets = lay_out([[self._parameters[index] for index in members] for members in chosen], self._group)
        places = {
            index: Place(bucket, slot)
            for members, bucket in zip(chosen, self.buckets, strict=True)
            for index, slot in zip(members, bucket.gradients(), strict=True)
        }
        self.places = [places[index] for index in range(len(places))]

    def _plan(self, order: list[int]) -> list[list[int]]:
        sizes = [parameter.data.nbytes for parameter in self._parameters]
        kinds = [parameter.dtype for parameter in self._parameters]
        return plan(order, sizes, kinds, self._caps_bytes)

    def bucket_sizes_bytes(self) -> list[int]:
        """Return the size of each bucket."""
        return [bucket.buffer().nbytes for bucket in self.buckets]

    def logging_data(self) -> dict[str, Any]:
        """Return what is to know of parameters and buckets, under torch's names."""
        data: dict[str, Any] = {
            "dtypes": ", ".join(dict.fromkeys(str(parameter.dtype) for parameter in self._parameters)),
            "total_parameter_size_bytes": sum(parameter.data.nbytes for parameter in self._parameters),
            "num_parameter_tensors": len(self._parameters),
            "bucket_cap_bytes": DEFAULT_CAP_BYTES if self._caps_bytes is None else self._caps_bytes[-1],
            "bucket_sizes": ", ".join(map(str, self.bucket_sizes_bytes())),
            "has_rebuilt_buckets": self._rebuilt,
        }
        if self._rebuilt:
            data["rebuilt_bucket_sizes"] = data["bucket_sizes"]
            members = self._plan(self.order)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, bucket)) for bucket in members)
        return data

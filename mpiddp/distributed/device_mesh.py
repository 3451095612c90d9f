"""Device meshes: ranks as an array of several dimensions, with a process group along each dimension.

The mesh that a program makes is the root of its slices. The dimensions of a slice are axes of the root.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .groups import ProcessGroup, default_group, get_rank, is_initialized
from .init import init_process_group
from .new_groups import agree, checked_ranks, maker, split

Names: TypeAlias = tuple[str, ...]


def _checked_names(names: Sequence[str] | None, ndim: int) -> Names | None:
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else tuple(names)
    if len(set(given)) != len(given):
        raise RuntimeError(f"Each mesh_dim_name must be unique. Found repeated mesh_dim_name in mesh_dim_names {given}")
    if len(given) != ndim:
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! Found len(mesh_dim_names):"
            f" {len(given)} and len(mesh_shape): {ndim}."
        )
    return given


class DeviceMesh:
    """Ranks as an array of several dimensions.

    Ranks that differ in one coordinate only form a group. A rank's number in the group is this coordinate; in torch the
    numbers are in the order of the global ranks. All ranks of the default group make a mesh together, also ranks that
    are not in it. `init_process_group` is called if the program has not called it. Slices need no communication.

    Parameters
    ----------
    device_type : {"cpu", "cuda"}
        Without effect: an array knows its device.
    mesh : array_like of int
        Distinct global ranks. The attribute ``mesh`` of a slice has the ranks of this rank's slice.
    mesh_dim_names : sequence of str, optional
        A name for each dimension.

    Raises
    ------
    RuntimeError
        If the names do not fit, the mesh has more ranks than the default group, or ``device_type`` is another one.
    TypeError, ValueError
        If ``mesh`` is no array of integers; if a rank is repeated, or not in the default group.

    Examples
    --------
    >>> mesh = dist.DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("dp", "tp"))
    >>> mesh["tp"].get_local_rank() == 1 - dist.get_rank()
    True
    """

    device_type: str
    mesh: np.ndarray[Any, np.dtype[np.int64]]
    mesh_dim_names: Names | None
    _groups: list[ProcessGroup]
    """This rank's group along each dimension; empty on a rank outside of the mesh."""

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        if device_type not in ("cpu", "cuda"):
            raise RuntimeError(
                f'device_type must be "cpu" or "cuda", without a number, got {device_type!r}: an array says itself'
                " where it lies"
            )
        ranks = np.array(mesh)
        if ranks.dtype.kind not in "iu" or ranks.ndim == 0 or ranks.size == 0:
            raise TypeError(f"a mesh is an array of ranks of at least one dimension, got {mesh!r}")
        names = _checked_names(mesh_dim_names, ranks.ndim)
        if not is_initialized():
            init_process_group()
        size = default_group().size()
        if ranks.size > size:
            raise RuntimeError(
                f"Mesh should not be bigger than default world size {size}, but found {ranks.size} ranks!"
            )
        checked_ranks(ranks.reshape(-1).tolist(), size)
        self.device_type, self.mesh, self.mesh_dim_names = device_type, ranks.astype(np.int64), names
        self._root, self._axes = self, tuple(range(ranks.ndim))
        agree(default_group(), "init_device_mesh", (ranks.tolist(), names))
        made = [self._make_group(axis) for axis in self._axes]
        self._groups = [group for group in made if group is not None]

    def _rows(self, axes: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return all slices of the root mesh along some axes, of shape (number of slices, *shape of a slice)."""
        ranks = self._root.mesh
        rest = [axis for axis in range(ranks.ndim) if axis not in axes]
        return ranks.transpose(*rest, *axes).reshape(-1, *(ranks.shape[axis] for axis in axes))

    def _make_group(self, axis: int) -> ProcessGroup | None:
        parts = self._rows((axis,)).tolist()
        parent = default_group()
        if parts == [list(range(parent.size()))]:
            return parent
        described = self.mesh_dim_names[axis] if self.mesh_dim_names else f"dim_{axis}"
        return split(parent, parts, "init_device_mesh", maker(parent, None, None, f"mesh_{described}"))

    def _part(self, axes: tuple[int, ...], names: Names, groups: list[ProcessGroup]) -> "DeviceMesh":
        """Return the slice that this rank is in; on a rank outside of the root mesh, the first slice."""
        rows = self._rows(axes)
        mine = np.argwhere(rows == get_rank())
        part = DeviceMesh.__new__(DeviceMesh)
        part.device_type, part.mesh, part.mesh_dim_names = self.device_type, rows[mine[0][0] if len(mine) else 0], names
        part._root, part._axes, part._groups = self._root, axes, groups
        return part

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> "DeviceMesh":
        """Return this rank's slice along named dimensions, as ``mesh["dp", "tp"]``."""
        if not self.mesh_dim_names:
            raise RuntimeError("Cannot slice a DeviceMesh without mesh_dim_names!")
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self.mesh_dim_names:
            return self
        if not names or len(set(names)) != len(names) or not set(names) <= set(self.mesh_dim_names):
            valid = list(self.mesh_dim_names)
            raise KeyError(f"Invalid mesh_dim_names {names} specified. Valid mesh_dim_names are {valid}.")
        dims = [self.mesh_dim_names.index(name) for name in names]
        groups = [self._groups[dim] for dim in dims] if self._groups else []
        return self._part(tuple(self._axes[dim] for dim in dims), names, groups)

    def _dim(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(
                    f"Found the DeviceMesh have {self.ndim} dimensions. Optional kwarg `mesh_dim` needs to be specified"
                    " when device_mesh.ndim > 1."
                )
            return 0
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self.mesh_dim_names or ()):
                raise KeyError(
                    f"Mesh dimension '{mesh_dim}' does not exist. Available mesh dimensions are:"
                    f" mesh_dim_names={self.mesh_dim_names}"
                )
            return (self.mesh_dim_names or ()).index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"a mesh of {self.ndim} dimensions has no dimension {mesh_dim}")
        return mesh_dim % self.ndim

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's group along a dimension.

        ``mesh_dim`` is a number or a name. It may be None for a mesh of one dimension; otherwise None is a
        RuntimeError. A rank that is not in the mesh gets a RuntimeError, too.
        """
        dim = self._dim(mesh_dim)
        if not self._groups:
            raise RuntimeError(f"rank {get_rank()} is not in {self}: it has no group there")
        return self._groups[dim]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's groups, one for each dimension."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks in the whole mesh, or along a dimension."""
        return int(self.mesh.size if mesh_dim is None else self.mesh.shape[self._dim(mesh_dim)])

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(self.mesh.shape)

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return get_rank()

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this process's rank in the group that `get_group` returns."""
        return self.get_group(mesh_dim).rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinates in the mesh; None on a rank outside of it."""
        coordinates = np.argwhere(self.mesh == get_rank())
        return tuple(coordinates[0].tolist()) if len(coordinates) else None

    def __repr__(self) -> str:
        lengths = ", ".join(f"{name}={n}" for name, n in zip(self.mesh_dim_names or (), self.shape, strict=False))
        shape = f"({lengths})" if lengths else repr(self.shape)
        return f"DeviceMesh({shape}, {self.device_type!r}, {self.mesh.tolist()})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: object = None,
) -> "DeviceMesh":
    """Arrange the first ranks in a mesh, in row-major order: as many as the product of ``mesh_shape``.

    ``device_type``, ``mesh_dim_names`` and the errors are those of `DeviceMesh`; ``backend_override`` has no effect.

    Examples
    --------
    >>> mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh["tp"].get_local_rank() == dist.get_rank()
    True
    >>> x = np.ones(1)
    >>> dist.all_reduce(x, group=mesh.get_group("tp"))
    >>> x.item()
    2.0
    """
    ranks = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)

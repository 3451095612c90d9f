"""Device meshes: coordinates, groups, slices, flattening, errors; against torch's where torch is installed."""

import itertools

import numpy as np
import pytest

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("anew")]


def factorizations(size: int) -> list[tuple[int, ...]]:
    """Return all shapes of up to three dimensions with ``size`` places."""
    shapes = [s for ndim in (1, 2, 3) for s in itertools.product(range(1, size + 1), repeat=ndim)]
    return [shape for shape in shapes if np.prod(shape) == size]


def members(group) -> list[int]:
    """Return the ranks that an all_gather in the group finds, in its order."""
    found = [np.zeros(1, int) for _ in range(group.size())]
    dist.all_gather(found, np.array([dist.get_rank()]), group=group)
    return [int(each[0]) for each in found]


def test_groups_are_the_rows_along_each_dimension(world):
    for shape in factorizations(world.size):
        mesh = dist.init_device_mesh("cpu", shape)
        assert mesh.shape == shape and mesh.ndim == len(shape) and mesh.size() == world.size
        assert mesh.mesh.tolist() == np.arange(world.size).reshape(shape).tolist()
        place = mesh.get_coordinate()
        assert mesh.mesh[place] == world.rank == mesh.get_rank()
        for dim in range(len(shape)):
            row = mesh.mesh[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
            assert members(mesh.get_group(dim)) == row == list(mesh.get_group(dim).ranks)
            assert mesh.get_local_rank(dim) == place[dim]
            assert mesh.size(dim) == shape[dim]
        assert mesh.get_all_groups() == [mesh.get_group(dim) for dim in range(len(shape))]


def test_a_dimension_of_all_ranks_is_the_default_group(world):
    before = dist.get_pg_count()
    mesh = dist.init_device_mesh("cuda", (world.size,), mesh_dim_names=("dp",))
    assert mesh.get_group() is mesh.get_group("dp") is mesh["dp"].get_group(0) is dist.group.WORLD
    assert dist.get_pg_count() == before
    assert mesh.device_type == "cuda"


def test_slices(world):
    for shape in factorizations(world.size):
        names = ("pp", "dp", "tp")[: len(shape)]
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        before = dist.get_pg_count()
        place = dict(zip(names, mesh.get_coordinate(), strict=True))
        for count in range(1, len(names) + 1):
            for chosen in itertools.permutations(names, count):
                part = mesh[chosen]
                assert part.mesh_dim_names == chosen
                rest = tuple(slice(None) if name in chosen else place[name] for name in names)
                kept = [name for name in names if name in chosen]
                assert np.array_equal(part.mesh, mesh.mesh[rest].transpose([kept.index(name) for name in chosen]))
                assert part.get_coordinate() == tuple(place[name] for name in chosen)
                for name in chosen:
                    assert part.get_group(name) is mesh.get_group(name)
                    assert part[name].get_local_rank() == place[name]
        assert mesh[names] is mesh
        assert dist.get_pg_count() == before


def test_any_order_of_ranks(world):
    order = list(range(world.size))[::-1]
    mesh = dist.DeviceMesh("cpu", [order], mesh_dim_names=("a", "b"))
    assert members(mesh.get_group("b")) == order
    assert mesh.get_local_rank("b") == order.index(world.rank)
    assert mesh.get_coordinate() == (0, order.index(world.rank))


@pytest.mark.mpi(min_size=2)
def test_some_of_the_ranks(world):
    inside = list(range(1, world.size))
    mesh = dist.DeviceMesh("cpu", np.array([inside]), mesh_dim_names=("dp", "tp"))
    assert mesh.shape == (1, world.size - 1)
    if world.rank == 0:
        assert mesh.get_coordinate() is None and mesh["tp"].get_coordinate() is None
        for ask in (mesh.get_group, mesh.get_local_rank, mesh["tp"].get_group):
            with pytest.raises(RuntimeError, match="rank 0 is not in DeviceMesh"):
                ask("tp")
    else:
        assert members(mesh.get_group("tp")) == inside
        assert mesh.get_local_rank("tp") == world.rank - 1
    first = dist.init_device_mesh("cpu", (world.size - 1,))
    assert first.mesh.tolist() == list(range(world.size - 1)) and first.size() == world.size - 1


def test_errors(world):
    size = world.size
    wrong = [
        (("cpu", (size + 1,)), {}, RuntimeError, "should not be bigger"),
        (("cpu", (0,)), {}, TypeError, "array of ranks"),
        (("cpu", ()), {}, TypeError, "array of ranks"),
        (("cpu", (size, 1)), {"mesh_dim_names": ("a", "a")}, RuntimeError, "must be unique"),
        (("cpu", (size, 1)), {"mesh_dim_names": ("a",)}, RuntimeError, "should have same length"),
        (("cuda:0", (size,)), {}, RuntimeError, "without a number"),
    ]
    for args, kwargs, kind, text in wrong:
        with pytest.raises(kind, match=text):
            dist.init_device_mesh(*args, **kwargs)
    if size > 1:
        with pytest.raises(ValueError, match="distinct"):
            dist.DeviceMesh("cpu", [0, 0])
    with pytest.raises(ValueError, match="within the world_size"):
        dist.DeviceMesh("cpu", [size])
    for mesh in (3, [], [0.5]):
        with pytest.raises(TypeError, match="array of ranks"):
            dist.DeviceMesh("cpu", mesh)
    mesh = dist.init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
    for ask in (mesh.get_group, mesh.get_local_rank):
        with pytest.raises(RuntimeError, match="mesh_dim"):
            ask()
        with pytest.raises(KeyError, match="'c' does not exist"):
            ask("c")
        with pytest.raises(IndexError, match="no dimension 2"):
            ask(2)
    for names in ("c", ("a", "c"), ("a", "a"), ()):
        with pytest.raises(KeyError, match="Invalid mesh_dim_names"):
            mesh[names]
    plain = dist.init_device_mesh("cpu", (size,))
    with pytest.raises(RuntimeError, match="without mesh_dim_names"):
        plain["a"]
    assert repr(mesh) == f"DeviceMesh((a={size}, b=1), 'cpu', {np.arange(size).reshape(size, 1).tolist()})"


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(world):
    mine = {"shape": (1, world.size), "names": ("a", "b")}
    for other in ({"shape": (world.size, 1)}, {"names": ("b", "a")}):
        given = mine | (other if world.rank else {})
        with pytest.raises(dist.MismatchError, match="init_device_mesh with"):
            dist.init_device_mesh("cpu", given["shape"], mesh_dim_names=given["names"])

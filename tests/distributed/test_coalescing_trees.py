"""Trees of arrays: containers, dtypes, layouts, arrays that cannot be written to."""

import collections

import numpy as np
import pytest

import mpiddp as dist

pytestmark = pytest.mark.mpi

Point = collections.namedtuple("Point", "x y")


def same(a, b) -> bool:
    """Compare trees, with the classes of containers and leaves, dtypes and shapes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return a == b


def tree_of(factor):
    strided = np.arange(6.0).reshape(2, 3).T * factor
    return {
        "w": [np.ones((2, 3), np.float32) * factor, (np.full(4, 2 * factor), np.array(factor))],
        "point": Point(np.arange(3) * factor, None),
        "ordered": collections.OrderedDict(b=np.empty((0, 2)), a=strided),
        3: {"loss": 0.5 * factor, "n": 2 * factor, "scalar": np.float32(factor)},
        "default": collections.defaultdict(list, a=np.ones(2) * factor),
        "none": None,
        "empty": [(), {}, []],
        "half": np.full(3, factor, np.float16),
    }


def test_containers_and_dtypes(world):
    tree = tree_of(world.rank + 1)
    result = dist.tree_all_reduce(tree)
    assert same(result, tree_of(sum(range(1, world.size + 1))))
    assert same(tree, tree_of(world.rank + 1)), "the input has changed"
    assert result["default"].default_factory is list
    result["w"][0][...] = 7
    assert same(tree, tree_of(world.rank + 1)), "the result shares the input's memory"


def test_keys_in_another_order(world):
    keys = ["a", "b", "c"] if world.rank == 0 else ["c", "a", "b"]
    values = {"a": 1.0, "b": 10.0, "c": 100.0}
    result = dist.tree_all_reduce({key: np.array([values[key]]) for key in keys})
    assert list(result) == keys
    assert all(result[key] == world.size * values[key] for key in keys)


def test_operations_and_groups(world):
    tree = [np.array([float(world.rank)]), world.rank]
    assert same(dist.tree_all_reduce(tree, dist.ReduceOp.MAX), [np.array([world.size - 1.0]), world.size - 1])
    group = dist.new_group([0])
    if world.rank == 0:
        assert same(dist.tree_all_reduce(tree, group=group), tree)
        dist.destroy_process_group(group)
    else:
        with pytest.warns(UserWarning, match="Running tree_all_reduce"):
            assert dist.tree_all_reduce(tree, group=group) is None
    with pytest.raises(TypeError, match="floating dtype"):
        dist.tree_all_reduce([1], dist.ReduceOp.AVG)


def test_one_array_and_nothing(world):
    assert dist.tree_all_reduce(np.float64(1)) == world.size
    assert dist.tree_all_reduce(np.ones(2)).tolist() == [world.size] * 2
    assert dist.tree_all_reduce({}) == {} and dist.tree_all_reduce(None) is None


def test_a_leaf_is_an_array(world):
    for wrong in ("text", {1, 2}, object(), np.array([None])):
        with pytest.raises(TypeError, match="tree"):
            dist.tree_all_reduce({"a": wrong})


def test_jax(world):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import jax.numpy as jnp

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten(self):
            return (self.a, self.b), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    x = jnp.arange(3.0)
    tree = {"pair": Pair(x, [jnp.ones((), jnp.bfloat16), None]), "host": np.ones(2)}
    result = dist.tree_all_reduce(tree)
    assert jax.tree_util.tree_structure(result) == jax.tree_util.tree_structure(tree)
    pair = result["pair"]
    assert isinstance(pair.a, jax.Array) and pair.a.tolist() == [0, world.size, 2 * world.size]
    assert pair.b[0].dtype == jnp.bfloat16 and float(pair.b[0]) == world.size
    assert type(result["host"]) is np.ndarray
    assert x.tolist() == [0, 1, 2]

    def loss(w, batch):
        return jnp.mean((batch @ w) ** 2)

    batches = np.random.default_rng(0).standard_normal((world.size, 4, 3)).astype(np.float32)
    w = jnp.ones(3)
    mean = dist.tree_all_reduce(jax.grad(loss)(w, batches[world.rank]), dist.ReduceOp.AVG)
    np.testing.assert_allclose(mean, jax.grad(loss)(w, batches.reshape(-1, 3)), rtol=1e-5)
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(dist.tree_all_reduce)(x)


OTHER_TREES = {
    "keys": ({"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 2.0}),
    "shapes": ([np.ones((2, 3))], [np.ones((3, 2))]),
    "cuts": ([np.ones(2), np.ones(4)], [np.ones(4), np.ones(2)]),
    "containers": ([1.0, 2.0], (1.0, 2.0)),
    "nesting": ([[1.0], 2.0], [1.0, [2.0]]),
    "dtypes": ([1.0, np.float32(2)], [np.float32(1), 2.0]),
    "long": ([np.ones((2, 100_000))], [np.ones((100_000, 2))]),
}


@pytest.mark.parametrize("name", OTHER_TREES)
@pytest.mark.mpi(min_size=2)
def test_other_trees_on_the_ranks(world, name, group):
    tree = OTHER_TREES[name][world.rank == world.size - 1]
    both = r"rank . calls tree_all_reduce #1 .*rank . calls tree_all_reduce #1 .*"
    with pytest.raises(dist.MismatchError, match=both):
        dist.tree_all_reduce(tree, group=group)

"""Names of torch that scripts ask for, whatever they run on."""

import pytest

import mpiddp as dist

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


def test_what_is_not_here_is_not_available(world):
    for ask in (dist.is_ucc_available, dist.is_xccl_available, dist.is_torchelastic_launched):
        assert ask() is False
    assert not any(map(dist.is_backend_available, ("ucc", "xccl", "fake", "gloo", "carrier-pigeon")))
    assert dist.is_backend_available(dist.Backend.MPI) and dist.is_backend_available("MPI")


@pytest.mark.parametrize("backend", [dist.Backend.MPI, dist.Backend("GLOO"), dist.Backend.UNDEFINED])
def test_backend_makes_groups(world, backend):
    made = dist.new_group(backend=backend, timeout=dist.default_pg_timeout)
    assert dist.get_backend(made) == dist.get_backend()
    assert made._link.timeout_s == dist.default_pg_timeout.total_seconds()
    dist.destroy_process_group(made)
    with pytest.raises(ValueError, match="carrier-pigeon"):
        dist.new_group(backend=dist.Backend("Carrier-Pigeon"))


def test_names_agree_with_torch(world):
    theirs = pytest.importorskip("torch").distributed
    assert dist.default_pg_timeout == theirs.distributed_c10d.default_pg_timeout
    for name in ("MPI", "GLOO", "NCCL", "UNDEFINED"):
        assert getattr(dist.Backend, name) == getattr(theirs.Backend, name)
    for name in ("MPI", "Gloo", "Carrier-Pigeon"):
        assert dist.Backend(name) == theirs.Backend(name)

"""MPI's abilities with device pointers, and our evidence for them, from libraries that are not there."""

from types import SimpleNamespace

import pytest

from mpiddp.mpi import cuda_aware
from mpiddp.mpi.cuda_aware import Support

YES, NO = Support(True, "says so"), Support(False, "says no")
TRIED, FAILED = Support(True, "tried"), Support(False, "crashed")
BOTH = {kind: dict.fromkeys(cuda_aware.KINDS, answer) for kind, answer in (("tried", TRIED), ("failed", FAILED))}


@pytest.fixture
def chain(monkeypatch):
    """Set what each link of the chain says; return the evidence."""

    def evidence(override=None, kinds=None, says=None, cray=False, gtl=False, tried=(), library="MPICH 5.0.2"):
        monkeypatch.setattr(cuda_aware.settings, "takes_device_pointers", lambda: override)
        monkeypatch.setattr(cuda_aware.settings, "cray_gpu_support", lambda: cray)
        info = SimpleNamespace(Get=lambda name: kinds)
        world = SimpleNamespace(Get_info=lambda: info)
        monkeypatch.setattr(cuda_aware, "MPI", SimpleNamespace(COMM_WORLD=world, __file__=None))
        monkeypatch.setattr(cuda_aware, "_answer", lambda library: says)
        monkeypatch.setattr(cuda_aware, "loaded_libraries", lambda name: ["/opt/cray/libmpi_gtl_cuda.so"] * gtl)
        monkeypatch.setattr(cuda_aware, "library_name", lambda: library)
        return cuda_aware._evidence(dict(tried))

    return evidence


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ({"override": False, "kinds": "mpi,system,cuda", "says": YES, "tried": BOTH["tried"]}, "MPIDDP_CUDA_AWARE=0"),
        ({"override": True, "says": NO, "tried": BOTH["failed"]}, "MPIDDP_CUDA_AWARE=1"),
        ({"kinds": "mpi,system,cuda:device", "says": NO}, "mpi_memory_alloc_kinds=mpi,system,cuda:device"),
        ({"kinds": "mpi,system", "says": YES}, "says so"),
        ({"kinds": "mpi,cuda:host,cuda:managed", "says": NO}, "says no"),
        ({"says": NO, "cray": True, "gtl": True}, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded"),
        ({"says": NO, "cray": True}, "says no"),
        ({"says": None, "cray": True, "gtl": True}, "MPICH_GPU_SUPPORT_ENABLED=1, and libmpi_gtl_cuda is loaded"),
        ({"says": NO, "gtl": True}, "says no"),
        ({"kinds": "mpi,cudaish"}, "MPICH 5.0.2 does not tell; `python -m mpiddp info --probe-gpu` tries it"),
        ({"says": YES, "tried": BOTH["tried"]}, "says so"),
        ({"says": YES, "tried": BOTH["failed"]}, "crashed"),  # a library that says more than it can
        ({"says": NO, "tried": BOTH["tried"]}, "tried"),
        ({"says": NO, "tried": BOTH["failed"]}, "crashed"),
        ({"tried": BOTH["tried"]}, "tried"),
    ],
)
def test_chain(chain, links, reason):
    found = chain(**links)
    assert found.point_to_point == found.collectives
    assert found.collectives.reason == reason
    assert found.collectives.yes == reason.startswith(
        ("mpi_memory", "MPICH_GPU", "MPIDDP_CUDA_AWARE=1", "says so", "tried")
    )


NONE_QUEUED = "Open MPI v5.0.11 has no non-blocking collectives for GPU memory"
UNKNOWN = "says so, but that is not known of what carries Open MPI v5.0.11's messages"


@pytest.mark.parametrize(
    ("links", "yes", "collectives"),
    [
        ({"override": True}, True, NONE_QUEUED),
        ({"says": YES}, False, UNKNOWN),
        ({"says": YES, "tried": BOTH["tried"]}, True, NONE_QUEUED),
        ({"says": YES, "tried": BOTH["failed"]}, False, "crashed"),
        ({"says": NO}, False, "says no"),
        ({"tried": {"collectives": TRIED}}, False, NONE_QUEUED),
    ],
)
def test_open_mpi_never_gets_device_pointers_in_collectives_and_needs_a_trial(chain, links, yes, collectives):
    found = chain(**links, library="Open MPI v5.0.11")
    assert found.point_to_point.yes is yes and not found.collectives.yes
    assert found.collectives.reason.startswith(collectives)


@pytest.mark.parametrize("says", [0, 1])
def test_answer_of_open_mpi(says):
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: says)
    assert cuda_aware._answer(library) == (says == 1, f"MPIX_Query_cuda_support() says {says}")


@pytest.mark.parametrize(("failed", "value", "yes"), [(0, 1, True), (0, 0, False), (16, 1, False)])
def test_answer_of_mpich(failed, value, yes):
    def query(kind, supported):
        assert kind == 0
        supported._obj.value = value
        return failed

    # MPICH 3.4's other answer ends the process.
    both = SimpleNamespace(MPIX_GPU_query_support=query, MPIX_Query_cuda_support=lambda: pytest.fail("asked"))
    assert cuda_aware._answer(both).yes is yes


def test_no_answer():
    assert cuda_aware._answer(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("file", "abi"),
    [
        ("MPI.mpich.cpython-311-x86_64-linux-gnu.so", "mpich"),
        ("MPI.openmpi.abi3.so", "openmpi"),
        ("MPI.cpython-311-x86_64-linux-gnu.so", "as built"),
        ("MPI.abi3.so", "as built"),
        ("", "as built"),
    ],
)
def test_abi(file, abi):
    assert cuda_aware._abi(file) == abi

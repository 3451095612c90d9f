# The recipe for Spack (packages/py_mpiddp/package.py in a repository of recipes). It was never run. Fill in homepage and
# sha256 of a release. `spack install py-mpiddp ^openmpi` chooses the MPI that mpi4py is built with.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpiddp(PythonPackage):
    """torch.distributed and DistributedDataParallel on MPI, for NumPy and CuPy arrays, and as PyTorch's backend."""

    homepage = "URL"
    pypi = "mpiddp/mpiddp-0.2.0.tar.gz"

    license("BSD-3-Clause")

    version("0.2.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("torch", default=False, description="PyTorch, for which mpiddp is a backend")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-flit-core@3.12:4", type="build")

    depends_on("py-numpy@1.25:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-safetensors@0.4:", type=("build", "run"))
    with when("+torch"):
        depends_on("py-torch@2.9:", type=("build", "run"))
        depends_on("py-ml-dtypes", type=("build", "run"))

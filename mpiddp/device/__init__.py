"""Arrays on the host (NumPy's) and on GPUs (CuPy's): their place, streams, and copies from one place to another.

Only this package imports cupy, and only when a GPU is used.
"""

from .choice import (
    cuda_fault as cuda_fault,
    current_device as current_device,
    device_count as device_count,
    in_use as in_use,
    set_device as set_device,
)
from .namespace import (
    array_namespace as array_namespace,
    device_arrays_of as device_arrays_of,
    empty as empty,
    is_device_array as is_device_array,
    is_masked as is_masked,
)
from .transfer import (
    download as download,
    placed as placed,
    synchronize as synchronize,
    upload as upload,
)

"""``mpirun -np 2 python -m mpiddp.examples.ddp_timeline``: from the first gradient to optimizer.step.

DDP puts gradients, which backward makes from the last layer to the first, into *buckets*. The last gradient of a bucket
starts its all_reduce, which hides behind the gradients of the next layers; only the last bucket has nothing to hide
behind. Buckets are tiny here, so that there are several. All have arrived before ``backward`` returns. (Times, after a
tilde, vary, and are those of the next poll.)

Output::

    backward begins
      gradient of 4.weight     1280 bytes
      gradient of 4.bias         40 bytes
        bucket 0 leaves        1320 bytes
      gradient of 2.weight     4096 bytes
      gradient of 2.bias        128 bytes
        bucket 1 leaves        4224 bytes
      gradient of 0.weight     8192 bytes
      gradient of 0.bias        128 bytes
        bucket 2 leaves        8320 bytes
    backward has returned: 3 of 3 buckets have arrived
      bucket 0 left after  ~0.49 ms and was there after  ~4.52 ms
      bucket 1 left after  ~1.54 ms and was there after  ~4.64 ms
      bucket 2 left after  ~1.79 ms and was there after  ~4.71 ms
    optimizer.step: gradients of all ranks are equal: True
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np

import mpiddp as dist
from mpiddp import nn, optim
from mpiddp.examples.printing import print_once
from mpiddp.typing import Array


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def gradient_is_there(name: str, parameter: nn.Parameter) -> None:
        print_once(f"  gradient of {name:<10}{parameter.data.nbytes:>7} bytes")

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(gradient_is_there, name))
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=0.001)
    left: dict[int, float] = {}
    arrived: dict[int, float] = {}

    def bucket_leaves(state: object, bucket: dist.GradBucket) -> Any:
        left[bucket.index()] = time.perf_counter()
        print_once(f"    bucket {bucket.index()} leaves    {bucket.buffer().nbytes:>8} bytes")

        def bucket_arrives(future: dist.Future) -> Any:
            arrived[bucket.index()] = time.perf_counter()
            return future.value()

        return dist.allreduce_hook(None, bucket).then(bucket_arrives)

    ddp.register_comm_hook(None, bucket_leaves)
    optimizer = optim.SGD(ddp.parameters(), lr=0.1)
    buckets = len(ddp.bucket_sizes_bytes())
    images = np.random.default_rng(rank).standard_normal((16, 64), np.float32)
    loss = nn.functional.cross_entropy(ddp(images), np.arange(16) % 10)
    print_once("backward begins")
    began = time.perf_counter()
    loss.backward()
    print_once(f"backward has returned: {len(arrived)} of {buckets} buckets have arrived")
    for index in range(buckets):
        left_ms, arrived_ms = (f"~{1e3 * (times[index] - began):.2f} ms" for times in (left, arrived))
        print_once(f"  bucket {index} left after {left_ms:>9} and was there after {arrived_ms:>9}")
    optimizer.step()

    gradients: list[Array] = [np.empty(0)] * size
    dist.all_gather_object(gradients, np.concatenate([np.ravel(p.grad) for p in model.parameters()]))  # type: ignore[arg-type]
    equal = all(np.array_equal(gradients[0], each) for each in gradients)
    print_once(f"optimizer.step: gradients of all ranks are equal: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What `steps.py` reckons with: constants of one kind of GPU, each with how it was measured.

They are fits to few measurements and good for what lies between those: docs/predicting.md says how far they are off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Constant(NamedTuple):
    """Seconds, bytes a second or operations a second, as the field's name says."""

    value: float
    measured: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and the links between several of one host."""

    name: str
    memory_bytes: Constant
    weight_bytes_per_s: Constant  # of products of few rows
    product_s: Constant  # of each product, whatever its size
    bf16_flops: Constant  # of products of many rows
    fp8_flops: Constant
    attention_s: Constant  # of each layer's attention
    kv_bytes_per_s: Constant  # of attention in decode steps
    attention_flops: Constant  # of attention over prompts, the masked half left out
    rowwise_s: Constant  # of each norm and gate that has a kernel of its own
    rowwise_bytes_per_s: Constant
    gap_s: Constant  # a layer, between kernels that do not overlap
    pass_s: Constant  # of the host, before a lone prompt's first kernel
    launch_s: Constant  # of the host, between two ranks' launches of one step
    reduce_s: Constant  # of each sum over two ranks
    reduce_s_per_doubling: Constant  # of the ranks beyond two
    link_bytes_per_s: Constant  # of what a rank reads from others while they add up


H200 = Gpu(
    name="NVIDIA H200",
    memory_bytes=Constant(149.2e9, "139 GiB, as CUDA states it"),
    weight_bytes_per_s=Constant(
        4.36e12, "products of 32 layers of an 8B shape at one row, whole width less half width: 6.98 GB in 1.60 ms"
    ),
    product_s=Constant(4.3e-6, "what is left of the 3.75 ms of those 128 products at whole width"),
    bf16_flops=Constant(679e12, "the same products over 2,048 rows: 28.6 TFLOP in 42.1 ms"),
    fp8_flops=Constant(1238e12, "the same in FP8 with a scale a tensor: 23.1 ms"),
    attention_s=Constant(8e-6, "paged decode attention of 8B heads at 576 tokens: 9.1 us for one row, less its bytes"),
    kv_bytes_per_s=Constant(3.97e12, "the same for 256 rows: 604 MB in 160 us, less the 8"),
    attention_flops=Constant(
        323e12, "attention over one prompt of 2,177 tokens, 8B heads: 38.8 GFLOP in 128 us, less the 8"
    ),
    rowwise_s=Constant(2e-6, "norms and gates at 64 rows: 2.5 and 2.1 us"),
    rowwise_bytes_per_s=Constant(4.0e12, "the same at 256 rows: 5.1 and 5.9 us"),
    gap_s=Constant(4.3e-6, "137 us a step of 32 layers where products are cuBLAS's (64 to 256 rows); none below"),
    pass_s=Constant(1.4e-3, "host time of launching a captured pass of a prompt of 326 tokens"),
    launch_s=Constant(22e-6, "one thread that launches a graph on each of two devices"),
    reduce_s=Constant(6.3e-6, "1 to 64 rows of 4,096 on two H200, the best of symmetric memory: 6.1 to 7.5 us"),
    reduce_s_per_doubling=Constant(1e-6, "assumed; on four H100 10 us are published for 0.5 MB, and 9.7 come out"),
    link_bytes_per_s=Constant(327e9, "2,048 rows of 4,096 on two H200: 16.8 MB in 57.5 us, less the 6"),
)

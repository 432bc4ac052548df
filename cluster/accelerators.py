"""The accelerators that a plan knows: memory, bandwidth and arithmetic, from the vendors' data sheets.

| name | source |
|---|---|
| A100-40GB, A100-80GB | NVIDIA A100 Tensor Core GPU data sheet (SXM4; dense) |
| H100 | NVIDIA H100 Tensor Core GPU data sheet (SXM5; half the figure with sparsity) |
| H200 | NVIDIA H200 Tensor Core GPU data sheet (SXM; half the figure with sparsity) |
| L4 | NVIDIA L4 Tensor Core GPU data sheet (half the figure with sparsity) |
| T4 | NVIDIA T4 Tensor Core GPU data sheet; it has no bfloat16, the figure is float16's |
| A10G | Amazon EC2 G5 instances: 24 GB, 600 GB/s; NVIDIA A10G, dense |

Memory is what the driver reports (`nvidia-smi`, with error correction on), a little less than the name says. `CPU`
stands for a few cores of a server, of which no two are alike: its rates are an order of magnitude, and its memory is
that of the machine, which is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import PlanError

RAY_ACCELERATOR_LABEL = "ray.io/accelerator-type"
"""The label that Ray gives each node with a GPU; its values are the `ray_type` of the catalogue."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: `memory_bytes` (None: the machine's), peak bandwidth in bytes/s, dense bfloat16 operations per s.

    `ray_type` is Ray's name of it (`ray.util.accelerators`), None where Ray has none. `per_node` is how many the usual
    machines have at most.
    """

    name: str
    ray_type: str | None
    memory_bytes: int | None
    bandwidth: float
    flops: float
    per_node: int = 8
    has_bfloat16: bool = True

    @property
    def is_gpu(self) -> bool:
        """Whether Ray counts it as a GPU."""
        return self.ray_type is not None


CATALOGUE: Mapping[str, Accelerator] = {
    each.name: each
    for each in (
        Accelerator("A100-40GB", "A100", 40_960 * MIB, 1555e9, 312e12),
        Accelerator("A100-80GB", "A100", 81_920 * MIB, 2039e9, 312e12),
        Accelerator("H100", "H100", 81_559 * MIB, 3350e9, 989e12),
        Accelerator("H200", "H200", 143_771 * MIB, 4800e9, 989e12),
        Accelerator("L4", "L4", 23_034 * MIB, 300e9, 121e12),
        Accelerator("T4", "T4", 15_360 * MIB, 320e9, 65e12, has_bfloat16=False),
        Accelerator("A10G", "A10G", 23_028 * MIB, 600e9, 70e12),
        Accelerator("CPU", None, None, 20e9, 0.2e12, per_node=1),
    )
}


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of this name, or of Ray's name where only one has it. Raises PlanError."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    alike = [each for each in CATALOGUE.values() if each.ray_type == name]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise PlanError(f"accelerator {name} may be {' or '.join(each.name for each in alike)}; say which")
    raise PlanError(f"accelerator {name!r} is not one of {', '.join(CATALOGUE)}")

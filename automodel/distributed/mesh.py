"""The ranks of a job laid out along named dimensions, as a torch DeviceMesh."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel.distributed.config import ParallelSizes
from automodel.distributed.rank_group import RankGroup

__all__ = ["Mesh", "build_mesh"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The dimensions of a job.

    Args:
        sizes: Ranks along each dimension.
        devices: The torch mesh with the dimensions `dp_replicate` and `dp_shard`; None for a single process.
        world: All ranks of the job.
        data: The ranks that see different data; a rank's place in it decides its part of every global batch.
    """

    sizes: ParallelSizes
    devices: DeviceMesh | None
    world: RankGroup
    data: RankGroup

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group in which whole replicas of the model are averaged, for strategies that shard nothing."""
        return self.data.process_group

    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one dimension, or two where there are several replicas (HSDP).

        Raises:
            RuntimeError: a single process has no mesh.
        """
        if self.devices is None:
            raise RuntimeError("a single process has no device mesh")
        return self.devices if self.sizes.dp_replicate > 1 else self.devices["dp_shard"]


def build_mesh(sizes: ParallelSizes, *, world: RankGroup, device_type: str) -> Mesh:
    """Make the mesh; every rank of the job calls it.

    Args:
        sizes: Ranks along each dimension, their product the size of `world`.
        world: All ranks of the job.
        device_type: Of the devices that compute: "cpu" or "cuda".
    """
    devices = None
    if world.process_group is not None:
        shape, names = (sizes.dp_replicate, sizes.dp_shard), ("dp_replicate", "dp_shard")
        devices = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return Mesh(sizes=sizes, devices=devices, world=world, data=world)

"""What a load of weights is expected to take, from what agents measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from controlplane.domain.catalog import Catalog, Node, WeightLoad
from controlplane.domain.ids import GpuTypeName, ModelName, NodeId


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Milliseconds by model, GPUs of the engine, and node or kind of node."""

    by_node: Mapping[tuple[ModelName, int, NodeId], int] = field(default_factory=dict)
    by_gpu_type: Mapping[tuple[ModelName, int, GpuTypeName], int] = field(default_factory=dict)

    @classmethod
    def of(cls, loads: Sequence[WeightLoad], catalog: Catalog) -> Self:
        """`loads` are in the order of their latest starts, the latest first.

        On a node that has loaded the model before, the medium that it was last read from is expected
        again; on another one, what is usual on nodes of its GPU type.
        """
        by_node: dict[tuple[ModelName, int, NodeId], int] = {}
        for load in loads:
            by_node.setdefault((load.model, load.gpus, load.node_id), load.load_ms)
        alike: dict[tuple[ModelName, int, GpuTypeName], list[int]] = {}
        for (model, gpus, node_id), load_ms in by_node.items():
            if node := catalog.nodes.get(node_id):
                alike.setdefault((model, gpus, node.gpu_type), []).append(load_ms)
        return cls(by_node, {key: int(median(times)) for key, times in alike.items()})

    def of_engine(self, model: ModelName, gpus: int, node: Node) -> int | None:
        """None when nothing like it was measured."""
        found = self.by_node.get((model, gpus, node.id))
        return self.by_gpu_type.get((model, gpus, node.gpu_type)) if found is None else found

"""Typed identifiers: a tenant id can not be passed where a request id is meant."""

from typing import NewType

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
ModelName = NewType("ModelName", str)
EngineId = NewType("EngineId", str)
NodeId = NewType("NodeId", str)
RegionName = NewType("RegionName", str)
GpuTypeName = NewType("GpuTypeName", str)
SloClassName = NewType("SloClassName", str)
WorkflowId = NewType("WorkflowId", str)
ReplicaId = NewType("ReplicaId", str)
LeaseId = NewType("LeaseId", str)
CommandId = NewType("CommandId", str)

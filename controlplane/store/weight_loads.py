"""How long engines took to load their weights, as agents measured it: by model, node, GPUs and medium."""

from collections.abc import Sequence

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import WeightLoad
from controlplane.domain.ids import ModelName, NodeId
from controlplane.store import tables
from controlplane.store.session import transaction
from dataplane.protocol.messages import EngineFacts

# How much the latest load counts: a disk that has become slower is believed after a few.
GAIN = 0.3


# Every replica writes what it hears, and some of it twice: a start counts once.
_ADD = text("""
INSERT INTO weight_loads AS known
       (model, node_id, gpus, medium, load_ms, loads, started_ms, updated_at)
SELECT models.name, nodes.id, :gpus, :medium, :load_ms, 1, :started_ms, clock_timestamp()
FROM models, nodes WHERE models.name = :model AND nodes.id = :node_id
ON CONFLICT (model, node_id, gpus, medium) DO UPDATE SET
    load_ms = GREATEST(1, round(known.load_ms + CAST(:gain AS float8) * (excluded.load_ms - known.load_ms))::int),
    loads = known.loads + 1,
    started_ms = excluded.started_ms,
    updated_at = clock_timestamp()
WHERE known.started_ms < excluded.started_ms
""")


async def add(engine: AsyncEngine, node_id: NodeId, facts: Sequence[EngineFacts]) -> bool:
    """Take the loads that a node's engines were seen to need; whether any was not known yet.

    Raises StateUnavailable.
    """
    rows = [
        {
            "model": entry.model,
            "node_id": node_id,
            "gpus": entry.gpus,
            "medium": entry.load_medium,
            "load_ms": entry.load_ms,
            "started_ms": entry.started_ms,
            "gain": GAIN,
        }
        for entry in sorted(facts, key=lambda entry: entry.started_ms)
        if entry.load_ms > 0
    ]
    if not rows:
        return False
    is_new = False
    async with transaction(engine) as connection:
        for row in rows:
            added = await connection.execute(_ADD, row)
            is_new = is_new or added.rowcount > 0
    return is_new


async def load_all(engine: AsyncEngine) -> list[WeightLoad]:
    """Every measured load, the latest first. Raises StateUnavailable."""
    table = tables.weight_loads
    statement = select(table).order_by(table.c.started_ms.desc(), table.c.model, table.c.node_id)
    async with transaction(engine) as connection:
        return [
            WeightLoad(
                model=ModelName(row.model),
                node_id=NodeId(row.node_id),
                gpus=row.gpus,
                medium=row.medium,
                load_ms=row.load_ms,
                loads=row.loads,
                started_ms=row.started_ms,
            )
            for row in await connection.execute(statement)
        ]

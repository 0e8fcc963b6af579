"""What is declared: regions, GPU types with prices, models, and cluster documents that declare
more.
"""

from fastapi import APIRouter

from controlplane.api.security import AdminChangeDep, ServicesDep, ViewerDep
from controlplane.api.shapes import LIST_LIMIT_DEFAULT, Answer, Cursor, Limit, Page
from controlplane.api.slices import page_by_name
from controlplane.store.catalog import apply_cluster, load_catalog
from controlplane.store.cluster import ClusterDocument

router = APIRouter(tags=["catalogue"])


class RegionAnswer(Answer):
    name: str


class GpuTypeAnswer(Answer):
    """Rates are per GPU: bytes/s, dense bf16 FLOP/s, micro-dollars an hour."""

    name: str
    hbm_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    price_micro_usd_per_hour: int
    price_source: str
    price_date: str
    fp8_flops_per_s: float
    fp4_flops_per_s: float


class ModelAnswer(Answer):
    """Sizes in bytes and tokens, prices in micro-dollars per million tokens."""

    name: str
    parameters: int
    layers: int
    hidden_size: int
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens_max: int
    load_ms: int
    price_prompt_micro_usd_per_mtok: int
    price_cached_micro_usd_per_mtok: int
    price_completion_micro_usd_per_mtok: int
    parameters_active: int
    experts: int
    experts_active: int
    expert_weights_bytes: int
    kv_heads: int
    adapter_of: str | None = None
    adapter_path: str = ""


class SloClassAnswer(Answer):
    """Targets in milliseconds, what a finished call is worth, and what a second of lateness costs, in
    micro-dollars.
    """

    name: str
    ttft_ms_max: int
    tpot_ms_max: int
    e2e_ms_max: int
    value_micro_usd: int
    late_micro_usd_per_s: int


class Applied(Answer):
    """How many of each a cluster document declared, and the catalogue's revision after it."""

    revision: int
    regions: int
    gpu_types: int
    models: int
    adapters: int
    slo_classes: int
    tenants: int
    nodes: int


@router.get("/regions")
async def list_regions(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[RegionAnswer]:
    """List regions by name."""
    catalog = await load_catalog(services.engine)
    names, next_cursor = page_by_name(catalog.regions, limit, cursor)
    return Page(data=[RegionAnswer(name=name) for name in names], next_cursor=next_cursor)


@router.get("/gpu-types")
async def list_gpu_types(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[GpuTypeAnswer]:
    """List GPU types by name, with their prices and where those come from."""
    known = (await load_catalog(services.engine)).gpu_types
    names, next_cursor = page_by_name(known, limit, cursor)
    return Page(
        data=[GpuTypeAnswer.model_validate(known[name]) for name in names], next_cursor=next_cursor
    )


@router.get("/models")
async def list_models(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[ModelAnswer]:
    """List models and adapters by name."""
    catalog = await load_catalog(services.engine)
    known = {**catalog.models, **catalog.adapters}
    names, next_cursor = page_by_name(known, limit, cursor)
    return Page(
        data=[ModelAnswer.model_validate(known[name]) for name in names], next_cursor=next_cursor
    )


@router.get("/slo-classes")
async def list_slo_classes(
    _: ViewerDep, services: ServicesDep, limit: Limit = LIST_LIMIT_DEFAULT, cursor: Cursor = None
) -> Page[SloClassAnswer]:
    """List SLO classes by name."""
    known = (await load_catalog(services.engine)).slo_classes
    names, next_cursor = page_by_name(known, limit, cursor)
    return Page(
        data=[SloClassAnswer.model_validate(known[name]) for name in names],
        next_cursor=next_cursor,
    )


@router.post("/cluster")
async def apply(body: ClusterDocument, by: AdminChangeDep, services: ServicesDep) -> Applied:
    """Declare what a cluster document says. What it does not name stays as it is."""
    return Applied.model_validate(await apply_cluster(services.engine, body, by))

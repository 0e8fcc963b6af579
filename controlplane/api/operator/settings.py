"""The settings that the replica runs with, and where each comes from. Secrets are never in an answer."""

from typing import Literal

from fastapi import APIRouter

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.shapes import Answer

router = APIRouter(tags=["status"])


class SettingAnswer(Answer):
    """`value` is null for a secret, which only `is_set` speaks of. `variable` is where it is set."""

    name: str
    variable: str
    value: str | None
    is_secret: bool
    is_set: bool
    source: Literal["environment", "default"]


class SettingsAnswer(Answer):
    replica_id: str
    settings: list[SettingAnswer]


@router.get("/settings")
async def read_settings(_: ViewerDep, services: ServicesDep) -> SettingsAnswer:
    """The effective settings of this replica, by name."""
    return SettingsAnswer(
        replica_id=services.replica_id,
        settings=[SettingAnswer.model_validate(setting) for setting in services.settings],
    )

"""The dashboards, in the order in which one looks at them."""

from typing import Final

from dashboards.board import Board
from dashboards.boards import (
    admission,
    fleet,
    overview,
    request_path,
    scheduler,
    tenant,
    workflow,
)

BOARDS: Final[tuple[Board, ...]] = (
    overview.BOARD,
    admission.BOARD,
    scheduler.BOARD,
    fleet.BOARD,
    workflow.BOARD,
    tenant.BOARD,
    request_path.BOARD,
)

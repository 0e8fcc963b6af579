"""Writes the dashboards as Grafana reads them: `python -m dashboards.generate`.

With `--check` nothing is written, and the exit status is 1 when a file differs from what would be.
"""

import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.board import Board, grafana
from dashboards.boards import BOARDS

FOLDER: Final = Path(__file__).parent / "grafana"


def rendered(board: Board) -> str:
    """The JSON of one dashboard, the same for the same board."""
    document = json.loads(JSONEncoder().encode(grafana(board)))
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of files that are not what the generator makes: changed, missing, or of no board."""
    wanted = {f"{board.uid}.json": rendered(board) for board in BOARDS}
    there = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )


def write(folder: Path = FOLDER) -> None:
    """Write every dashboard, and remove those that are no more."""
    for path in folder.glob("*.json"):
        path.unlink()
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(rendered(board))


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in stale():
            sys.stderr.write(f"{name} is stale: run `python -m dashboards.generate`\n")
        return int(bool(stale()))
    write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

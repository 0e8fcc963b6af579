"""`headway status`: one screen that tells the state."""

from cli.client import JsonObject
from cli.operator import Session, with_session
from cli.output import dollars, table


@with_session
def status(session: Session) -> None:
    """Show the state of the control plane, its fleet and its money."""
    document = session.api.get("status")
    engines = session.api.get("engines", limit=500)["data"]
    spend = document["tenants"]
    health = ("[green]ready[/]" if document["is_ready"] else "[red]not ready[/]: ") + "; ".join(
        document["problems"]
    )
    gauges = document["gauges"]
    session.out.show(
        document,
        f"[bold]{session.api.url}[/] {health}",
        f"replica {document['replica_id']}, version {document['version']},"
        f" catalogue {document['catalog_revision']}, policy {document['policy_revision'][:12]}",
        f"{gauges['calls_in_flight']} calls in flight, {gauges['calls_waiting']} waiting,"
        f" {document['workflows_running']} workflows running",
        "",
        table(
            ("ENGINE", "GPU", "MODEL", "ROLE", "STATE", ">RUN", ">SEATS"),
            (
                (
                    engine["id"],
                    engine["gpu_type"],
                    engine["model"],
                    engine["role"],
                    _state(engine),
                    engine["running"],
                    f"{engine['seats_taken']}/{engine['seats_lent']}",
                )
                for engine in engines
            ),
        ),
        "",
        table(
            ("TENANT", "CLASS", ">BUDGET", ">SPENT", ">RESERVED"),
            (
                (
                    tenant["id"],
                    tenant["tenant_class"],
                    dollars(tenant["limit_micro_usd"]),
                    dollars(tenant["spent_micro_usd"]),
                    dollars(tenant["reserved_micro_usd"]),
                )
                for tenant in spend
            ),
        ),
    )


def _state(engine: JsonObject) -> str:
    if engine["is_suspect"]:
        return "suspect"
    return "accepting" if engine["is_accepting"] else str(engine["state"])

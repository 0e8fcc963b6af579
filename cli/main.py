"""The command `headway`: one group or command per module, nothing else happens here.

Exit codes: 0 done, 1 refused or failed, 2 wrong use, 3 no answer from the server.
"""

import typer

from cli import (
    admin_key,
    agent,
    apply,
    audit,
    breakers,
    budgets,
    commands,
    config,
    db,
    doctor,
    engines,
    explain,
    keys,
    model_choice,
    models,
    nodes,
    plan,
    report,
    requests,
    serve,
    status,
    tenants,
    up,
    version,
    workflows,
)
from cli.demo import command as demo
from cli.examples import add_examples
from cli.policy import command as policy
from cli.simulate import command as simulate
from cli.top import command as top

app = typer.Typer(
    name="headway",
    help="Inference control plane for vLLM fleets: the lowest cost per successful task.",
    epilog="Exit codes: 0 done, 1 refused or failed, 2 wrong use, 3 no answer from the server.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

_PROCESSES = "Processes"
_OPERATION = "Operation"

app.command("up", rich_help_panel=_PROCESSES)(up.up)
app.command("demo", rich_help_panel=_PROCESSES)(demo.demo)
app.command("serve", rich_help_panel=_PROCESSES)(serve.serve)
app.command("agent", rich_help_panel=_PROCESSES, context_settings=agent.CONTEXT)(agent.agent)
db.app.command("admin-key")(admin_key.admin_key)
app.add_typer(db.app, name="db", rich_help_panel=_PROCESSES)

app.command("status", rich_help_panel=_OPERATION)(status.status)
app.command("top", rich_help_panel=_OPERATION)(top.top)
app.command("explain", rich_help_panel=_OPERATION)(explain.explain)
app.command("doctor", rich_help_panel=_OPERATION)(doctor.doctor)
app.command("report", rich_help_panel=_OPERATION)(report.report)
app.command("apply", rich_help_panel=_OPERATION)(apply.apply)
for _name, _group in (
    ("tenants", tenants),
    ("keys", keys),
    ("models", models),
    ("nodes", nodes),
    ("engines", engines),
    ("workflows", workflows),
    ("requests", requests),
    ("commands", commands),
    ("plan", plan),
    ("policy", policy),
    ("breaker", breakers),
    ("budgets", budgets),
    ("model-choice", model_choice),
    ("audit", audit),
):
    app.add_typer(_group.app, name=_name, rich_help_panel=_OPERATION)
app.add_typer(simulate.app, name="simulate", rich_help_panel=_OPERATION)
app.add_typer(config.app, name="config", rich_help_panel=_OPERATION)
app.command("version")(version.version)

add_examples(app)


def main() -> None:
    app()

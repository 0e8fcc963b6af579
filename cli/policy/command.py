"""`headway policy`: checks bundles, brings them from shadow to every call, and takes them back."""

import typer

from cli.policy import compare, folder, rollout

app = typer.Typer(
    no_args_is_help=True,
    help="Policy bundles: check, compare, replay, roll out, take back, explain.",
)

_OFFLINE = "In a folder"
_ROLLOUT = "Rollout"
_DECISIONS = "Against the decision log"

app.command("lint", rich_help_panel=_OFFLINE)(folder.lint)
app.command("test", rich_help_panel=_OFFLINE)(folder.run_tests)
app.command("attributes", rich_help_panel=_OFFLINE)(folder.attributes)
app.command("status", rich_help_panel=_ROLLOUT)(rollout.status)
app.command("diff", rich_help_panel=_ROLLOUT)(compare.diff)
app.command("apply", rich_help_panel=_ROLLOUT)(rollout.apply)
app.command("canary", rich_help_panel=_ROLLOUT)(rollout.canary)
app.command("promote", rich_help_panel=_ROLLOUT)(rollout.promote)
app.command("rollback", rich_help_panel=_ROLLOUT)(rollout.roll_back)
app.command("history", rich_help_panel=_ROLLOUT)(rollout.history)
app.command("replay", rich_help_panel=_DECISIONS)(compare.replay)
app.command("explain", rich_help_panel=_DECISIONS)(compare.explain)

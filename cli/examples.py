"""Examples of every command, as `--help` shows them: one table, by the words of the command."""

from collections.abc import Iterator, Sequence
from typing import Final

import typer

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "up": ("headway up", "headway up --port 9000 --cluster cluster.yaml"),
    "demo": ("headway demo --seconds 30", "headway demo --seed 7 --json"),
    "serve": ("headway serve",),
    "agent": ("headway agent --node gpu-7 --nats-url nats://bus:4222 --engines engines.yaml",),
    "db upgrade": ("headway db upgrade",),
    "db admin-key": ("headway db admin-key --name first",),
    "db current": ("headway db current --json",),
    "status": (
        "headway status",
        "headway status --watch",
        "headway status --window 3600 --output yaml",
    ),
    "top": ("headway top", "headway top tenants --interval 5", "headway top --context prod"),
    "explain": (
        "headway explain req-1a2b3c4d-17",
        "headway explain wf-0c00f42cbc7a17204756d558",
        "headway explain plan",
        "headway explain plan:17 --json",
    ),
    "doctor": ("headway doctor", "headway doctor --all", "headway doctor --json"),
    "report": (
        "headway report --since 24h --html report.html",
        "headway report --since 7d --no-shadow --json",
    ),
    "apply": ("headway apply cluster.yaml --reason 'two more nodes'",),
    "version": ("headway version",),
    "tenants list": ("headway tenants list", "headway tenants list --limit 500 --json"),
    "tenants create": ("headway tenants create acme --class gold --slo interactive --budget 100",),
    "tenants budget": ("headway tenants budget acme 250",),
    "tenants disable": ("headway tenants disable acme --reason 'unpaid' --yes",),
    "tenants enable": ("headway tenants enable acme",),
    "keys list": ("headway keys list",),
    "keys create": (
        "headway keys create --tenant acme --name batch --rpm 60",
        "headway keys create --role viewer --name grafana",
    ),
    "keys limit": ("headway keys limit KEY --rpm 60 --tpm 100000 --concurrency 4",),
    "keys rotate": ("headway keys rotate KEY --overlap 7d",),
    "keys revoke": ("headway keys revoke KEY --reason 'it leaked'",),
    "models list": ("headway models list",),
    "nodes list": ("headway nodes list", "headway nodes list --watch"),
    "nodes show": ("headway nodes show gpu-7",),
    "nodes cordon": ("headway nodes cordon gpu-7 --watch",),
    "nodes uncordon": ("headway nodes uncordon gpu-7",),
    "nodes drain": (
        "headway nodes drain gpu-7 --watch",
        "headway nodes drain gpu-7 --deadline 300 --yes --reason 'new driver'",
    ),
    "nodes credentials": ("headway nodes credentials gpu-7",),
    "engines list": ("headway engines list --watch",),
    "engines load": (
        "headway engines load llama-8b-1 --node gpu-7 --model llama-3.1-8b --profile coder --watch",
    ),
    "engines unload": ("headway engines unload llama-8b-1 --watch",),
    "engines drain": ("headway engines drain llama-8b-1 --watch",),
    "engines stop": ("headway engines stop llama-8b-1 --yes",),
    "engines restart": ("headway engines restart llama-8b-1 --watch",),
    "engines role": ("headway engines role llama-8b-1 prefill --watch",),
    "engines sleep": ("headway engines sleep llama-8b-1 --level 2",),
    "engines wake": ("headway engines wake llama-8b-1 --watch",),
    "engines reset-cache": ("headway engines reset-cache llama-8b-1",),
    "engines cordon": ("headway engines cordon llama-8b-1 --because 'slow disk'",),
    "engines uncordon": ("headway engines uncordon llama-8b-1",),
    "engines load-adapter": ("headway engines load-adapter llama-8b-1 legal /adapters/legal",),
    "engines unload-adapter": ("headway engines unload-adapter llama-8b-1 legal",),
    "engines profiles list": ("headway engines profiles list",),
    "engines profiles lint": (
        "headway engines profiles lint profiles.yaml --cluster cluster.yaml",
    ),
    "engines profiles show": ("headway engines profiles show coder --model llama-3.1-8b",),
    "workflows list": ("headway workflows list --tenant acme --state running",),
    "workflows show": ("headway workflows show wf-0c00f42cbc7a17204756d558",),
    "workflows cancel": ("headway workflows cancel wf-0c00f42cbc7a17204756d558 --yes",),
    "requests list": ("headway requests list --tenant acme --limit 100",),
    "requests show": ("headway requests show req-1a2b3c4d-17",),
    "requests tail": (
        "headway requests tail",
        "headway requests tail --tenant acme --state failed",
        "headway requests tail --slower-than 5000 --json",
    ),
    "commands list": ("headway commands list --node gpu-7 --watch",),
    "commands show": ("headway commands show COMMAND --watch",),
    "plan show": ("headway plan show", "headway plan show 17"),
    "plan diff": ("headway plan diff", "headway plan diff 17 16"),
    "plan history": ("headway plan history --limit 50",),
    "plan pause": ("headway plan pause --reason 'a launch is on'",),
    "plan resume": ("headway plan resume --reason 'the launch is over'",),
    "plan mode": ("headway plan mode act --reason 'a week of good proposals'",),
    "plan apply": ("headway plan apply 17 --reason 'the night needs fewer'",),
    "plan procure": ("headway plan procure --prices offers.yaml --deferrable 0.3",),
    "policy lint": ("headway policy lint my-policies",),
    "policy test": ("headway policy test my-policies --mutants --score-min 90",),
    "policy attributes": ("headway policy attributes",),
    "policy status": ("headway policy status",),
    "policy diff": ("headway policy diff my-policies --against active",),
    "policy apply": ("headway policy apply my-policies --reason 'shorter answers at peak'",),
    "policy canary": ("headway policy canary 10 --reason 'a day in shadow went well'",),
    "policy promote": ("headway policy promote --reason 'the canary went well'",),
    "policy rollback": ("headway policy rollback --reason 'too many refusals'",),
    "policy history": ("headway policy history",),
    "policy replay": ("headway policy replay --since 24h --against candidate",),
    "policy explain": ("headway policy explain req-1a2b3c4d-17 --all",),
    "breaker list": ("headway breaker list",),
    "breaker open": ("headway breaker open engine:llama-8b-1 --reason 'bad answers'",),
    "breaker close": ("headway breaker close engine:llama-8b-1 --reason 'looked at it'",),
    "breaker auto": ("headway breaker auto engine:llama-8b-1 --reason 'done'",),
    "budgets list": ("headway budgets list --kind tenant",),
    "budgets show": ("headway budgets show tenant:acme",),
    "budgets set": (
        "headway budgets set tenant:acme 100 --window month",
        "headway budgets set key:k-7f3a:tokens 1000000 --window day",
    ),
    "budgets remove": ("headway budgets remove key:KEY --yes",),
    "model-choice show": ("headway model-choice show --tenant acme",),
    "model-choice classes": ("headway model-choice classes",),
    "model-choice explain": ("headway model-choice explain wf-0c00f42cbc7a17204756d558",),
    "audit list": ("headway audit list --subject 'policy*'",),
    "audit verify": ("headway audit verify",),
    "simulate": (
        "headway simulate --workload coding --load 1.0 --policy headway,sticky --seeds 3 --quick",
    ),
    "simulate calibrate": ("headway simulate calibrate",),
    "simulate referee": ("headway simulate referee --trace trace.jsonl",),
    "config contexts": ("headway config contexts",),
    "config use": ("headway config use prod",),
    "config add": (
        "headway config add prod --url https://headway.example --key-file ~/.headway-key --use",
        "headway config add lab --url https://lab.example --key-stdin < key",
    ),
    "config remove": ("headway config remove lab",),
    "config show": ("headway config show", "headway config show --context prod --json"),
}

_EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 refused or failed, 2 wrong use, 3 no answer from the server."
)


def add_examples(app: typer.Typer, words: Sequence[str] = ()) -> None:
    """Put its examples below the help of each command, and the exit codes below those."""
    for command in app.registered_commands:
        function = command.callback
        name = command.name or ("" if function is None else function.__name__.replace("_", "-"))
        command.epilog = _epilog([*words, name])
    for group in app.registered_groups:
        inner = group.typer_instance
        if inner is None:
            continue
        name = str(group.name or inner.info.name or "")
        path = [*words, name]
        if " ".join(path) in EXAMPLES:
            inner.info.epilog = _epilog(path)
        add_examples(inner, path)


def _epilog(path: Sequence[str]) -> str:
    return "\n\n".join(_lines(EXAMPLES.get(" ".join(path), ())))


def _lines(examples: Sequence[str]) -> Iterator[str]:
    if examples:
        yield "[bold]Examples[/bold]"
        yield from (f"$ {example}" for example in examples)
    yield f"[dim]{_EXIT_CODES}[/dim]"

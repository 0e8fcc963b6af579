"""What can be said of a bundle without a server: whether it is sound, and whether its cases hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cli.failure import CommandFailure, ExitCode
from cli.operator import JsonOption, OutputOption, reported
from cli.output import Output, table

if TYPE_CHECKING:
    from policies.cases import CaseFailure

PERCENT = 100

FolderArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FOLDER]", help="Folder of a bundle; the one that ships if left out."),
]


def lint(
    folder: FolderArgument = None, *, output: OutputOption = None, as_json: JsonOption = False
) -> None:
    """Check a bundle: shapes, types, contradictions, and every rule on made-up facts."""
    from cli.policy.sources import compiled, read_folder

    with reported():
        policy = compiled(*read_folder(folder))
        report = policy.bundle.report
        assert report is not None
        document = {
            "revision": policy.revision,
            "documents": len(policy.bundle.files),
            "rules": report.rules,
            "inputs": report.inputs,
            "p99_us": report.p99_us,
            "notes": list(report.notes),
        }
        Output.of(output, as_json=as_json).show(
            document,
            *(f"[yellow]note:[/] {escape(note)}" for note in report.notes),
            f"[green]sound:[/] {len(policy.bundle.files)} files, {report.rules} rules, tried on"
            f" {report.inputs} inputs, all rules in {report.p99_us} us at the 99th percentile;"
            f" revision {policy.revision[:12]}",
        )


def run_tests(
    folder: FolderArgument = None,
    *,
    has_mutants: Annotated[
        bool, typer.Option("--mutants", help="Also change rules and see which cases notice.")
    ] = False,
    score_min: Annotated[
        int,
        typer.Option(
            "--score-min", min=0, max=PERCENT, help="Fail below this share of noticed mutants."
        ),
    ] = 0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the cases that stand in a bundle's documents."""
    from cli.policy.sources import compiled, read_folder
    from policies.cases import mutation_score, run_cases

    with reported():
        policy = compiled(*read_folder(folder))
        out = Output.of(output, as_json=as_json)
        cases = run_cases(policy)
        failures = [_failed(failure) for failure in cases.failures]
        document: dict[str, object] = {
            "revision": policy.revision,
            "rules": cases.rules,
            "cases": cases.cases,
            "failures": failures,
        }
        shown = [f"[red]failed:[/] {escape(failure)}" for failure in failures]
        shown.append(f"{cases.cases} cases of {cases.rules} rules, {len(failures)} failed")
        score = PERCENT
        if has_mutants or score_min:
            mutants = mutation_score(policy.bundle)
            survivors = [
                f"{mutant.rule}: {mutant.change}: {' '.join(mutant.when.split())}"
                for mutant in mutants.survivors
            ]
            score = mutants.score_percent
            document["mutants"] = {
                "tried": mutants.mutants,
                "score_percent": score,
                "survivors": survivors,
            }
            shown += [f"[yellow]not noticed:[/] {escape(survivor)}" for survivor in survivors]
            shown.append(
                f"{mutants.mutants} mutants, {len(survivors)} not noticed by any case:"
                f" score {score} %"
            )
        out.show(document, *shown)
        if failures:
            raise CommandFailure(
                ExitCode.FAILED, f"{len(failures)} cases fail", "mend the rules or the cases"
            )
        if score < score_min:
            raise CommandFailure(
                ExitCode.FAILED,
                f"the mutation score is {score} %, below {score_min} %",
                "add cases at the edges of the conditions",
            )


def attributes(
    *,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page of the documentation.")
    ] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what rules can read, with types and units."""
    from policies.attributes import ATTRIBUTES, reference_page

    if as_markdown:
        print(reference_page(), end="")
        return
    rows = [
        {
            "name": row.name,
            "type": str(row.kind),
            "unit": row.unit,
            "is_live": row.is_live,
            "usual": row.usual,
            "meaning": row.sentence,
        }
        for row in ATTRIBUTES
    ]
    with reported():
        Output.of(output, as_json=as_json).show(
            {"attributes": rows},
            table(
                ("ATTRIBUTE", "TYPE", "UNIT", "MEANING"),
                ((row["name"], row["type"], row["unit"], row["meaning"]) for row in rows),
            ),
        )


def _failed(failure: "CaseFailure") -> str:
    expected = "should fire" if failure.expected else "should not fire"
    why = f" ({failure.error})" if failure.error else ""
    return f"{failure.rule}: case `{failure.case}` {expected}{why}"

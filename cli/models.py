"""`headway models`: what is served, and at which prices."""

import typer

from cli.operator import Session, with_session
from cli.output import table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="What is served, and at which prices.")


@app.command("list")
@with_session
def list_models(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List models. Prices are dollars per million tokens."""
    page = page_of(session, "models", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("MODEL", ">CONTEXT", ">WEIGHTS GB", ">PROMPT", ">CACHED", ">OUTPUT"),
            (
                (
                    model["name"],
                    f"{model['context_tokens_max']:,}",
                    f"{model['weights_bytes'] / 1e9:.1f}",
                    _price(model["price_prompt_micro_usd_per_mtok"]),
                    _price(model["price_cached_micro_usd_per_mtok"]),
                    _price(model["price_completion_micro_usd_per_mtok"]),
                )
                for model in page["data"]
            ),
        ),
    )


def _price(micro_usd_per_mtok: int) -> str:
    return f"${micro_usd_per_mtok / 1e6:.3f}"

"""`leadout fetch`: the models of a config file, downloaded before anything serves."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.console import console, one_line_errors


def fetch_command(
    config: Annotated[Path, typer.Argument(help="a Serve config file")],
) -> None:
    """Download what CONFIG's models lack in the Hugging Face cache (HF_HOME). Local models are left as they are."""
    with one_line_errors():
        from deployments.config import parse_config
        from deployments.model_download import download, hub_models
        from deployments.preflight import resolve_models
        from deployments.serve_config import read_serve_config

        models = hub_models(resolve_models(parse_config(read_serve_config(config).arguments)))
        for model in models:
            console.print(f"Fetching {model.name} …", highlight=False, markup=False)
            download(model)
        console.print(f"{len(models)} model(s) of the hub are in the cache", highlight=False)

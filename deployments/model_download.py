"""Downloading whole models from the Hugging Face hub, as workers would do one by one."""

from dataclasses import dataclass

from deployments.config import LeadoutConfig
from workers.engine.model_files import model_folder, unknown_model

FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
PICKLED = ("*.bin", "*.pt", "*.pth")
CODE = ("*.py",)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub and the patterns of its files that are wanted."""

    name: str
    patterns: tuple[str, ...]


def hub_models(config: LeadoutConfig) -> list[HubModel]:
    """Return the models that are no local folders or files, each once. ConfigurationError for a missing folder."""
    found: dict[str, tuple[str, ...]] = {}
    for section in (config.target, *config.drafters):
        if model_folder(section.model) is None:
            wanted = FILES + PICKLED * section.allow_pickled_weights + CODE * section.trust_remote_code
            found[section.model] = tuple(dict.fromkeys(found.get(section.model, ()) + wanted))
    return [HubModel(name, patterns) for name, patterns in found.items()]


def download(model: HubModel) -> None:
    """Bring the model's files into the cache; those that are there are not fetched again. ConfigurationError."""
    from huggingface_hub import snapshot_download

    try:
        # Some repositories hold the same weights twice, in the form of their first release.
        snapshot_download(model.name, allow_patterns=list(model.patterns), ignore_patterns=["original/*"])
    except (OSError, ValueError) as error:
        raise unknown_model(model.name, error) from error

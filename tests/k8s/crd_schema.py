"""Strict validation against a CRD: unknown fields are refused; a required field with a default may be missing."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml


@cache
def schema_of(file: Path) -> dict[str, Any]:
    """The strict form of the schema in `file`: openAPIV3Schema as JSON, or a whole CRD as YAML."""
    text = file.read_text(encoding="utf-8")
    content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    if content.get("kind") == "CustomResourceDefinition":
        (content,) = [version["schema"]["openAPIV3Schema"] for version in content["spec"]["versions"]]
    strict: dict[str, Any] = _strict(content)
    # The API server checks metadata by itself; CRDs leave it open.
    strict["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    strict["properties"].pop("status", None)
    return strict


def problems(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong with `document`, with the path of each fault."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return sorted(f"{'/'.join(map(str, error.path))}: {error.message}" for error in errors)


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    if isinstance(node.get("pattern"), str) and "(?i)" in node["pattern"][1:]:
        strict["pattern"] = "(?i)" + node["pattern"].replace("(?i)", "")  # Go allows it in the middle
    if node.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    properties = node.get("properties")
    if isinstance(properties, dict) and "additionalProperties" not in node:
        strict["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
        given = [name for name in node.get("required", []) if "default" not in properties.get(name, {})]
        strict["required"] = given
    return strict

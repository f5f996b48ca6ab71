"""The model card of a trained policy: its base model, the algorithm and the paper it is from."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.models.model_sources import BUILT_IN, find_source
from asymgrpo.objective.config import ObjectiveConfig
from asymgrpo.objective.presets import ALGORITHMS, algorithm, differences
from asymgrpo.secrets import redacted

NAMED = ("asymgrpo", "trl", "transformers", "torch")


def base_model_of(model: Any) -> str | None:
    """The name that a model was loaded by; of a built-in one not the path within the package.

    >>> from types import SimpleNamespace
    >>> base_model_of(SimpleNamespace(config=SimpleNamespace(_name_or_path=str(BUILT_IN["tiny"]))))
    'tiny'
    """
    name: str | None = getattr(model.config, "_name_or_path", None) or None
    built_in = {str(path): own for own, path in BUILT_IN.items()}
    return built_in.get(name, name) if name else None


def model_card(
    name: str,
    base: str | None,
    algorithm_name: str,
    objective: ObjectiveConfig,
    tags: list[str],
    data: str | None = None,
) -> str:
    """The card's text, with the header that the hub reads.

    >>> text = model_card("mine", "Qwen/Qwen3-4B-Base", "abc-grpo", algorithm("abc-grpo"), ["trl"])
    >>> "trained with ABC-GRPO ([arXiv 2601.03895](https://arxiv.org/abs/2601.03895))" in text
    True
    """
    papers = ALGORITHMS[algorithm_name].paper.split(", ")
    links = ", ".join(f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers)
    changed = differences(objective) if objective != algorithm(algorithm_name) else ""
    on_hub = base is not None and _is_on_hub(base)
    origin = f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{base}`"
    header = [f"model_name: {name}", "pipeline_tag: text-generation", "library_name: transformers"]
    header += [f"base_model: {base}"] if on_hub else []
    header += [f"datasets: {data}"] if data else []
    header += ["tags:", *(f"- {tag}" for tag in tags), *(f"- arxiv:{paper}" for paper in papers)]
    versions = [f"- {package} {importlib.metadata.version(package)}" for package in NAMED]
    pieces = f" Its objective differs from GRPO in `{changed}`." if changed else ""
    lines = [
        *("---", *header, "---", "", f"# {name}", ""),
        f"A fine-tuned version of {origin if base else 'a model without a name'}, "
        f"trained with {algorithm_name.upper()} ({links}) by asymgrpo on TRL.{pieces}",
        *("", "## Versions", "", *versions, ""),
    ]
    return "\n".join(lines)


def _is_on_hub(base: str) -> bool:
    try:
        return find_source(base).kind == "hub"
    except UserError:  # neither a name nor a folder that is still there
        return False


class ModelCard:
    """A trainer that writes this card in the place of TRL's."""

    args: Any
    model: Any
    _tag_names: list[str]
    base_model: str | None = None
    """What the policy was loaded by; taken from the model's configuration unless set."""

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """As TRL's, which names neither the algorithm nor a base model from a folder."""
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        more = [tags] if isinstance(tags, str) else list(tags or [])
        text = model_card(
            model_name or Path(self.args.output_dir).name,
            redacted({"base": self.base_model or base_model_of(self.model)})["base"],
            self.args.algorithm,
            self.args.objective(),
            list(dict.fromkeys([*self._tag_names, self.args.algorithm, *more])),
            dataset_name,
        )
        place = Path(folder or self.args.output_dir)
        place.mkdir(parents=True, exist_ok=True)
        (place / "README.md").write_text(text, encoding="utf-8")

"""Where a policy comes from: the built-in model, a hub id, a folder, an adapter or a GGUF file.

Importing this package is cheap: transformers and peft are imported when a model is loaded.
"""

from asymgrpo.models.lora import lora_config
from asymgrpo.models.model_sources import policy_spec_names
from asymgrpo.models.policy import Policy, load_policy

__all__ = ["Policy", "load_policy", "lora_config", "policy_spec_names"]

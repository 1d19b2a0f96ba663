"""The recipe: one dataclass per TOML section. The text under a field is its reference, and `--help` prints it.

A field's type says what it accepts: the checks, the command-line flags and `--help` all read it. What no single field
can say is checked in recipes/check_recipe.py; recipes/recipe_file.py reads and writes recipes. None of these needs
torch, so that the launcher and `--help` start at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints


class RecipeError(ValueError):
    """A recipe that cannot be run. `keys` are the keys at fault ("outer.lr"), the one to change first leading.

    `problems` holds one line each where several things are wrong; `str(error)` is always the first of them.
    """

    def __init__(self, message: str, *keys: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.keys = keys
        self.problems = problems or (message,)


class Limit(NamedTuple):
    """What a value must satisfy beyond its type: `says` completes "must be ..."."""

    says: str
    holds: Callable[[Any], bool]


METHOD_DEFAULT = -1.0
"""Value of a key that stands for the own number of its method or optimizer."""

METHOD_DEFAULTS = {
    "isoloco": (1.8, 0.8),
    "diloco": (0.7, 0.9),
    "diloco_sgd": (1.6, 0.0),
    "iso_c": (2.1, 0.0),
    "iso_cts": (3.1, 0.0),
    "tsv_m": (0.6, 0.0),
    "ties": (0.7, 0.0),
    "dare": (1.5, 0.0),
}
"""Learning rate and momentum of each outer method (IsoLoCo App. A: 178M, 8 groups, H = 30)."""

ISOTROPIC_METHODS = ("isoloco", "iso_c")
"""Outer methods that make averaged matrices isotropic."""

MERGING_METHODS = ("iso_cts", "tsv_m", "ties", "dare")
"""Outer methods that merge the groups' pseudo-gradients by a rule of the same name, instead of averaging them."""

OPTIMIZER_DEFAULTS = {"AdamW": (8e-4, 0.1), "Muon": (0.02, 0.01)}
"""Learning rate and weight decay of each inner optimizer (Muon: those of MuLoCo's code)."""

Count = Annotated[int, Limit("at least 1", lambda n: n >= 1)]
CountOrZero = Annotated[int, Limit("at least 0", lambda n: n >= 0)]
CountOrAuto = Annotated[int, Limit("at least 1, or -1 for the default", lambda n: n >= 1 or n == -1)]
CountOrZeroOrAuto = Annotated[int, Limit("at least 0, or -1 for the default", lambda n: n >= -1)]
Positive = Annotated[float, Limit("more than 0", lambda x: x > 0)]
PositiveOrZero = Annotated[float, Limit("at least 0", lambda x: x >= 0)]
PositiveOrAuto = Annotated[
    float, Limit("more than 0, or -1 for the method's default", lambda x: x > 0 or x == METHOD_DEFAULT)
]
PositiveOrZeroOrAuto = Annotated[
    float, Limit("at least 0, or -1 for the method's default", lambda x: x >= 0 or x == METHOD_DEFAULT)
]
Fraction = Annotated[float, Limit("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Limit("at least 0 and less than 1", lambda x: 0 <= x < 1)]
DecayOrAuto = Annotated[
    float,
    Limit("at least 0 and less than 1, or -1 for the method's default", lambda x: 0 <= x < 1 or x == METHOD_DEFAULT),
]
# Beyond this the clocks of the libraries below overflow, and nobody waits four months.
Seconds = Annotated[float, Limit("more than 0 and at most 1e7", lambda x: 0 < x <= 1e7)]
Name = Annotated[str, Limit("non-empty text", lambda s: bool(s.strip()) and "\0" not in s)]


@dataclass
class Job:
    """What belongs to the run as a whole."""

    dump_folder: Name = "./outputs"
    """Folder of everything that the run writes. A run that finds its own checkpoints there goes on from them."""
    description: str = ""
    """A line for people."""
    print_config: bool = False
    """Print the resolved recipe at the start."""


@dataclass
class Profiling:
    """torch.profiler traces."""

    enable_profiling: bool = False
    """Record a trace every `profile_freq` inner steps."""
    save_traces_folder: Name = "profile_traces"
    """Folder of the traces, below the replica's folder."""
    profile_freq: Count = 10
    """Inner steps from one trace to the next."""


@dataclass
class Metrics:
    """What is logged, how often and where. JSONL files are always written."""

    log_freq: Count = 10
    """Inner steps between two log lines."""
    enable_tensorboard: bool = True
    """Write TensorBoard event files."""
    save_tb_folder: Name = "tb"
    """Folder of the event files, below the replica's folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases as well, if it is installed."""


@dataclass
class Model:
    """The model and its tokenizer."""

    name: Literal["llama3"] = "llama3"
    """Model family: a Llama-style decoder."""
    flavor: Literal["debug", "178M", "512M", "1B"] = "debug"
    """Shape of the model (recipes/model_shape.py). 178M and 512M are the IsoLoCo paper's; debug and 1B are ours."""
    tokenizer_path: Name = "builtin:bpe4k"
    """A tiktoken rank file, or a built-in tokenizer: builtin:bpe4k, builtin:bpe8k, builtin:bpe16k."""


@dataclass
class Optimizer:
    """The inner optimizer, which trains each replica group on its own."""

    name: Literal["AdamW", "Muon"] = "AdamW"
    """AdamW for every parameter. Muon: orthogonalised momentum for the matrices inside the blocks, AdamW for embedding,
    head and norms; with outer.method = "diloco" this is MuLoCo."""
    lr: PositiveOrAuto = METHOD_DEFAULT
    """Peak learning rate; `[lr_scheduler]` shapes it. -1: 8e-4 for AdamW, 0.02 for Muon."""
    beta1: Decay = 0.9
    """AdamW, also inside Muon: decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW, also inside Muon: decay of the second moment."""
    eps: Positive = 1e-8
    """AdamW, also inside Muon: added to the root of the second moment."""
    weight_decay: PositiveOrZeroOrAuto = METHOD_DEFAULT
    """Decoupled weight decay of every parameter, embeddings and norms included. -1: 0.1 for AdamW (IsoLoCo App. A),
    0.01 for Muon."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """AdamW, also inside Muon: which of torch's implementations to use."""
    momentum: Decay = 0.95
    """Muon: decay of the momentum of a matrix, which is the sum of the gradients before."""
    nesterov: bool = False
    """Muon: look one step ahead, at gradient + momentum x the new momentum."""
    scale: Literal["spectral", "match_rms_adamw", "original"] = "spectral"
    """Muon: what times the learning rate all singular values of an update are. spectral: sqrt(rows / columns).
    match_rms_adamw: 0.2 sqrt(max(rows, columns)), for the lr and weight_decay of AdamW. original: sqrt(max(1, rows /
    columns))."""
    coefficients: Literal["dion", "polar_express", "muon"] = "dion"
    """Muon: the polynomials of Newton-Schulz, as outer.coefficients."""
    adamw_lr_factor: Positive = 1.0
    """Muon: learning rate of what AdamW updates, as a multiple of lr."""
    adamw_parameters: list[str] = field(default_factory=list)
    """Muon: names of the matrices that AdamW updates, * and ? allowed. Empty: embedding and head."""

    def __post_init__(self) -> None:
        default_lr, default_decay = OPTIMIZER_DEFAULTS.get(self.name, OPTIMIZER_DEFAULTS["AdamW"])
        self.lr = default_lr if self.lr == METHOD_DEFAULT else self.lr
        self.weight_decay = default_decay if self.weight_decay == METHOD_DEFAULT else self.weight_decay


@dataclass
class LRScheduler:
    """The inner learning rate as a function of the inner step; never restarted at a round."""

    warmup_steps: CountOrZeroOrAuto = -1
    """Steps of linear warm-up. -1: a tenth of total_steps, rounded down."""
    warmup_start_factor: Fraction = 0.1
    """Share of optimizer.lr at step 0."""
    total_steps: CountOrAuto = -1
    """Steps until the decay ends. -1: training.steps."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay after the warm-up."""
    min_lr_factor: Fraction = 0.1
    """Share of optimizer.lr where the decay ends."""


@dataclass
class Training:
    """Data, batch and length of the run."""

    dataset: Literal["builtin", "text"] = "builtin"
    """builtin: the English corpus that comes with the package. text: your files at dataset_path."""
    dataset_path: str = ""
    """For dataset = "text": a file, folder or glob of .jsonl, .jsonl.gz or .txt."""
    local_batch_size: Count = 8
    """Samples in one forward and backward pass, per data-parallel rank."""
    global_batch_size: CountOrAuto = -1
    """Samples per inner step of ONE replica group. A multiple of local_batch_size x data-parallel ranks: the rest is
    gradient accumulation. -1: no accumulation."""
    seq_len: Count = 2048
    """Tokens per sample."""
    max_norm: PositiveOrZero = 1.0
    """Clip gradients to this global L2 norm before each inner step. 0: no clipping."""
    steps: Count = 10000
    """Inner steps of the run, also the length of its schedule. A remainder of outer.sync_steps is a shorter last
    round."""
    seed: CountOrZero = 42
    """Seed of the initial weights and of the order of the data. The same in every group."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which parameters are gathered and layers compute. Parameters themselves are kept in float32."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed over the ranks of a group."""
    gc_freq: Count = 50
    """Inner steps between two runs of Python's garbage collector, which is off otherwise."""


@dataclass
class Data:
    """How samples are read."""

    text_key: Name = "text"
    """The key that holds a document's text in .jsonl files."""
    num_workers: CountOrZero = 0
    """Loader processes per rank. 0: the training process reads."""
    data_order: Literal["once"] = "once"
    """once: every sample once per epoch, each group its own run of samples in each round."""


@dataclass
class Parallelism:
    """How the ranks of one replica group share its model."""

    data_parallel_shard_degree: CountOrAuto = -1
    """Ranks over which FSDP shards the parameters and the batch. -1: all ranks not used by tensor parallelism."""
    tensor_parallel_degree: Count = 1
    """Ranks over which each layer is split. Divides heads, feed-forward width, vocabulary and seq_len."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """always: free gathered parameters after the forward pass. never: keep them for the backward pass. default: as
    always, except for the last unit, which the backward pass needs first."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits instead of computing the loss on vocabulary shards."""


@dataclass
class ActivationCheckpoint:
    """Recompute activations in the backward pass instead of keeping them."""

    mode: Literal["none", "full", "selective"] = "none"
    """full: every block. selective: some blocks."""
    selective_ac_option: Annotated[
        str, Limit('a whole number in quotes, at least "1"', lambda s: s.isascii() and s.isdigit() and int(s) >= 1)
    ] = "2"
    """For mode = "selective": recompute every n-th block."""


@dataclass
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile each block."""


@dataclass
class Outer:
    """The outer round, in which replica groups meet: average what each learned, correct the average, step."""

    method: Literal["isoloco", "diloco", "diloco_sgd", "iso_c", "iso_cts", "tsv_m", "ties", "dare"] = "isoloco"
    """isoloco: momentum on averages whose matrices were made isotropic. diloco: momentum on plain averages. diloco_sgd:
    the plain averages. iso_c: isoloco without momentum. iso_cts, tsv_m, ties, dare: merging rules from the literature
    in place of the average, without momentum unless it is set (IsoLoCo, Table 1)."""
    sync_steps: Count = 30
    """Inner steps from one round to the next (H)."""
    lr: PositiveOrAuto = METHOD_DEFAULT
    """Outer learning rate. -1: 1.8 for isoloco, 0.7 for diloco, 1.6 for diloco_sgd, 2.1 for iso_c, 3.1 for iso_cts, 0.6
    for tsv_m, 0.7 for ties, 1.5 for dare (IsoLoCo App. A, 178M, 8 groups)."""
    momentum: DecayOrAuto = METHOD_DEFAULT
    """Outer momentum. -1: 0.8 for isoloco, 0.9 for diloco, 0 for all others."""
    momentum_kind: Literal["nesterov", "momentum", "heavy_ball"] = "nesterov"
    """How the momentum enters the step."""
    orthogonalizer: Literal["newton_schulz", "svd"] = "newton_schulz"
    """isoloco, iso_c: how a matrix is orthogonalised. newton_schulz is the paper's fast version, svd the exact one."""
    coefficients: Literal["dion", "polar_express", "muon"] = "dion"
    """isoloco, iso_c with newton_schulz: the polynomials. dion: those that the paper cites."""
    scale: Literal["rms", "mean", "nuclear", "spectral"] = "rms"
    """isoloco, iso_c: the one singular value that all become. rms (the paper's with newton_schulz) or mean (its with
    svd) of the singular values; nuclear: their mean estimated without an SVD; spectral: sqrt(rows / columns)."""
    clip: Literal["", "high", "low"] = ""
    """isoloco, iso_c with svd: only lower singular values above the scale (high), or only raise those below (low)."""
    target: Literal["gradient", "update"] = "gradient"
    """isoloco, iso_c: make the averaged pseudo-gradient isotropic, or the update after momentum."""
    exclude: list[str] = field(default_factory=list)
    """isoloco, iso_c: names of parameters to leave as plain averages, * and ? allowed, e.g. ["output.weight"]."""
    sparsity: Decay = 0.1
    """ties and dare: share of each tensor's entries that is dropped, the smallest (ties) or any (dare)."""
    common_space_fraction: Fraction = 0.8
    """iso_cts: share of the singular directions that come from the average; the rest are the groups' own."""
    weights: Literal["uniform", "tokens"] = "uniform"
    """Weight of a group in the average: all alike, or by the tokens that it trained on since the last round."""
    bucket_mb: Positive = 256.0
    """Megabytes that a round may take at a time, for what travels between groups and for matrices under correction; a
    matrix that needs more takes it."""

    def __post_init__(self) -> None:
        default_lr, default_momentum = METHOD_DEFAULTS.get(self.method, METHOD_DEFAULTS["isoloco"])
        self.lr = default_lr if self.lr == METHOD_DEFAULT else self.lr
        self.momentum = default_momentum if self.momentum == METHOD_DEFAULT else self.momentum


@dataclass
class FaultTolerance:
    """Replica groups: how many, which one this is, and what happens when some fail."""

    num_replica_groups: Count = 2
    """Groups that the run is planned for. The first round waits for all of them."""
    replica_id: CountOrZero = 0
    """This group's number, stable across restarts. The launcher sets it."""
    min_replica_size: CountOrZero = 0
    """Live groups without which no round takes place. 0: 1 for one or two groups, a majority from three."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """What carries tensors between groups."""
    process_group_timeout_seconds: Seconds = 60.0
    """Longest transfer between groups before it counts as failed and the round is repeated."""
    heartbeat_timeout_seconds: Seconds = 5.0
    """Silence after which a group counts as gone."""
    join_timeout_seconds: Seconds = 600.0
    """How long a round waits at most for groups that are alive but not there yet."""
    quorum_timeout_seconds: Seconds = 3600.0
    """How long a group waits at most for enough others to hold a round."""
    start_wait_seconds: Seconds = 60.0
    """How long a start from checkpoints waits for groups that are missing, before it goes on without them."""
    lighthouse_port: Annotated[int, Limit("a port, or 0 for any free one", lambda n: 0 <= n <= 65535)] = 0
    """Port of the lighthouse that the launcher starts when the whole run is on this machine. 0: any free one."""
    max_restarts: CountOrZero = 10
    """Restarts of a group without a committed round in between before the launcher gives it up."""
    joiner_inner_state: Literal["checkpoint", "fresh"] = "checkpoint"
    """Inner optimizer of a group that comes back: from its own checkpoint if there is one, or reset."""
    max_exchange_retries: CountOrZero = 20
    """Times that a failed round is repeated before the group gives up."""


@dataclass
class Checkpoint:
    """Complete states on disk, from which a run goes on."""

    enable: bool = True
    """Write checkpoints. A group can be healed by another one without them."""
    folder: Name = "checkpoint"
    """Folder of the checkpoints, below job.dump_folder."""
    interval: Count = 500
    """Inner steps between two checkpoints, each taken at the next round boundary."""
    keep_latest_k: Annotated[
        int,
        Limit("0 (keep all) or at least 2: with one alone, a crash while writing loses it", lambda n: n == 0 or n >= 2),
    ] = 10
    """Checkpoints to keep. 0: all of them."""
    grace: Seconds = 30.0
    """Seconds in which a run that is told to stop must have stopped."""


@dataclass
class Validation:
    """Loss on held-out text, before the first step and after the last."""

    enable: bool = True
    """Measure it."""
    dataset: Literal["builtin", "text"] = "builtin"
    """builtin: the held-out part of the built-in corpus. text: your files at dataset_path."""
    dataset_path: str = ""
    """For dataset = "text": a file, folder or glob of .jsonl, .jsonl.gz or .txt."""
    steps: CountOrAuto = 16
    """Batches to measure on. -1: the whole set."""
    local_batch_size: Count = 8
    """Samples per batch and data-parallel rank."""


@dataclass
class Recipe:
    """One run. Attributes are the sections of the TOML file."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    outer: Outer = field(default_factory=Outer)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)


SECTIONS: dict[str, type] = get_type_hints(Recipe)
"""Section name -> its dataclass."""

KEYS: dict[str, Any] = {
    f"{section}.{key}": hint
    for section, cls in SECTIONS.items()
    for key, hint in get_type_hints(cls, include_extras=True).items()
}
"""Every key, "section.key" -> its type, with the `Limit` if it has one."""


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every key ("section.key") with its value, in the order of the dataclasses."""
    return {key: getattr(getattr(recipe, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS}


# --- Numbers that follow from the recipe ----------------------------------------------------------------------------


def total_steps(recipe: Recipe) -> int:
    """Length of the learning-rate schedule, in inner steps."""
    return recipe.training.steps if recipe.lr_scheduler.total_steps == -1 else recipe.lr_scheduler.total_steps


def warmup_steps(recipe: Recipe) -> int:
    """Inner steps of warm-up."""
    warmup = recipe.lr_scheduler.warmup_steps
    return total_steps(recipe) // 10 if warmup == -1 else warmup


def min_replica_groups(recipe: Recipe) -> int:
    """Live groups without which no round takes place: `fault_tolerance.min_replica_size` with its automatic value."""
    groups, wanted = recipe.fault_tolerance.num_replica_groups, recipe.fault_tolerance.min_replica_size
    automatic = 1 if groups <= 2 else groups // 2 + 1
    return wanted or automatic


def ranks_per_group(recipe: Recipe, num_ranks: int | None = None) -> tuple[int, int]:
    """(FSDP degree, TP degree) of a group of `num_ranks` ranks. None: as many as the degrees multiply to, -1 as 1.

    Raises RecipeError if the ranks cannot be arranged so.
    """
    shard, tp = recipe.parallelism.data_parallel_shard_degree, recipe.parallelism.tensor_parallel_degree
    if num_ranks is None:
        return max(shard, 1), tp
    if shard == -1 and num_ranks > 0 and num_ranks % tp == 0:
        return num_ranks // tp, tp
    if shard * tp == num_ranks:
        return shard, tp
    keys = ("parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree")
    wanted = f"a multiple of {tp}" if shard == -1 else f"{shard} x {tp} = {shard * tp}"
    raise RecipeError(
        f"{keys[0]} = {shard} and {keys[1]} = {tp} need {wanted} ranks per group, but there are {num_ranks}: "
        "change NGPU or the degrees",
        *keys,
    )


def global_batch_size(recipe: Recipe, dp_shard: int) -> int:
    """Samples per inner step of one group. Raises RecipeError if they cannot be split over `dp_shard` ranks."""
    local, wanted = recipe.training.local_batch_size, recipe.training.global_batch_size
    if wanted == -1:
        return local * dp_shard
    if wanted % (local * dp_shard):
        raise RecipeError(
            f"training.global_batch_size = {wanted} is not a multiple of {local * dp_shard}, which is "
            f"training.local_batch_size = {local} x {dp_shard} data-parallel rank{'s' * (dp_shard > 1)}",
            "training.global_batch_size",
            "training.local_batch_size",
            "parallelism.data_parallel_shard_degree",
        )
    return wanted

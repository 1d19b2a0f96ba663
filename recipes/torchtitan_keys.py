"""What torchtitan's TOML recipes (v0.1 and v0.2) can say and ours cannot, or say differently.

Someone who brings a torchtitan recipe learns for each such key what to write instead. A key at the value that asks for
nothing beyond what happens here anyway is accepted.
"""

from typing import NamedTuple


class TorchtitanKey(NamedTuple):
    """`advice` completes "torchtitan's KEY: "; `harmless` is the value that asks for nothing, if there is one."""

    advice: str
    harmless: object = None


PIPELINE = TorchtitanKey("pipeline parallelism is not supported")
CONTEXT = TorchtitanKey("context parallelism is not supported")
EXPERT = TorchtitanKey("experts are not supported")
FRAGMENTS = "not supported: the whole model meets in each round"
COMPLETE_CHECKPOINT = "not supported: a checkpoint is always complete, and a run goes on from the newest"

TORCHTITAN_KEYS: dict[str, TorchtitanKey] = {
    "job.config_file": TorchtitanKey("name the file in CONFIG_FILE"),
    "job.save_config_file": TorchtitanKey("not needed: config.toml in job.dump_folder holds the resolved recipe"),
    "job.custom_config_module": TorchtitanKey("not supported", ""),
    "profiling.profiler_active": TorchtitanKey("not supported", 1),
    "profiling.profiler_warmup": TorchtitanKey("not supported", 3),
    "profiling.enable_memory_snapshot": TorchtitanKey("not supported", False),
    "profiling.save_memory_snapshot_folder": TorchtitanKey("not supported", "memory_snapshot"),
    "metrics.disable_color_printing": TorchtitanKey("not supported: there are no colors", False),
    "metrics.save_for_all_ranks": TorchtitanKey("not supported: one rank per replica group logs", False),
    "model.hf_assets_path": TorchtitanKey("use model.tokenizer_path here: a tiktoken rank file, or builtin:bpe4k"),
    "model.converters": TorchtitanKey("not supported", []),
    "model.print_after_conversion": TorchtitanKey("not supported", False),
    "optimizer.early_step_in_backward": TorchtitanKey("not supported", False),
    "lr_scheduler.decay_ratio": TorchtitanKey("not supported: the decay begins right after the warm-up"),
    "lr_scheduler.lr_min": TorchtitanKey("use lr_scheduler.min_lr_factor here"),
    "training.batch_size": TorchtitanKey("use training.local_batch_size here"),
    "training.dataloader": TorchtitanKey("use data.num_workers here"),
    "training.enable_cpu_offload": TorchtitanKey("not supported", False),
    "training.dtype": TorchtitanKey("not supported: parameters are kept in float32", "float32"),
    "training.gc_debug": TorchtitanKey("not supported", False),
    "training.compile": TorchtitanKey("use compile.enable here"),
    "training.deterministic": TorchtitanKey("not supported", False),
    "parallelism.data_parallel_replicate_degree": TorchtitanKey(
        "use fault_tolerance.num_replica_groups here: replicas meet every outer.sync_steps", 1
    ),
    "parallelism.enable_async_tensor_parallel": TorchtitanKey("not supported", False),
    "parallelism.enable_compiled_autograd": TorchtitanKey("not supported", False),
    "parallelism.pipeline_parallel_degree": PIPELINE._replace(harmless=1),
    "parallelism.pipeline_parallel_first_stage_less_layers": PIPELINE,
    "parallelism.pipeline_parallel_last_stage_less_layers": PIPELINE,
    "parallelism.pipeline_parallel_layers_per_stage": PIPELINE,
    "parallelism.pipeline_parallel_schedule": PIPELINE,
    "parallelism.pipeline_parallel_schedule_csv": PIPELINE,
    "parallelism.pipeline_parallel_microbatch_size": PIPELINE,
    "parallelism.pipeline_parallel_expert_parallel_overlap": PIPELINE,
    "parallelism.module_fqns_per_model_part": PIPELINE,
    "parallelism.context_parallel_degree": CONTEXT._replace(harmless=1),
    "parallelism.context_parallel_load_balancer": CONTEXT,
    "parallelism.context_parallel_rotate_method": CONTEXT,
    "parallelism.expert_parallel_degree": EXPERT._replace(harmless=1),
    "parallelism.expert_tensor_parallel_degree": EXPERT._replace(harmless=1),
    "parallelism.expert_parallel_comm_backend": EXPERT,
    "checkpoint.enable_checkpoint": TorchtitanKey("use checkpoint.enable here"),
    "checkpoint.enable_ft_dataloader_checkpoints": TorchtitanKey(COMPLETE_CHECKPOINT, True),
    "checkpoint.initial_load_path": TorchtitanKey(COMPLETE_CHECKPOINT),
    "checkpoint.initial_load_model_only": TorchtitanKey(COMPLETE_CHECKPOINT),
    "checkpoint.initial_load_model_weights_only": TorchtitanKey(COMPLETE_CHECKPOINT),
    "checkpoint.initial_load_in_hf": TorchtitanKey("not supported", False),
    "checkpoint.initial_load_in_hf_quantized": TorchtitanKey("not supported", False),
    "checkpoint.last_save_model_only": TorchtitanKey(COMPLETE_CHECKPOINT, False),
    "checkpoint.last_save_model_weights_only": TorchtitanKey(COMPLETE_CHECKPOINT, False),
    "checkpoint.last_save_in_hf": TorchtitanKey("not supported", False),
    "checkpoint.export_dtype": TorchtitanKey(COMPLETE_CHECKPOINT, "float32"),
    "checkpoint.async_mode": TorchtitanKey("not needed: checkpoints are written in the background", "async"),
    "checkpoint.load_step": TorchtitanKey(COMPLETE_CHECKPOINT, -1),
    "checkpoint.exclude_from_loading": TorchtitanKey(COMPLETE_CHECKPOINT, []),
    "checkpoint.enable_first_step_checkpoint": TorchtitanKey("not supported", False),
    "checkpoint.create_seed_checkpoint": TorchtitanKey(
        "not needed: the initial weights do not depend on the sharding", False
    ),
    "checkpoint.load_only": TorchtitanKey("not supported", False),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": TorchtitanKey("not supported", []),
    "activation_checkpoint.early_stop": TorchtitanKey("not supported", False),
    "activation_checkpoint.memory_budget": TorchtitanKey("not supported"),
    "activation_checkpoint.visualize_memory_budget_pareto": TorchtitanKey("not supported", False),
    "activation_checkpoint.preserve_rng_state": TorchtitanKey("not needed: the model draws no random numbers", False),
    "activation_checkpoint.determinism_check": TorchtitanKey("not supported", "default"),
    "activation_checkpoint.debug": TorchtitanKey("not supported", False),
    "compile.components": TorchtitanKey("not supported: compile.enable compiles each block", ["model"]),
    "compile.backend": TorchtitanKey("not supported", "inductor"),
    "fault_tolerance.enable": TorchtitanKey("not needed: replica groups are always fault tolerant", True),
    "fault_tolerance.group_size": TorchtitanKey("use fault_tolerance.num_replica_groups here"),
    "fault_tolerance.process_group_timeout_ms": TorchtitanKey(
        "use fault_tolerance.process_group_timeout_seconds here, in seconds"
    ),
    "fault_tolerance.semi_sync_method": TorchtitanKey("use outer.method here"),
    "fault_tolerance.sync_steps": TorchtitanKey("use outer.sync_steps here"),
    "fault_tolerance.should_quantize": TorchtitanKey("not supported", False),
    "fault_tolerance.fragment_sync_delay": TorchtitanKey(FRAGMENTS, 0),
    "fault_tolerance.fragment_update_alpha": TorchtitanKey(FRAGMENTS, 0.0),
    "fault_tolerance.module_fqns_per_model_fragment": TorchtitanKey(FRAGMENTS, []),
    "fault_tolerance.num_fragments": TorchtitanKey(FRAGMENTS, 1),
    "validation.freq": TorchtitanKey("not supported: measured before the first step and after the last"),
    "validation.seq_len": TorchtitanKey("not supported: training.seq_len holds for both"),
    "validation.dataloader": TorchtitanKey("use data.num_workers here"),
    "debug.seed": TorchtitanKey("use training.seed here"),
    "debug.deterministic": TorchtitanKey("not supported", False),
    "debug.deterministic_warn_only": TorchtitanKey("not supported", False),
    "debug.moe_force_load_balance": TorchtitanKey("experts are not supported", False),
    "comm": TorchtitanKey("use the timeouts of [fault_tolerance] here"),
    "quantize": TorchtitanKey("quantised training is not supported"),
    "float8": TorchtitanKey("quantised training is not supported"),
    "mx": TorchtitanKey("quantised training is not supported"),
    "memory_estimation": TorchtitanKey("not supported", {"enable": False}),
    "experimental": TorchtitanKey("not supported"),
}
"""A key ("section.key") or a whole section -> what to do about it."""

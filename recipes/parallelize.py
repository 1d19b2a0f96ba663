"""How one replica group's ranks share the model: tensor parallel, then recomputation, compilation and FSDP2."""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from recipes.config import Recipe
from recipes.model import Block, Llama


def build_mesh(dp_shard: int, tp: int, device_type: str) -> DeviceMesh | None:
    """The group's ranks as a mesh with the axes "dp_shard" and "tp"; the ranks of one "tp" row see the same tokens.

    None if there is no process group: one process on its own, which parallelises nothing. `dp_shard * tp` is the number
    of ranks in the default process group.
    """
    if not dist.is_initialized():
        assert dp_shard * tp == 1, f"{dp_shard} x {tp} ranks need a process group"
        return None
    return init_device_mesh(device_type, (dp_shard, tp), mesh_dim_names=("dp_shard", "tp"))


def parallelize(model: Llama, mesh: DeviceMesh | None, recipe: Recipe) -> None:
    """Parallelise a model (on the meta device) in place as the recipe says. Parameter names stay as they are.

    Afterwards gradients are summed over the "dp_shard" ranks, not averaged: divide the loss by the group's tokens.
    One rank in float32 on a CPU keeps plain tensors; else each parameter is a DTensor, over "dp_shard" or both axes.
    Raises ValueError if a lower precision is asked for without a process group (`mesh` None).
    """
    low_precision = recipe.training.mixed_precision_param != "float32"
    if mesh is None and low_precision:
        raise ValueError(
            f"training.mixed_precision_param = {recipe.training.mixed_precision_param!r} needs a process group: "
            'start this with torchrun or set it to "float32"'
        )
    if mesh is not None and mesh["tp"].size() > 1:
        _apply_tensor_parallel(model, mesh["tp"], loss_parallel=not recipe.parallelism.disable_loss_parallel)
    _apply_activation_checkpoint(model, recipe)
    if recipe.compile.enable:
        for block in model.layers:
            assert isinstance(block, Block)
            # The arithmetic and not the module: names stay as they are, and FSDP2's hooks and the recomputation remain
            # outside the graph (torch 2.13 fails on recomputation of a tensor-parallel block inside one).
            block.residual = torch.compile(block.residual, fullgraph=True)  # type: ignore[method-assign]
    if mesh is not None and (mesh.size() > 1 or low_precision or mesh.device_type != "cpu"):
        _apply_fsdp(model, mesh["dp_shard"], recipe)


def _apply_tensor_parallel(model: Llama, tp_mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Split heads, feed-forward and vocabulary over the ranks (Megatron-LM, arXiv 1909.08053).

    In between, the residual stream and the norms are split over T (sequence parallel, arXiv 2205.05198).
    """
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "layers.*.attention.wq": ColwiseParallel(),
            "layers.*.attention.wk": ColwiseParallel(),
            "layers.*.attention.wv": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.*.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "layers.*.feed_forward.w1": ColwiseParallel(),
            "layers.*.feed_forward.w3": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    # What the embedding returns is still under way (an AsyncCollectiveTensor), and as the input of a compiled block it
    # gets no gradient in torch 2.13: the embedding would silently stop learning. A copy is an ordinary tensor.
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.clone())
    if not loss_parallel:
        # The logits are a view then; nobody changes them in place, which is all that this warning is about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _apply_activation_checkpoint(model: Llama, recipe: Recipe) -> None:
    mode = recipe.activation_checkpoint.mode
    every = {"none": 0, "full": 1, "selective": int(recipe.activation_checkpoint.selective_ac_option)}[mode]
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        block.recompute_in_backward = every > 0 and index % every == 0


def _apply_fsdp(model: Llama, dp_mesh: DeviceMesh, recipe: Recipe) -> None:
    """One unit per block, one for the embedding, one for the final norm and the head.

    Also over a single data-parallel rank: FSDP2 is what computes in bfloat16 from float32 parameters, and what reduces
    the norms' gradients over the tensor-parallel ranks.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.training.mixed_precision_param),
        reduce_dtype=getattr(torch, recipe.training.mixed_precision_reduce),
        # Activations have the compute dtype from the embedding on; a cast would round the RoPE tables, too.
        cast_forward_inputs=False,
    )
    reshard = recipe.parallelism.fsdp_reshard_after_forward
    fully_shard(model.tok_embeddings, mesh=dp_mesh, mp_policy=precision, reshard_after_forward=reshard != "never")
    for block in model.layers:
        fully_shard(block, mesh=dp_mesh, mp_policy=precision, reshard_after_forward=reshard != "never")
    # The backward begins with these two: by default they are not dropped just to be gathered again at once.
    last = [model.norm, model.output]
    fully_shard(last, mesh=dp_mesh, mp_policy=precision, reshard_after_forward=reshard == "always")
    fully_shard(model, mesh=dp_mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this FSDP2 asks for a reduction (average, pre-multiplied sum) that not every backend has.
            module.set_force_sum_reduction_for_comms(True)

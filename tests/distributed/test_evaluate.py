"""The validation loss is that of the full model on the same samples, whatever the sharding, and leaves no trace."""

import numpy as np
import pytest
import torch

from recipes.data import PackedSamples
from recipes.evaluate import validation_loss
from recipes.init_weights import initialize
from recipes.model import Llama
from recipes.model_shape import ModelShape
from recipes.parallelize import build_mesh, parallelize
from recipes.recipe_file import load_recipe
from recipes.tokenizer import load_tokenizer
from tests.run_ranks import run_ranks

SHAPE = ModelShape(vocab_size=4096, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=16)


def losses(dp_degree, tp):
    flags = ["--parallelism.data_parallel_shard_degree", str(dp_degree)]
    recipe = load_recipe(None, [*flags, "--parallelism.tensor_parallel_degree", str(tp), "--training.seq_len", "16"])
    mesh = build_mesh(dp_degree, tp, "cpu")
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, recipe)
    initialize(model, 1, "cpu")
    shards = list(model.parameters())  # what a round knows; while a unit is gathered, the model shows something else
    words = ["a quiet evening by the sea " * 40, "seven ships came in " * 33]
    samples = PackedSamples(words, load_tokenizer("builtin:bpe4k"), seq_len=16, seed=0, vocab_size=4096)

    def measure():
        return validation_loss(
            model,
            samples,
            num_batches=-1,
            local_batch_size=4 // dp_degree,
            mesh=mesh,
            dp_rank=torch.distributed.get_rank() // tp,
            dp_degree=dp_degree,
            device=torch.device("cpu"),
        )

    first = measure()
    with torch.no_grad():
        for parameter in shards:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.mul_(3.0)  # as a round changes the shards behind the units that a forward pass gathers
    return len(samples), first, measure()


@pytest.mark.slow
@pytest.mark.parametrize(("dp_degree", "tp"), [(2, 1), (1, 2)])
def test_sharded_equals_whole_and_sees_parameters_changed_in_between(dp_degree, tp):
    ((num_samples, *expected),) = run_ranks(1, losses, 1, 1)
    assert num_samples % 4, "the last batch is short"
    assert abs(expected[0] - expected[1]) > 1e-3
    for _, *found in run_ranks(dp_degree * tp, losses, dp_degree, tp):
        np.testing.assert_allclose(found, expected, rtol=1e-6)

"""Shapes of the Llama-style models that a recipe can name, and how many parameters they have.

Nothing here needs torch: the launcher, `--help` and `validate` read these shapes and must start at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The numbers that define one Llama-style decoder: SwiGLU, RMSNorm, RoPE, untied head, no biases."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int = 2048
    """Length of the RoPE table. It holds no parameters: a run sets it to its `training.seq_len`."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


def parameter_names(shape: ModelShape) -> list[str]:
    """The names of all parameters of the model, in the model's order."""
    in_layer = [
        *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
    ]
    in_layer = ["attention_norm.weight", *in_layer[:4], "ffn_norm.weight", *in_layer[4:]]
    layers = [f"layers.{layer}.{name}" for layer in range(shape.num_layers) for name in in_layer]
    return ["tok_embeddings.weight", *layers, "norm.weight", "output.weight"]


def num_parameters(shape: ModelShape) -> int:
    """Exact number of parameters, embedding and head included: 2Vd + L(attention + 3df + 2d) + d."""
    kv_dim = shape.num_kv_heads * shape.head_dim
    attention = 2 * shape.dim * shape.dim + 2 * shape.dim * kv_dim
    feed_forward = 3 * shape.dim * shape.ffn_dim
    norms = 2 * shape.dim
    return 2 * shape.vocab_size * shape.dim + shape.num_layers * (attention + feed_forward + norms) + shape.dim


def num_flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Floating-point operations per trained token, forward and backward: 6N + 12 L d T, torchtitan's convention.

    N leaves out the input embedding, which is a lookup; attention is counted as if it were not causal; recomputed
    activations are not counted.
    """
    num_multiplied = num_parameters(shape) - shape.vocab_size * shape.dim
    return 6 * num_multiplied + 12 * shape.num_layers * shape.dim * seq_len


FLAVORS: dict[str, ModelShape] = {
    # 1.9 M parameters: trains visibly within minutes on two CPU cores.
    "debug": ModelShape(vocab_size=4096, dim=128, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=384),
    # The IsoLoCo paper's two published shapes: exactly 177,622,016 and 512,398,848 parameters.
    "178M": ModelShape(vocab_size=32000, dim=1024, num_layers=9, num_heads=8, num_kv_heads=8, ffn_dim=2688),
    "512M": ModelShape(vocab_size=32000, dim=1536, num_layers=12, num_heads=12, num_kv_heads=12, ffn_dim=5440),
    # The paper trains a 1B model but does not publish its shape. This one is ours, by analogy: head dim 128 and an FFN
    # of about 8/3 dim rounded up to a multiple of 128; 1,041,836,032 parameters. Do not read it as the paper's.
    "1B": ModelShape(vocab_size=32000, dim=2048, num_layers=18, num_heads=16, num_kv_heads=16, ffn_dim=5504),
}

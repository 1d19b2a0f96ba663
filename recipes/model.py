"""A Llama-style decoder in plain PyTorch: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head, no biases.

The module names are torchtitan's (`layers.<i>.attention.wq`, `layers.<i>.feed_forward.w1`, ...); the arithmetic is that
of Hugging Face's `LlamaForCausalLM`, so weights can be exchanged by renaming. Nothing here knows about parallelism:
`recipes/parallelize.py` shards the modules, and attention reads its number of heads off what its projections return.

Shapes: B sequences, T positions, D model dimension, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from recipes.model_shape import ModelShape


def rope_tables(shape: ModelShape, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotary angle: two fp32 tensors (max_seq_len, E).

    Angle j of position t is t · theta^(-2j/E); the second half of E repeats the first (rotate-half convention of
    Hugging Face's Llama; RoFormer, arXiv 2104.09864, section 3.2).
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies = shape.rope_theta**-exponents  # (E/2,)
    positions = torch.arange(shape.max_seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)  # (max_seq_len, E)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys `x` (B, heads, T, E) by tables (T, E); computed in fp32, returned in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos + rotated * sin).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; each group of H/K query heads shares one key/value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)  # (B, T, H E), (B, T, K E), (B, T, K E)
        # The number of heads is read off, not configured: under tensor parallelism each rank has its share of them.
        q = rotate(q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), cos, sin)  # (B, H, T, E)
        k = rotate(k.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), cos, sin)  # (B, K, T, E)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, K, T, E)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return self.wo(mixed.transpose(1, 2).flatten(2))  # (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) · w3 x)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))  # (B, T, D)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)
        # A flag and not a wrapper module: a wrapper would put its own name into every parameter's name.
        self.recompute_in_backward = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute_in_backward and torch.is_grad_enabled():
            # Nothing in a block is random, so there is no RNG state to keep for the second pass.
            return checkpoint(self.residual, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
        return self.residual(x, cos, sin)

    def residual(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The block's arithmetic, apart from how much of it is remembered for the backward."""
        x = x + self.attention(self.attention_norm(x), cos, sin)  # (B, T, D)
        return x + self.feed_forward(self.ffn_norm(x))  # (B, T, D)


class Llama(nn.Module):
    """The decoder. Build it under `torch.device("meta")`; `init_weights.initialize` gives it memory and values."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        # Tables, not state: they follow from the shape, so no checkpoint holds them.
        cos, sin = rope_tables(shape)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token for int64 `tokens` (B, T), in the parameters' compute dtype.

        Under vocabulary parallelism the logits are a DTensor sharded over V, which
        `recipes.loss.cross_entropy_sum` takes as it is. Raises ValueError if T exceeds `shape.max_seq_len`.
        """
        seq_len = tokens.size(1)
        if seq_len > self.shape.max_seq_len:
            raise ValueError(
                f"a sequence of {seq_len} tokens is longer than the model's {self.shape.max_seq_len} positions: "
                "raise training.seq_len or pass shorter sequences"
            )
        cos, sin = self.rope_cos[:seq_len], self.rope_sin[:seq_len]  # (T, E)
        x = self.tok_embeddings(tokens)  # (B, T, D)
        for layer in self.layers:
            x = layer(x, cos, sin)  # (B, T, D)
        return self.output(self.norm(x))  # (B, T, V)

"""Roles of matrices by name, with the names of well-known models."""

import pytest

from isoloco.matrix_role import matrix_role

ROLES = {
    # torchtitan's and ours
    "tok_embeddings.weight": "embedding",
    "layers.0.attention.wq.weight": "hidden",
    "layers.0.feed_forward.w1.weight": "hidden",
    "output.weight": "head",
    "layers.1.moe.router.gate.weight": "router",
    "layers.1.moe.experts.w1": "hidden",
    # Llama, Qwen
    "model.embed_tokens.weight": "embedding",
    "model.layers.3.self_attn.o_proj.weight": "hidden",
    "model.layers.3.mlp.gate_proj.weight": "hidden",
    "model.layers.3.mlp.gate_up_proj.weight": "hidden",
    "lm_head.weight": "head",
    "score.weight": "head",
    # GPT-2, GPT-NeoX, OPT
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "embedding",
    "transformer.h.0.attn.c_attn.weight": "hidden",
    "gpt_neox.embed_in.weight": "embedding",
    "embed_out.weight": "head",
    "model.decoder.embed_positions.weight": "embedding",
    "model.decoder.project_in.weight": "hidden",
    # BERT, ALBERT, Funnel
    "bert.embeddings.word_embeddings.weight": "embedding",
    "bert.embeddings.token_type_embeddings.weight": "embedding",
    "bert.encoder.layer.0.attention.output.dense.weight": "hidden",
    "bert.encoder.layer.0.output.dense.weight": "hidden",
    "encoder.embedding_hidden_mapping_in.weight": "hidden",
    "funnel.encoder.blocks.0.1.attention.q_head.weight": "hidden",
    "classifier.weight": "head",
    # T5, Swin, ViT
    "shared.weight": "embedding",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embedding",
    "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": "hidden",
    "layers.0.blocks.0.attn.relative_position_bias_table": "embedding",
    "heads.head.weight": "head",
    "pos_embed": "embedding",
    # Mixtral, DeepSeek
    "model.layers.0.block_sparse_moe.gate.weight": "router",
    "model.layers.0.block_sparse_moe.experts.7.w1.weight": "hidden",
    "model.layers.5.mlp.gate.weight": "router",
    "model.layers.5.mlp.experts.0.gate_proj.weight": "hidden",
    "model.layers.5.mlp.shared_experts.down_proj.weight": "hidden",
    "model.layers.61.shared_head.head.weight": "head",
    # a feed-forward layer with a gate, and without experts
    "layers.0.ffn.gate.weight": "hidden",
    "layers.0.ffn.experts_of_nothing.weight": "hidden",
    # heads have common names, which mean a head at the end of a model only
    "decoder.output.weight": "head",
    "attention.output.weight": "hidden",
    "layers.0.output.weight": "hidden",
    "lm_heads.3.weight": "head",
    "policy_head.weight": "head",
    "attention.out_proj.weight": "hidden",
    # embeddings are projected, too
    "embed_proj.weight": "hidden",
    "tokEmbedding.weight": "embedding",
    "tok_emb.weight": "embedding",
    # layers without a name
    "0.weight": "hidden",
    "layers.2.weight": "hidden",
    # wrappers add parts to names
    "module._orig_mod.tok_embeddings.weight": "embedding",
    "layers.0._checkpoint_wrapped_module.attention.wq.weight": "hidden",
    "output.parametrizations.weight.original": "head",
}


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_the_role_of_a_matrix_follows_from_the_module_that_owns_it(name: str, role: str) -> None:
    assert matrix_role(name, list(ROLES)) == role


def test_a_gate_is_a_router_only_beside_experts() -> None:
    names = ["layers.0.ffn.gate.weight", "layers.0.ffn.up.weight"]
    assert matrix_role(names[0], names) == "hidden"
    assert matrix_role(names[0], [*names, "layers.0.ffn.experts.0.up.weight"]) == "router"
    assert matrix_role(names[0], [*names, "layers.1.ffn.experts.0.up.weight"]) == "hidden"

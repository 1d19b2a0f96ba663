"""What a matrix of a model is for, judged by its name: most are hidden layers, some are tables or last projections."""

import re
from collections.abc import Collection

# Parts of a name that wrappers put in (DDP, torch.compile, checkpointing, FSDP1, parametrizations, adapters).
_WRAPPERS = re.compile(
    r"module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|parametrizations|original\d*|base_layer"
)
_INSIDE_A_BLOCK = re.compile(r"\d+|.*(attn|attention|mlp|ffn|feed_?forward|block|layer).*")
_HEADS = {"lm_head", "lm_heads", "embed_out", "unembed", "unembedding"}
# Modules of these names are heads at the end of a model, and hidden layers inside a block (BERT's attention.output).
_HEADS_OUTSIDE_BLOCKS = re.compile(
    r"output|out|output_layer|output_proj|output_projection|classifier|score|logits|to_logits|(.+_)?heads?"
)
_TABLES = {"emb", "wte", "wpe", "bias"}
_MAPS = {"proj", "projection", "mapping", "linear", "dense", "mlp"}


def matrix_role(name: str, names: Collection[str]) -> str:
    """``"embedding"``, ``"head"``, ``"router"`` or ``"hidden"``: the role of the parameter ``name`` of a model.

    ``names``: those of all parameters of the model, as ``named_parameters()`` gives them. A name says what the module
    is that owns the weight (``tok_embeddings.weight``), or the parameter itself if it is a bare one (``pos_embed``).

    - embedding: whatever is called an embedding (``embed_tokens``, ``wte``, ``tok_emb``, T5's ``shared``) and tables of
      biases by position; not a projection of embeddings (``embed_proj``)
    - head: ``lm_head``, ``embed_out`` and the like anywhere; ``output``, ``classifier``, ... outside of blocks only, so
      that ``layers.0.attention.output`` stays a hidden matrix; ``head`` by itself everywhere
    - router: ``router``, and a ``gate`` beside ``experts``; not the ``gate`` or ``gate_proj`` of a feed-forward layer

    Anything else is hidden. The last layer of an ``nn.Sequential``, which has a number for a name, is not recognised.
    """
    path = _path(name)
    modules = path[:-1] if path[-1] == "weight" else path
    named = [index for index, part in enumerate(modules) if not part.isdigit()]
    if not named:
        return "hidden"
    owner, before = modules[named[-1]], modules[: named[-1]]
    words = set(owner.split("_"))

    if any("router" in part.split("_") for part in modules) or _is_gate_of_experts(modules, names):
        return "router"
    if _HEADS & set(modules) or owner == "head":
        return "head"
    if _HEADS_OUTSIDE_BLOCKS.fullmatch(owner) and not any(_INSIDE_A_BLOCK.fullmatch(part) for part in before):
        return "head"
    if owner == "shared" or (("embed" in owner or words & _TABLES) and not words & _MAPS):
        return "embedding"
    return "hidden"


def _path(name: str) -> list[str]:
    """The parts of a name in snake_case, without those of wrappers."""
    parts = [part for part in name.split(".") if not _WRAPPERS.fullmatch(part)]
    return [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part).lower() for part in parts]


def _is_gate_of_experts(modules: list[str], names: Collection[str]) -> bool:
    if "gate" not in modules:
        return False
    parent = modules[: modules.index("gate")]
    if parent and "moe" in parent[-1]:
        return True
    return any(_path(other)[: len(parent) + 1] == [*parent, "experts"] for other in names)

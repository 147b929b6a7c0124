"""The built-in model before training: a small Llama whose guided heads start as circuits."""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.builtin_model.curriculum import MAX_POSITION
from recipes.builtin_model.guides import Guide, GuidedShape
from recipes.builtin_model.losses import register_training_attention

VOCAB_SIZE = 4096
HEAD_DIM = 32


def build_model(seed: int, shape: GuidedShape) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // HEAD_DIM,
        num_key_value_heads=shape.hidden_size // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = register_training_attention()
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=1.0)
        elif "o_proj" in name or "down_proj" in name:
            # a layer's output must start below the embeddings, or noise hides which token it is
            torch.nn.init.normal_(parameter, std=0.3 / math.sqrt(parameter.shape[1]))
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    torch.nn.init.constant_(model.model.norm.weight, 0.1)  # for embeddings that large
    with torch.no_grad():
        _start_circuits(model, shape)
    return model


def _start_circuits(model: LlamaForCausalLM, shape: GuidedShape) -> None:
    """Start guided heads as simple forms of what they are to learn.

    Heads that fetch a name or an item write what they attend to (W_O ∝ W_Vᵀ). Heads that look
    something up attend to similar tokens (W_Q = W_K, where rotary frequencies are low). Random
    weights take longer to learn these two than all the rest, because training has saddle points
    there.
    """
    hidden, size = shape.hidden_size, HEAD_DIM
    names, first, second = (torch.linalg.qr(torch.randn(hidden, size)).Q for _ in range(3))
    low = [i for half in (0, size // 2) for i in range(half + size // 4 + 1, half + size // 2)]
    copies = {
        Guide.NAME: (names,),
        Guide.ASK: (names,),
        Guide.LINK: (first,),
        Guide.COPY: (first, second),
    }
    for guide, bases in copies.items():
        layer, heads = shape.guided[guide]
        attention = model.model.layers[layer].self_attn
        for head, basis in zip(heads, bases, strict=True):
            rows = slice(head * size, (head + 1) * size)
            attention.v_proj.weight[rows] = basis.T
            attention.o_proj.weight[:, rows] = 2.0 * basis
    for guide in (Guide.FILTER, Guide.COPY, Guide.COUNT):
        layer, heads = shape.guided[guide]
        attention = model.model.layers[layer].self_attn
        for head in heads:
            like = 2.0 * names[:, torch.randperm(size)[: len(low)]].T
            at = torch.tensor(low) + head * size
            attention.q_proj.weight[at] = like
            attention.k_proj.weight[at] = like

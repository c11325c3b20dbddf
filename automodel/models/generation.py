"""Sample completions, to see what a model has learned."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from automodel.models.auto import quiet_kernel_fallbacks

__all__ = ["complete"]


@torch.no_grad()
def complete(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 48,
    temperature: float = 0.7,
    seed: int = 0,
    choose: Callable[[int], int] = lambda token: token,
) -> str:
    """Return `prompt` with the text that the model continues it by.

    Each token is drawn from softmax(logits / temperature) over the whole sequence so far, by a generator of its own:
    global random state is neither read nor changed. It ends early at the tokenizer's end-of-text token.

    Args:
        model: A causal language model; in evaluation mode meanwhile.
        tokenizer: A transformers tokenizer.
        prompt: The beginning; must hold at least one token.
        max_new_tokens: The longest continuation.
        temperature: Positive; lower is more certain.
        seed: Of the draws.
        choose: Gets the id of each token that was drawn and returns the one to go on with. Ranks that hold a model
            together call this function together, and pass one that returns the same token on all of them.

    Raises:
        ValueError: the prompt holds no token, or the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer.encode(prompt)], device=device)
    if ids.numel() == 0:
        raise ValueError(f"the prompt {prompt!r} holds no token")
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        with quiet_kernel_fallbacks():
            for _ in range(max_new_tokens):
                logits = model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu()
                token = choose(
                    int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
                )
                if token == tokenizer.eos_token_id:
                    break
                ids = torch.cat([ids, torch.tensor([[token]], device=device)], dim=1)
    finally:
        model.train(was_training)
    text: str = tokenizer.decode(ids[0])
    return text

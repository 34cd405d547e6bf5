"""Action distributions over a net's output, by the names that specs use."""

import torch
from torch import distributions

from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.registry import DISTRIBUTIONS


@DISTRIBUTIONS.register
class Categorical(distributions.Categorical):
    """softmax(logits): (B, A) -> actions (B,)."""

    def __init__(self, logits):
        super().__init__(logits=logits, validate_args=False)


@DISTRIBUTIONS.register
class Argmax(distributions.Categorical):
    """All mass on the largest entry; ties share it equally: (B, A) -> actions (B,)."""

    def __init__(self, logits):
        self._values = logits
        is_max = logits == logits.max(dim=-1, keepdim=True).values
        super().__init__(probs=is_max / is_max.sum(dim=-1, keepdim=True), validate_args=False)


# by the action space, the distributions that fit it; the first is the default
FITTING = {'discrete': ('Categorical', 'Argmax')}


def action_type(space):
    """One of continuous, multi_continuous, discrete, multi_discrete, multi_binary, by a gymnasium space."""
    kind = type(space).__name__
    if kind == 'Box':
        if len(space.shape) != 1:
            raise SpecError(f'action space {space}: only boxes of one axis are supported')
        return 'continuous' if space.shape == (1,) else 'multi_continuous'
    kinds = {'Discrete': 'discrete', 'MultiDiscrete': 'multi_discrete', 'MultiBinary': 'multi_binary'}
    if kind not in kinds:
        raise SpecError(f'action space {space} is not supported; supported: Box, {", ".join(kinds)}')
    return kinds[kind]


def pick(name, space, where):
    """The distribution class for an action space. Raises: SpecError naming those that fit."""
    kind = action_type(space)
    fitting = FITTING.get(kind, ())
    if not fitting:
        raise SpecError(f'{where}: no distribution for {kind} actions ({space}) is built yet')
    name = fitting[0] if name in (None, 'default') else name
    if name not in fitting:
        raise SpecError(f"{where}: '{name}' does not fit {kind} actions{suggest(name, fitting)}")
    return DISTRIBUTIONS.get(name)


@torch.no_grad()
def greedy(logits):
    """The action that Argmax would take, without building it where no two entries tie. (B, A) -> (B,)."""
    best, actions = logits.max(dim=-1)
    if int((logits == best.unsqueeze(-1)).sum()) == len(actions):
        return actions
    return Argmax(logits).sample()

"""The agent that learns nothing: a baseline, and the simplest run."""

from slm_lab.agent import policy
from slm_lab.agent.algorithm.base import COMMON_KEYS, NOT_TRAINED, Algorithm
from slm_lab.lib.keys import Key, leftover
from slm_lab.lib.registry import ALGORITHMS


@ALGORITHMS.register
class Random(Algorithm):
    """Samples the action space uniformly. It has no nets; its memory is filled, and emptied if it is on-policy.

    Spec example: {"name": "Random"}
    """

    KEYS = {
        'name': Key('str'),
        'explore_var_spec': Key('null', None),
        **{k: leftover() for k in COMMON_KEYS if k not in ('name', 'explore_var_spec')},
    }
    NEEDS_NET = False

    def act(self, states, evaluating=False):
        rng = self.eval_rng if evaluating else self.rng
        return policy.random_actions(self.world.action_space, len(states), rng)

    def train(self, memory, frame):
        if memory.ON_POLICY and memory.is_due(1):
            memory.sample(frame)
        return NOT_TRAINED

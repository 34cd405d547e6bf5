"""Self-imitation: an actor-critic that also learns from what once went better than it expects now."""

import numpy as np

from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import NOT_TRAINED, Trained
from slm_lab.agent.algorithm.ppo import PPO
from slm_lab.agent.memory.batch import Layout
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.keys import Key, read_values
from slm_lab.lib.maths import discounted_returns
from slm_lab.lib.registry import ALGORITHMS, MEMORIES

SIL_KEYS = {
    'sil_policy_loss_coef': Key('number', note='weight of the self-imitation policy loss'),
    'sil_val_loss_coef': Key('number', note='weight of the self-imitation value loss'),
    'training_batch_iter': Key('int', low=1, note='self-imitation updates on each batch'),
    'training_iter': Key('int', low=1, note='self-imitation batches of each training'),
}
REPLAYS = ('Replay', 'PrioritizedReplay')


def sil_losses(log_probs, values, returns):
    """Losses of self-imitation, with A = max(R − V, 0). Oh et al. 2018, equations 2 and 3.

    Args:
        log_probs, values, returns: log π(a|s), V(s) and R (B,)
    Returns: the policy loss −mean(log π A), through whose A no gradient flows; the value loss mean(A²) / 2; A
    """
    advantages = (returns - values).clamp(min=0)
    fixed = advantages.detach()
    return -(log_probs * fixed).mean(), advantages.square().mean() / 2, fixed


def split_memory(memory, where):
    """A memory spec as (that of the on-policy memory, that of the replay, whose keys lie beside them)."""
    name = memory.get('sil_replay_name') or 'Replay'
    if name not in REPLAYS:
        raise SpecError(f"{where}.sil_replay_name: '{name}' is no replay{suggest(name, REPLAYS)}")
    of_replay = MEMORIES.get(name).KEYS.keys() - {'name'}
    own = {k: v for k, v in memory.items() if k not in of_replay and k != 'sil_replay_name'}
    return own, {'name': name, **{k: v for k, v in memory.items() if k in of_replay}}


class SelfImitation:
    """What self-imitation adds to an actor-critic: a replay of returns, and training from it."""

    @classmethod
    def resolve_memory(cls, memory, where):
        own, replay = split_memory(memory, where)
        values, ignored = super().resolve_memory(own, where)
        return {**values, 'sil_replay': read_values(MEMORIES.get(replay['name']).KEYS, replay, where)}, ignored

    def __init__(self, spec, world, seed, place=0, check=False):
        super().__init__(spec, world, seed, place, check)
        replay = spec['memory']['sil_replay']
        layout = Layout.of(world.observation_space, world.action_space)
        # holds the return of each transition in the place of its reward
        rng = rng_lib.generator(seed, 'sil_replay')
        self.replay = MEMORIES.get(replay['name'])(replay, layout, world.num_envs, rng)

    def train_on(self, batch):
        """Trains as the parent does, remembers the batch, then trains from the replay once it holds a batch.

        The loss is the parent's plus the mean of the self-imitation updates'.
        """
        own = super().train_on(batch)
        self.remember(batch)
        sil = self.train_from_replay() if self.replay.size >= self.replay.batch_size else NOT_TRAINED
        losses = [trained.loss for trained in (own, sil) if trained.opt_steps]
        return Trained(sum(losses), own.opt_steps + sil.opt_steps, own.entropy) if losses else NOT_TRAINED

    def remember(self, batch):
        """Adds each transition of a batch (T, N, …) and its return to the replay, step by step, env 0 first."""
        flat = batch._replace(rewards=self.returns_to_remember(batch))
        self.replay.add(*(getattr(flat, name).flatten(0, 1).numpy(force=True) for name in self.replay.arrays))

    def returns_to_remember(self, batch):
        """Discounted Monte-Carlo returns (T, N).

        Of an episode that a time limit or the batch's end cuts, the rewards to come are unknown. Left out, its return
        would be too low and good actions would look bad, so it ends in V of the true successor.
        """
        _, next_values = self.calc_values(batch)
        return discounted_returns(batch.rewards, batch.terminated, batch.truncated, next_values, self.spec['gamma'])

    def train_from_replay(self):
        """training_iter batches, training_batch_iter updates on each. Returns: Trained"""
        losses, num_steps = [], 0
        for _ in range(self.spec['training_iter']):
            batch = self.sample(self.replay, 0)  # only importance weights, which it has none of, go by the frame
            for _ in range(self.spec['training_batch_iter']):
                taken = self.imitate(batch)
                if not taken:
                    break  # the same batch would give it again
                losses.append(sum(taken))
                num_steps += len(taken)
        return Trained(float(np.mean(losses)), num_steps) if losses else NOT_TRAINED

    def imitate(self, batch):
        """One update on a batch (B, …) of the replay. Returns: the losses of the optimizer steps taken."""
        log_probs = self.distribution(self.policy_output(batch.states)).log_prob(batch.actions)
        policy_loss, value_loss, advantages = sil_losses(log_probs, self.values(batch.states), batch.rewards)
        taken = self.step(self.spec['sil_policy_loss_coef'] * policy_loss, self.spec['sil_val_loss_coef'] * value_loss)
        if taken and hasattr(self.replay, 'update_priorities'):
            self.replay.update_priorities(advantages.numpy(force=True))
        return taken

    def state_dict(self):
        return {**super().state_dict(), 'replay': self.replay.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.replay.load_state_dict(state['replay'])


@ALGORITHMS.register
class SIL(SelfImitation, ActorCritic):
    """Actor-critic with self-imitation learning. Oh et al. 2018.

    1. train as ActorCritic does, on the batch of the on-policy memory
    2. put its transitions, each with its return, into a replay
    3. training_iter times: draw a batch of the replay; training_batch_iter optimizer steps on it towards the actions
       whose return R was above V(s), along sil_policy_loss_coef · −log π(a|s) max(R − V, 0)
       + sil_val_loss_coef · max(R − V, 0)² / 2

    The keys of the replay stand beside those of the on-policy memory. With PrioritizedReplay max(R − V, 0) is the
    priority.

    Spec example: ActorCritic's, with "name": "SIL", "sil_policy_loss_coef": 0.5, "sil_val_loss_coef": 0.5,
    "training_batch_iter": 4, "training_iter": 8; memory: {"name": "OnPolicyReplay", "sil_replay_name": "Replay",
    "batch_size": 32, "max_size": 10000, "use_cer": true}
    """

    KEYS = {**ActorCritic.KEYS, **SIL_KEYS}


@ALGORITHMS.register
class PPOSIL(SelfImitation, PPO):
    """PPO with self-imitation learning: as SIL, with PPO's training in the first place. Oh et al. 2018.

    Spec example: PPO's, with "name": "PPOSIL", "sil_policy_loss_coef": 1.0, "sil_val_loss_coef": 1.0,
    "training_batch_iter": 4, "training_iter": 4; memory: {"name": "OnPolicyBatchReplay", "sil_replay_name": "Replay",
    "batch_size": 32, "max_size": 10000, "use_cer": true}
    """

    KEYS = {**PPO.KEYS, **SIL_KEYS}

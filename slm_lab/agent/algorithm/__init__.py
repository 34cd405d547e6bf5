"""Algorithms. Importing the package registers every one."""

from slm_lab.agent.algorithm import actor_critic, crossq, dqn, ppo, random, reinforce, sarsa, sil, soft_actor_critic  # noqa: F401

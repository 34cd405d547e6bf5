"""Algorithms. Importing the package registers every one."""

from slm_lab.agent.algorithm import actor_critic, dqn, ppo, random, reinforce, sarsa  # noqa: F401

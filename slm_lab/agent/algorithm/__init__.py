"""Algorithms. Importing the package registers every one."""

from slm_lab.agent.algorithm import dqn, random, sarsa  # noqa: F401

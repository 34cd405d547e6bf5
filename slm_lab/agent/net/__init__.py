"""Nets, their optimizers and target updates. Importing the package registers every net."""

from slm_lab.agent.net import conv, hydra, mlp, recurrent  # noqa: F401

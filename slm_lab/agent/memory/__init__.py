"""Memories of transitions. Importing the package registers every memory."""

from slm_lab.agent.memory import on_policy, prioritized, replay  # noqa: F401

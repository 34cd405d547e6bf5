"""SLM Lab: deep reinforcement learning in PyTorch, one JSON spec per experiment."""

__version__ = '1.0.0'

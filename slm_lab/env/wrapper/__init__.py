"""Wrappers around a whole vector env. The file says whether a wrapper has state to save.

- base: what all of them share
- transform: no state
- stateful: state of their own, saved under their name
"""

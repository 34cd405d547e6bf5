"""Experiment: sessions, trials and searches, and what they keep on disk."""

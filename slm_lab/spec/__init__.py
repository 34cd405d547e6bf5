"""Specs: reading, checking, extending, ticking, and what may change in one when its run is resumed."""

"""Names that a spec may use, and the classes behind them.

Each class registers itself where it is defined and declares its spec keys as `KEYS`. A registry knows its home
package by name and imports it at the first lookup, so that `spec` can check names without importing the rooms above.
"""

import importlib

from slm_lab.lib.errors import SpecError, suggest


class Registry:
    def __init__(self, kind, home):
        self.kind, self.home, self._entries = kind, home, {}

    def register(self, entry):
        """Class or function decorator: makes it known under its own name."""
        self._entries[entry.__name__] = entry
        return entry

    def names(self):
        importlib.import_module(self.home)
        return sorted(self._entries)

    def get(self, name, where=''):
        """Raises: SpecError when the name is unknown, with the nearest match and all known names."""
        names = self.names()
        if name not in names:
            raise SpecError(f"{where or self.kind}: {self.kind} '{name}' is unknown{suggest(name, names)}")
        return self._entries[name]


ALGORITHMS = Registry('algorithm', 'slm_lab.agent.algorithm')
MEMORIES = Registry('memory', 'slm_lab.agent.memory')
NETS = Registry('net', 'slm_lab.agent.net')
POLICIES = Registry('action policy', 'slm_lab.agent.policy')
DISTRIBUTIONS = Registry('distribution', 'slm_lab.agent.distribution')
ENV_TABLES = Registry('env key table', 'slm_lab.env')

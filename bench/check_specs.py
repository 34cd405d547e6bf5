"""Checks every key of every spec in a file of old specs; no env is built.

    python bench/check_specs.py specs.json

The file is one JSON object: {spec file: {spec name: spec}}, at any depth. Prints how many pass, and for the rest each
reason with its number of specs.
"""

import argparse
import collections
import logging
import re

from slm_lab.lib import files
from slm_lab.lib.errors import LabError
from slm_lab.spec import spec_util, templates


def specs_of(tree):
    """Yields (name, spec) of every spec in a tree of dicts."""
    for name, value in tree.items():
        if isinstance(value, dict) and 'agent' in value:
            yield name, value
        elif isinstance(value, dict):
            yield from specs_of(value)


def reason_of(name, spec):
    """The line with which a spec is refused, without its own name; None if it passes, a template with all its specs."""
    try:
        specs = templates.expand(name, spec) if templates.is_template(spec) else {name: spec}
        for each, values in specs.items():
            spec_util.prepare({**spec_util.copy_of(values), 'name': each})
    except LabError as e:
        return re.sub(rf'{re.escape(name)}[\w.+=-]*', 'SPEC', str(e))
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('file')
    logging.getLogger('slm_lab').setLevel(logging.ERROR)
    reasons = collections.Counter()
    passed = 0
    for name, spec in specs_of(files.read_json(parser.parse_args().file)):
        reason = reason_of(name, spec)
        if reason is None:
            passed += 1
            continue
        reasons[re.sub(r'Known: .*', '', reason)] += 1
    print(f'{passed} pass, {sum(reasons.values())} do not')
    for reason, n in reasons.most_common():
        print(f'{n:4d}  {reason}')


if __name__ == '__main__':
    main()

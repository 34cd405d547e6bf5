"""What the documents claim about names and files, held against the code."""

import re
from pathlib import Path

from slm_lab.experiment.session import Session
from slm_lab.lib.files import parse_json, read_json
from slm_lab.lib.registry import ALGORITHMS, MEMORIES, NETS
from slm_lab.spec import spec_util
from slm_lab.spec.resume_rules import MAY_CHANGE

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
RESUME = (ROOT / 'docs' / 'resume.md').read_text()


def built_session():
    spec = spec_util.get('demo.json', 'dqn_cartpole')
    spec['meta'].update(random_seed=0, rigorous_eval=1)
    return Session(spec_util.session_spec(spec, 0), store=False)


def test_the_table_of_what_is_kept_names_every_part_of_the_state_tree():
    session = built_session()
    tree = session.state_dict()
    parts = {key for key in tree if key != 'agent'} | {f'agent.{key}' for key in tree['agent']}
    session.close()
    documented = set(re.findall(r'^\| `([\w.]+)` \|', RESUME, re.MULTILINE))
    assert documented == parts


def test_every_key_that_may_change_on_resume_is_documented():
    for place in MAY_CHANGE:
        key = place.rsplit('.', 1)[-1]
        if key in ('name', 'max_trial', 'random_seed'):  # a label, search settings, the drawn seed
            continue
        words = {'max_session': 'more sessions'}
        assert words.get(key, f'`{key}`') in RESUME, place


def test_the_readme_lists_every_algorithm_memory_and_net():
    for name in [*ALGORITHMS.names(), *MEMORIES.names(), *NETS.names()]:
        assert f'`{name}`' in README, name


def test_specs_and_files_that_the_readme_names_exist():
    for file, name in re.findall(r'`([\w/]+\.json)` `(\w+)`', README):
        assert name in read_json(spec_util.find_file(file))
    for file in re.findall(r'`(agent/[\w/]+\.py)`', README):
        assert (ROOT / 'slm_lab' / file).is_file()
    for link in re.findall(r'\]\(([\w/]+\.md)\)', README + RESUME):
        assert (ROOT / link).is_file(), link


def test_the_spec_that_the_readme_shows_passes_check():
    text = re.search(r'```json\n(.*?)```', README, re.DOTALL)[1]
    spec = parse_json(text)['dqn_cartpole'] | {'name': 'dqn_cartpole'}
    assert spec_util.prepare(spec)

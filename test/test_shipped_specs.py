"""Every shipped spec passes the check; shortened as `override_spec(spec, 'test')` does, it trains and can be saved."""

import json
import re

import gymnasium
import pytest
from resume import TS

from slm_lab.env.registration import current_id
from slm_lab.experiment.session import Session
from slm_lab.lib import paths
from slm_lab.lib.state import check_tree
from slm_lab.spec import search_space, spec_util, templates

FILES = {
    str(path.relative_to(paths.SPEC_DIR)): json.loads(path.read_text())
    for path in sorted(paths.SPEC_DIR.rglob('*.json'))
    if not path.name.startswith('_')
}

# what an env imports, by a part of its entry point
PACKAGES = {'envs.box2d': ('Box2D',), 'envs.mujoco': ('mujoco', 'imageio')}
ATARI = re.compile(r'(\w+)NoFrameskip-v4')


def skip_without_packages(env_name):
    """Skips a test whose env comes with an extra that is not installed."""
    needed = ['ale_py']
    if not ATARI.fullmatch(env_name):
        made_by = str(gymnasium.spec(current_id(env_name)).entry_point)
        needed = [package for part, packages in PACKAGES.items() if part in made_by for package in packages]
    for package in needed:
        pytest.importorskip(package)


def trained():
    """[(file, name)] of the specs that train: of a template the first, of those for Atari games one of each kind.

    What is left out differs in the env alone: all games show the same images.
    """
    found, seen = [], set()
    for file, specs in FILES.items():
        for name, spec in specs.items():
            name = templates.names(name, spec)[0] if templates.is_template(spec) else name
            if 'NoFrameskip' in json.dumps(spec):
                env = {key: value for key, value in spec['env'][0].items() if key not in ('name', 'max_frame')}
                kind = json.dumps([spec['agent'], env])
                if kind in seen:
                    continue
                seen.add(kind)
            found.append((file, name))
    return found


def searches():
    """[(file, name)] of the specs with a search."""
    specs = [(file, name, spec) for file in FILES for name, spec in FILES[file].items()]
    return [(file, name) for file, name, spec in specs if spec.get('search') and not templates.is_template(spec)]


@pytest.mark.parametrize(('file', 'name'), searches(), ids=str)
def test_the_trials_of_a_shipped_search_can_run_and_read_what_is_searched_over(file, name):
    spec = spec_util.get(file, name, TS)
    spaces = search_space.parse(spec)
    for trial in range(min(search_space.count_trials(spec), 4)):
        values = search_space.draw(spaces, 0, trial)
        search_space.check(spec, spaces, values)
        _, ignored = spec_util._resolve(search_space.apply(spec, values))
        unread = {place.removeprefix(f'{name} > ') for place in ignored}
        assert not [place for place in values if any(f'{place}.'.startswith(f'{key}.') for key in unread)]


@pytest.mark.parametrize(('file', 'name'), trained(), ids=str)
def test_a_shipped_spec_trains(file, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working directory
    spec = spec_util.get(file, name, TS)
    skip_without_packages(spec['env'][0]['name'])
    spec['meta'].update(predir=str(tmp_path), random_seed=0)
    spec = spec_util.session_spec(spec_util.tick(spec_util.override_spec(spec, 'test'), 'trial'), 0)
    # hundreds of images a batch, room for a million of them and many epochs would take seconds and tell no more
    for part, key, most in (
        ('memory', 'batch_size', 8),
        ('memory', 'max_size', 200),
        ('algorithm', 'training_epoch', 2),
    ):
        values = spec['agent'][0][part]
        if key in values:
            values[key] = min(values[key], most)
    spec['env'][0].setdefault('resume', 'replay')  # what the probe of 'auto' finds is known per env, not per spec
    session = Session(spec, 'train', store=False)
    session.run()
    assert session.clock.frame >= 40 and len(session.agent.body.train_df) >= 4
    if session.agent.algorithm.NEEDS_NET:
        assert session.clock.opt_step > 0
    check_tree(session.state_dict())


@pytest.mark.parametrize('file', FILES)
def test_every_spec_of_a_file_passes_the_check_and_names_an_env_of_today(file):
    checked = []
    for name, spec in FILES[file].items():
        checked += spec_util.get_all(file, name, TS) if templates.is_template(spec) else [spec_util.get(file, name, TS)]
    for env_name in [spec['env'][0]['name'] for spec in checked]:
        skip_without_packages(env_name)
        game = ATARI.fullmatch(env_name)
        assert gymnasium.spec(f'ALE/{game[1]}-v5' if game else env_name)

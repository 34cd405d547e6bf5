"""The command of the lab: reads what is to be run, hands it over, and turns errors into one line and an exit status."""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from slm_lab.experiment.stop import StopRequest, parse_duration
from slm_lab.lib.errors import LabError, ResumeError, SpecError, suggest

EPILOG = """\
forms:
  run_lab.py                              the jobs of job/experiments.json
  run_lab.py JOB.json                     jobs: {"spec file": {"spec name": "mode"}}
  run_lab.py JOB.json --resume            go on with a job that was interrupted, or try again what failed in it
  run_lab.py --doctor                     what the lab finds here: versions, machine, data folder; status 1 if amiss
  run_lab.py SPEC_FILE SPEC_NAME MODE     one spec; the file as given, else under slm_lab/spec/

modes:
  dev             one session, every train step checked, rendered where there is a display, with TensorBoard's event
                  files in the run's log folder
  train           a new run, in data/<spec name>_<timestamp>/
  train@RUN       continue a run exactly where it stopped, or extend it after raising max_frame in the spec;
                  RUN is its folder, or `latest` for the newest run of this spec (dev@RUN likewise); or a trial of a
                  search, by its <name>_t<i>_spec.json
  enjoy@RUN       play the best nets of a run, or of a session by its _spec.json; writes nothing
  search          many trials, over the values that the spec's "search" names, with their table and graphs (needs Ray)
  search@RUN      go on with a search: trials that have ended stay as they are, the others go on or start
  verify@RUN      train again from a run's previous checkpoint to its newest and compare; exit status 1 if they differ

The name of a template (a spec with spec_params) runs each of its specs, as many at a time as the machine carries;
`<name>_<value>` runs one of them. RUN is then <name>_<timestamp>, the folder of any of the runs, or `latest`: finished
ones stay as they are, the others go on or start.
A new run may start from the nets of another (transfer, not continuation): "load_net": "<run folder>" in the agent spec.
Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint, print how to resume, and exit with 128 + the signal's number.

exit status: 0 done (or stopped by --stop-after), 1 a session failed or verify differs, 2 bad input, 130/143/138 stopped
"""

MODES = ('dev', 'train', 'search', 'enjoy', 'verify')
NEED_RUN = ('enjoy', 'verify')

INSTALL = 'bin/lab brings its own environment; in yours: pip install -c constraints.txt -e .'


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog='run_lab.py',
        description='Trains reinforcement-learning agents from specs.',
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='run_lab.py [--stop-after TIME] [--force] [JOB.json [--resume] | SPEC_FILE SPEC_NAME MODE]',
    )
    parser.add_argument('words', nargs='*', metavar='JOB.json | SPEC_FILE SPEC_NAME MODE', help=argparse.SUPPRESS)
    parser.add_argument('--stop-after', metavar='TIME', help='checkpoint and exit with status 0 after e.g. 5h50m')
    parser.add_argument('--force', action='store_true', help='train and dev: start also where memory will not do')
    parser.add_argument('--resume', action='store_true', help='go on with an interrupted job')
    parser.add_argument('--doctor', action='store_true', help='report on packages, machine and data folder')
    args = parser.parse_args(argv)
    if args.doctor and (args.words or args.stop_after or args.force or args.resume):
        raise SpecError('--doctor runs nothing; give it alone')
    if args.resume and len(args.words) == 3:
        raise SpecError(f'--resume is for job files; to go on with a run, give the mode {args.words[2]}@<run folder>')
    if args.force and len(args.words) == 3 and args.words[2].partition('@')[0] not in ('train', 'dev'):
        raise SpecError(f'--force is for train and dev; {args.words[2]} does not estimate memory')
    if len(args.words) not in (0, 1, 3):
        raise SpecError(f'{len(args.words)} arguments: give none, a job file, or SPEC_FILE SPEC_NAME MODE (see --help)')
    return args


def parse_mode(text):
    """Splits `train@data/run` at its first @. Returns: (mode, prename or None). Raises: SpecError"""
    mode, at, prename = text.partition('@')
    if mode not in MODES:
        raise SpecError(f"mode '{mode}' is unknown{suggest(mode, MODES)}")
    if at and not prename:
        raise SpecError(f"mode '{text}': name a run folder after the @, or 'latest'")
    if mode in NEED_RUN and not prename:
        raise SpecError(f"mode '{mode}' needs a run: {mode}@<run folder>, or {mode}@latest")
    return mode, prename or None


def read_jobs(words):
    """(path, [(spec file, spec name, mode)]) of a job file, in its order. Raises: SpecError"""
    from slm_lab.lib import files, paths

    given = path = Path(words[0]) if words else Path('job/experiments.json')
    if not path.is_file() and paths.CHECKOUT:
        path = paths.CHECKOUT / path
    if not path.is_file():
        known = [f'job/{p.name}' for p in (paths.CHECKOUT / 'job').glob('*.json')] if paths.CHECKOUT else []
        raise SpecError(f"job file '{given}' does not exist{suggest(given, known)}")
    jobs = files.read_json(path)
    if isinstance(jobs, dict) and any(isinstance(spec, dict) and 'agent' in spec for spec in jobs.values()):
        raise SpecError(f'{given} is a spec file: give SPEC_FILE SPEC_NAME MODE; its specs: {", ".join(jobs)}')
    if not isinstance(jobs, dict) or not all(isinstance(specs, dict) for specs in jobs.values()):
        raise SpecError(f'{path}: a job file is {{"spec file": {{"spec name": "mode"}}}}')
    return path, [(spec_file, name, str(mode)) for spec_file, specs in jobs.items() for name, mode in specs.items()]


def check_jobs(jobs):
    """Raises what is wrong with the input of any job, before the first one starts."""
    from slm_lab.spec import spec_util

    for spec_file, spec_name, lab_mode in jobs:
        _, prename = parse_mode(lab_mode)
        if prename is None:
            is_template = spec_util.template_names(spec_file, spec_name)
            spec_util.get_all(spec_file, spec_name) if is_template else spec_util.get(spec_file, spec_name)


def run_jobs(words, stop, force, resumes):
    """Runs the entries of a job file. Returns: exit status"""
    from slm_lab.experiment.jobs import Job

    path, entries = read_jobs(words)
    check_jobs(entries)
    job = Job.resume(path, entries) if resumes else Job.start(path, entries)

    def run_entry(spec_file, spec_name, lab_mode, place):
        return run_job(spec_file, spec_name, lab_mode, stop, force, place)

    status = job.run(run_entry, stop, print_error)
    failed = job.failed()
    if failed:
        print(f'{len(failed)} of {len(entries)} jobs failed: {", ".join(failed)}')
    if failed or stop():
        print(f'Go on with the jobs with: {command_line(*["--force"] * force, *words, "--resume")}')
    return stop.exit_status or status


def run_job(spec_file, spec_name, lab_mode, stop, force=False, place=None):
    """Runs one spec in one mode.

    Args:
        place: folder for a new run to start in, or to go on in where it has begun; None: it makes its own
    Returns: exit status
    """
    mode, prename = parse_mode(lab_mode)
    if mode == 'enjoy':
        return enjoy(prename, spec_file, spec_name, stop)
    if mode == 'verify':
        return verify(prename, spec_file, spec_name, stop)
    from slm_lab.spec import spec_util

    if mode == 'search':
        return search(spec_file, spec_name, prename, stop, place)
    if spec_util.template_names(spec_file, spec_name):
        return train_template(spec_file, spec_name, mode, prename, stop, force, place)
    return train(spec_file, spec_name, mode, prename, stop, force, place)


def train(spec_file, spec_name, mode, prename, stop, force=False, place=None):
    from slm_lab.experiment import experiment, param_runs, resume
    from slm_lab.experiment.trial import Trial
    from slm_lab.lib import paths
    from slm_lab.spec import spec_util

    of_search = None if prename is None else experiment.find_trial(prename, spec_name)
    if of_search is not None:
        spec, changes = experiment.open_trial(*of_search, spec_file, spec_name, mode)
        trial = Trial(spec, mode, stop, resumes=True, changes=changes, force=force, index=of_search[1])
    elif prename is not None:
        spec, _, changes = resume.open_run(prename, spec_file, spec_name, mode)
        trial = Trial(spec, mode, stop, resumes=True, changes=changes, force=force)
    elif place is not None:
        trial = param_runs.open_trial(spec_file, spec_util.get(spec_file, spec_name), place, mode, stop, force)
    else:
        spec = spec_util.override_spec(spec_util.get(spec_file, spec_name), mode)
        trial = Trial(spec, mode, stop, force=force)

    def command():
        run = paths.for_display(f'{trial.spec["meta"]["prepath"]}_spec.json' if of_search else trial.folder)
        return command_line(*['--force'] * force, spec_file, spec_name, f'{mode}@{run}')

    try:
        outcome = trial.run()
    except LabError:
        if (trial.folder / 'checkpoint').is_dir():
            print(f'Resume it with: {command()}')
        raise
    print_outcome(outcome, stop)
    print(f'Run folder: {paths.for_display(trial.folder)}')
    print(f'{"Resume" if stop() else "Extend"} it with: {command()}')
    return stop.exit_status


def command_line(*args):
    """What a user can paste to run this program with other arguments."""
    python = 'python' if shutil.which('python') == sys.executable else sys.executable
    return shlex.join([python, sys.argv[0], *args])


def print_outcome(outcome, stop):
    for name, value in outcome.metrics.items():
        print(f'  {name}: {value:g}' if isinstance(value, float) else f'  {name}: {value}')
    if not outcome.finished:
        at = ', '.join(f'session {index} at frame {frame}' for index, frame in sorted(outcome.frames.items()))
        print(f'Stopped by {stop.reason}; complete checkpoints: {at or "none, no session had begun"}')
    elif stop():
        print(f'Stopped by {stop.reason} when training was over; to have every graph, resume')


def train_template(spec_file, spec_name, mode, prename, stop, force, place):
    """Runs all the specs of a template; one that fails does not keep the others from running."""
    from slm_lab.experiment import param_runs
    from slm_lab.lib import paths
    from slm_lab.spec import spec_util

    specs = spec_util.get_all(spec_file, spec_name)
    names = [spec['name'] for spec in specs]
    if prename is not None:
        place = param_runs.find_place(prename, spec_name, names)
    elif place is None:
        place = param_runs.claim(spec_name, names)
    results = []
    for result in param_runs.ParamRuns(spec_file, spec_name, specs, place, mode, stop, force).run():
        results.append(result)
        print(f'{result.name}: {"finished before" if result.skipped else paths.for_display(result.folder)}')
        if result.error:
            print(f'error: {result.name}: {result.error}', file=sys.stderr)
        elif result.outcome:
            print_outcome(result.outcome, stop)
    num_finished = sum(result.finished for result in results)
    print(f'{num_finished} of {len(specs)} specs of {spec_name} are finished')
    if place.is_dir():
        run = paths.for_display(place)
        command = command_line(*['--force'] * force, spec_file, spec_name, f'{mode}@{run}')
        print(f'{"Extend" if num_finished == len(specs) else "Resume"} it with: {command}')
    return stop.exit_status or max((result.exit_status for result in results), default=0)


def search(spec_file, spec_name, prename, stop, place=None):
    from slm_lab.experiment import experiment, param_runs, resume
    from slm_lab.lib import paths
    from slm_lab.spec import spec_util

    changes, resumes = (), prename is not None or (place is not None and param_runs.holds_run(place))
    if resumes:
        spec, _, changes = resume.open_run(prename or str(place), spec_file, spec_name, 'search')
    else:
        spec = spec_util.get(spec_file, spec_name)
        if place is not None:
            spec['meta'].update(predir=str(place), experiment_ts=param_runs.timestamp_of(place))
    runs = experiment.Experiment(spec, stop, resumes, changes)
    outcome = runs.run()
    failed = outcome.count(experiment.FAILED)
    print(outcome.table.drop(columns='error').to_string(index=False))
    if outcome.best is not None:
        print(f'Best trial: {outcome.best["trial"]}, strength {outcome.best["strength"]:g}')
    for _, row in outcome.table[outcome.table['error'] != ''].iterrows():
        print(f'error: trial {row["trial"]}: {row["error"]}', file=sys.stderr)
    if not outcome.finished:
        print(f'Stopped by {stop.reason}; trials that have ended: {outcome.count_ended()} of {len(outcome.table)}')
    run = paths.for_display(runs.folder)
    print(f'Run folder: {run}')
    word = 'Resume' if stop() or failed or not outcome.finished else 'Extend'
    print(f'{word} it with: {command_line(spec_file, spec_name, f"search@{run}")}')
    return stop.exit_status or int(failed > 0)


def print_error(e):
    """One line on a LabError or OSError. Returns: exit status"""
    if isinstance(e, LabError):
        print(f'error: {e}', file=sys.stderr)
        return e.exit_status
    print(f'error: {e.filename or ""}: {e.strerror or e}', file=sys.stderr)  # a full disk, a folder that is gone
    return 1


def enjoy(prename, spec_file, spec_name, stop):
    from slm_lab.experiment.enjoy import find_session_spec, play
    from slm_lab.spec import spec_util

    spec, folder = find_session_spec(prename, spec_name)
    check_run_is_of(folder, spec_file, spec_name)
    returns = play(spec_util.override_spec(spec, 'enjoy'), stop)
    if returns:
        print(f'{len(returns)} episodes, mean return {sum(returns) / len(returns):g}')
    return stop.exit_status


def verify(prename, spec_file, spec_name, stop):
    from slm_lab.experiment import retro_analysis
    from slm_lab.experiment.verify import verify_run

    folder = retro_analysis.find_run(prename, spec_name)
    check_run_is_of(folder, spec_file, spec_name)
    verdicts = verify_run(folder, stop)
    for verdict in verdicts:
        print(verdict)
    return int(any(verdict.difference for verdict in verdicts))


def check_run_is_of(folder, spec_file, spec_name):
    """What is played or verified is the spec that the run holds, so the file may be gone; but the run is of this spec.

    Raises: ResumeError, unless it is, or is of one of the specs of this template.
    """
    from slm_lab.experiment import resume
    from slm_lab.lib import paths
    from slm_lab.spec import spec_util

    name = resume.read_saved_spec(folder)['name']
    if name != spec_name and name not in spec_util.template_names(spec_file, spec_name):
        raise ResumeError(f"{paths.for_display(folder)} is a run of spec '{name}', not of '{spec_name}'")


def doctor():
    """Prints what the lab finds where it is. Returns: exit status"""
    from slm_lab import __version__
    from slm_lab.lib.doctor import report

    lines, problems = report(__version__)
    print(*lines, *(f'PROBLEM: {problem}' for problem in problems), sep='\n')
    if not problems:
        print('no problem found')
    return int(bool(problems))


def main(argv=None):
    """Returns: exit status"""
    stop = StopRequest().install()  # before the slow imports: a signal then stops the run in good order
    try:
        args = parse_args(argv)
        if args.doctor:
            return doctor()
        if args.stop_after is not None:
            try:
                stop.deadline = time.time() + parse_duration(args.stop_after)
            except ValueError as e:
                raise SpecError(f'--stop-after: {e}') from None
        from slm_lab.lib import logger

        logger.setup()
        if len(args.words) == 3:
            return run_job(*args.words, stop, args.force)
        return run_jobs(args.words, stop, args.force, args.resume)
    except (LabError, OSError) as e:
        return print_error(e)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition('.')[0] in ('slm_lab', *sys.stdlib_module_names):
            raise  # a fault of the lab
        return print_error(LabError(f'{e}, which the lab needs; this Python is {sys.executable}. {INSTALL}'))


if __name__ == '__main__':
    sys.exit(main())

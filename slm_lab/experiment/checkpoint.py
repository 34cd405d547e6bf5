"""Checkpoints of one session: complete or invisible. This module alone knows their files.

    store = CheckpointStore(folder)
    found = store.find()                       # the newest complete generation, and what was skipped on the way to it
    if found.generation:
        session.load_state_dict(store.restore(found.generation, session.state_dict()))
    store.save(session.state_dict(), frame=clock.frame, spec=spec)

Every save is a generation with a number of its own, never used for another while a file of it exists:

    000007_50000_state.pt        the state tree at frame 50000, without the rows of its rings
    000007_50000_ring0.seg       the rows of its first ring that were new since the generation it builds upon
    000007_50000_best.pt         the best nets, where they were new
    000007_50000_manifest.json   size and checksum of every file of the generation, older segments included

A generation exists from the moment its manifest, written last, gets its name. Nothing in the folder is ever executed:
`.pt` files hold only what `torch.load(weights_only=True)` reads.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import slm_lab
from slm_lab.experiment.segment_log import SegmentError, plan_segment, read_segment, write_segment
from slm_lab.experiment.state_file import HashedFile, load_plain, pack_tree, save_plain, unpack_tree
from slm_lab.lib.errors import LabError, MachineError, ResumeError
from slm_lab.lib.files import fsync_folder, write_atomic
from slm_lab.lib.state import Ring, walk

FORMAT = 1

_FILE = re.compile(
    r'(?P<stem>(?P<number>\d{6,})_(?P<frame>\d+))_(?P<kind>manifest\.json|state\.pt|best\.pt|ring\d+\.seg)'
)
_TEMPORARY = re.compile(r'\.(?P<number>\d{6,})_\d+_manifest\.json\.(?P<pid>\d+)\.tmp')
_MANIFEST, _STATE, _BEST = 'manifest.json', 'state.pt', 'best.pt'

logger = logging.getLogger(__name__)


class Saved(NamedTuple):
    frame: int
    generation: int
    bytes_written: int
    seconds: float


@dataclass
class Generation:
    """One checkpoint on disk.

    `lost_rings` names the rings (paths in the state tree) whose segments are damaged: they are restored empty, and so
    are those that lie beside one in the tree, for the part that they belong to needs all of them.
    `lost_best`: the best nets are damaged.
    """

    number: int
    frame: int
    final: bool
    spec: object
    manifest: dict
    lost_rings: list = field(default_factory=list)
    lost_best: bool = False


class Found(NamedTuple):
    generation: Generation | None
    skipped: list


class CheckpointStore:
    """The checkpoints of one session, in a folder of their own.

    One process at a time may save (see `run_lock`); any number may read.

    Args:
        folder: made at the first save
        keep: how many complete generations stay
    """

    def __init__(self, folder, keep=2):
        if keep < 1:
            raise ValueError(f'CheckpointStore: keep is {keep}; at least the newest generation has to stay')
        self.folder, self.keep = Path(folder), keep
        self._base = None  # the manifest that the next save builds upon: the one last saved or restored here
        self._new_files = []  # of the save under way
        self._sound = set()  # (file, checksum) of the files that were written here, or read here and found whole

    def save(self, tree, *, frame, spec, best=None, final=False):
        """Writes a generation, then prunes.

        Args:
            tree: state tree. The rows of a `Ring` are taken to be as the save before saw them, if they are older.
            spec: JSON data on what was trained; kept for whoever resumes.
            best: {'frame', 'value', 'nets': {file stem: state_dict}}: new best nets. None: as they were before.
            final: the run has reached its `max_frame`.

        Raises: LabError when the folder cannot be written; TypeError for a tree that may not be saved. Either way
            nothing of the new generation stays, and the ones before are as they were.
        """
        began, frame = time.perf_counter(), int(frame)
        packed, rings = pack_tree(tree)
        self._new_files = []
        try:
            self._make_folder()
            stem = f'{self._last_number() + 1:06d}_{frame}'
            manifest, size = self._write_generation(stem, packed, rings, best)
            manifest |= {'frame': frame, 'final': bool(final), 'spec': spec}
            manifest = json.loads(json.dumps(manifest))  # as a reader will see it
            size += self._write_manifest(stem, manifest)
        except BaseException as e:
            self._discard_new_files()
            if isinstance(e, OSError):
                raise MachineError(
                    f'{self.folder}: the checkpoint of frame {frame} could not be written: {e.strerror or e}; '
                    'the ones before are whole: make room or mend the folder, then resume'
                ) from None
            raise
        self._base = manifest
        try:
            self.prune()
        except OSError as e:
            logger.warning('%s: old checkpoints could not be removed: %s', self.folder, e)
        return Saved(frame, manifest['generation'], size, time.perf_counter() - began)

    def find(self, before=None):
        """Finds the newest complete generation.

        Where there is none, the newest whose state is whole does, without the rings or best nets that are damaged.
        Damage is never an error here.

        Args:
            before: look only at generations with a smaller number than this one.
        Returns: Found(generation or None, one line for each damaged or unfinished generation that was passed over).
        """
        self._sound.clear()
        skipped, usable = [], []
        for number, stem in self._stems():
            if before is not None and number >= before:
                continue
            generation, faults = self._examine(number, stem)
            if generation and not faults:
                return Found(generation, [line for line, _ in skipped])
            skipped.append((self._damage_line(stem, faults), generation))
            if generation:
                usable.append(generation)
        usable.sort(key=lambda g: bool(g.lost_rings))  # stable: the newest of the least damaged comes first
        chosen = usable[0] if usable else None
        lines = [line + _used_without(chosen) if chosen and g is chosen else line for line, g in skipped]
        return Found(chosen, lines)

    def is_unborn(self):
        """Whether all that is here is of a first save, of frame 0, which was cut short: nothing is lost by starting."""
        stems = [m['stem'] for m in map(_FILE.fullmatch, self._names()) if m]
        manifests = [stem for stem in stems if (self.folder / f'{stem}_{_MANIFEST}').exists()]
        return not manifests and all(stem.endswith('_0') for stem in stems)

    def restore(self, generation, live_tree):
        """Reads a generation. What is saved from here on builds upon it.

        Args:
            live_tree: state tree of the part, freshly built, that will load the result. The rows of its rings are
                overwritten in place; nothing is changed if one of them does not fit.
        Returns: the state tree. A ring in it has the very arrays of the ring in `live_tree`, and the saved `written`
            (0 for a lost one). Only one that grows has new arrays, where the saved one had another capacity.

        Raises: ResumeError when rings do not fit; LabError when a file turns out to be damaged after all.
        """
        saved = generation.manifest['rings']
        live = {path: leaf for path, leaf in walk(live_tree) if isinstance(leaf, Ring)}
        _check_rings(saved, live, f'{self.folder}: the checkpoint of frame {generation.frame}')
        packed = load_plain(self.folder / generation.manifest['state'])
        self._base = None
        rings = {}
        for path, ring in live.items():
            if path in generation.lost_rings:
                rings[path] = Ring(ring.arrays, 0, 0 if ring.grows else None)
            else:
                rings[path] = _to_fill(ring, saved[path])
                self._read_ring(rings[path], saved[path]['segments'])
        tree = unpack_tree(packed, rings)
        self._base = _what_is_left(generation)
        return tree

    def part(self, generation, *path):
        """A part of a generation's state tree that has no rings, by its path in it; None where there is none."""
        tree = load_plain(self.folder / generation.manifest['state'])
        for key in path:
            if key not in tree:
                return None
            tree = tree[key]
        return unpack_tree(tree, {})

    def best(self, generation):
        """Returns {'frame', 'value', 'nets': {file stem: state_dict}} as of a generation, or None."""
        best = generation.manifest['best']
        if best is None or generation.lost_best:
            return None
        return {
            'frame': best['frame'],
            'value': best['value'],
            'nets': unpack_tree(load_plain(self.folder / best['file']), {}),
        }

    def prune(self):
        """Deletes what no kept generation needs: older and damaged generations, unfinished ones, temporary files.

        Keeps the newest `keep` complete generations, and those of a newer format. Without a complete one it does
        nothing.
        """
        kept, listed = 0, set()
        for number, stem in self._stems():
            newer = _newer_format(self.folder / f'{stem}_{_MANIFEST}')
            if newer is not None:
                listed |= newer
            elif kept < self.keep:
                generation, faults = self._examine(number, stem)
                if generation and not faults:
                    kept += 1
                    listed |= {f'{stem}_{_MANIFEST}', *generation.manifest['files']}
        if not kept:
            return
        doomed = [name for name in self._names() if _FILE.fullmatch(name) and name not in listed]
        # manifests go first: a generation that lacks files is then never taken for a damaged one
        for name in sorted(doomed, key=lambda name: not name.endswith(_MANIFEST)):
            (self.folder / name).unlink(missing_ok=True)
        for name in self._names():
            temporary = _TEMPORARY.fullmatch(name)
            if temporary and not _writes_elsewhere(int(temporary['pid'])):
                (self.folder / name).unlink(missing_ok=True)

    # --- writing

    def _write_generation(self, stem, packed, rings, best):
        """Writes all but the manifest. Returns (manifest without the caller's entries, bytes written)."""
        base = self._base or {'rings': {}, 'best': None, 'files': {}}
        written, files, entries = {}, {}, {}
        for i, (path, ring) in enumerate(rings.items()):
            segments, start = plan_segment(ring, base['rings'].get(path))
            files.update({s['file']: base['files'][s['file']] for s in segments})
            if start < ring.written:
                name = f'{stem}_ring{i}.seg'
                written[name] = self._write_file(name, write_segment, ring, start, ring.written)
                segments = [*segments, {'file': name, 'start': start, 'stop': ring.written}]
            entries[path] = {
                'capacity': ring.capacity,
                'layout': ring.layout(),
                'written': ring.written,
                'first_row': ring.first_row,
                'segments': segments,
            }
        state = f'{stem}_{_STATE}'
        written[state] = self._write_file(state, save_plain, packed)
        if best is None:
            best_entry = base['best']
            if best_entry:
                files[best_entry['file']] = base['files'][best_entry['file']]
        else:
            name = f'{stem}_{_BEST}'
            nets, inner_rings = pack_tree(best['nets'])
            if inner_rings:
                raise TypeError(f'best nets: {next(iter(inner_rings))} holds a Ring')
            written[name] = self._write_file(name, save_plain, nets)
            best_entry = {'frame': int(best['frame']), 'value': float(best['value']), 'file': name}
        manifest = {
            'format': FORMAT,
            'generation': int(stem.split('_')[0]),
            'time': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
            'host': socket.gethostname(),
            'versions': _versions(),
            'state': state,
            'rings': entries,
            'best': best_entry,
            'files': files | written,
        }
        return manifest, sum(entry['size'] for entry in written.values())

    def _write_file(self, name, write, *args):
        if (self.folder / name).exists():  # another process saves here: its files are not ours to remove
            raise FileExistsError(errno.EEXIST, f'{name} is there already')
        self._new_files.append(name)
        with HashedFile(self.folder / name) as file:
            write(file, *args)
            entry = file.finish()
        self._sound.add((name, entry['sha256']))
        return entry

    def _write_manifest(self, stem, manifest):
        content = json.dumps(manifest | {'sha256': _checksum(manifest)}, indent=1).encode()
        self._new_files.append(f'{stem}_{_MANIFEST}')
        write_atomic(self.folder / self._new_files[-1], content, durable=True)
        return len(content)

    def _make_folder(self):
        missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            fsync_folder(path.parent)

    def _discard_new_files(self):
        """Removes what a failed save has written, the manifest first."""
        for name in reversed(self._new_files):
            # where even that fails the files stay, but invisibly: without a manifest they are no generation
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    # --- reading

    def _names(self):
        try:
            return sorted(os.listdir(self.folder))
        except OSError:
            return []

    def _last_number(self):
        matches = (_FILE.fullmatch(name) or _TEMPORARY.fullmatch(name) for name in self._names())
        return max((int(m['number']) for m in matches if m), default=0)

    def _stems(self):
        """[(number, stem)] of the generations, newest first; also of those whose manifest is missing."""
        stems = set()
        for name in self._names():
            match = _FILE.fullmatch(name)
            if match and match['kind'] in (_MANIFEST, _STATE):
                stems.add((int(match['number']), match['stem']))
        return sorted(stems, reverse=True)

    def _examine(self, number, stem):
        """Returns (the generation, or None when it cannot be used at all; [(file, what is wrong with it)])."""
        name = f'{stem}_{_MANIFEST}'
        try:
            manifest = _read_manifest(self.folder / name)
            bad = {}
            for file, entry in manifest['files'].items():
                why = self._fault(file, entry)
                if why:
                    bad[file] = why
            generation = Generation(number, manifest['frame'], manifest['final'], manifest['spec'], manifest)
            if manifest['state'] in bad:
                generation = None
            elif bad:
                generation.lost_best = bool(manifest['best']) and manifest['best']['file'] in bad
                generation.lost_rings = _lost_rings(manifest['rings'], bad)
            return generation, list(bad.items())
        except _Unreadable as e:
            return None, [(name, str(e))]
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            return None, [(name, f'is not a checkpoint manifest ({e!r})')]

    def _fault(self, name, entry):
        """What is wrong with a listed file, or None. A file found whole once is only looked at for its size."""
        if Path(name).name != name:
            return 'lies outside the checkpoint folder'
        path = self.folder / name
        try:
            size = path.stat().st_size
            if size != entry['size']:
                return f'has {size} bytes instead of {entry["size"]}'
            if (name, entry['sha256']) not in self._sound:
                with open(path, 'rb') as f:
                    if _hash_stream(f) != entry['sha256']:
                        return 'has another checksum than when it was written'
                self._sound.add((name, entry['sha256']))
        except FileNotFoundError:
            return 'is missing'
        except OSError as e:
            return f'cannot be read: {e.strerror}'
        return None

    def _damage_line(self, stem, faults):
        (name, why), more = faults[0], len(faults) - 1
        others = f', and {more} more of its files are damaged' if more else ''
        return f'{self.folder / name} {why}{others}: the checkpoint of frame {stem.split("_")[1]} is incomplete'

    def _read_ring(self, ring, segments):
        row = segments[0]['start'] if segments else ring.written
        if row > ring.first_row:
            raise LabError(f'{self.folder}: rows {ring.first_row} to {row} of a ring are in no segment')
        for segment in segments:
            path = self.folder / segment['file']
            if segment['start'] != row:
                raise LabError(f'{path} begins at row {segment["start"]} instead of {row}')
            row = segment['stop']
            try:
                with open(path, 'rb') as f:
                    read_segment(f, ring, segment['start'], segment['stop'], ring.first_row)
            except (SegmentError, OSError) as e:
                raise LabError(f'{path} {e}') from None
        if row != ring.written:
            raise LabError(f'{self.folder}: rows {row} to {ring.written} of a ring are in no segment')


# --- rings


def store_of(spec):
    """The checkpoint store of the session that a spec is ticked to."""
    prepath = Path(spec['meta']['prepath'])
    return CheckpointStore(prepath.parent / 'checkpoint' / prepath.name)


def _check_rings(saved, live, whose):
    """Raises ResumeError unless the rings that were saved and those that are to be filled are of one shape."""
    if set(saved) != set(live):
        absent, added = sorted(set(saved) - set(live)), sorted(set(live) - set(saved))
        what = f'has the ring {absent[0]}, which this spec does not' if absent else f'has no ring {added[0]}'
        raise ResumeError(f'{whose} {what}; resume with the spec it was trained with, or start a new run')
    for path, ring in live.items():
        for what, was, now in (
            ('capacity', saved[path]['capacity'], ring.capacity),
            ('layout', saved[path]['layout'], ring.layout()),
        ):
            if was != now and not (what == 'capacity' and ring.grows):
                raise ResumeError(
                    f'{whose}: {path} has {what} {was}, but {now} with this spec; '
                    'restore the value in the spec, or start a new run'
                )


def _to_fill(ring, saved):
    """The saved ring, in the live arrays if they are as long."""
    if not ring.grows:
        return Ring(ring.arrays, saved['written'])
    arrays, capacity = ring.arrays, saved['capacity']
    if capacity != ring.capacity:
        arrays = {name: np.zeros((capacity, *a.shape[1:]), a.dtype) for name, a in arrays.items()}
    return Ring(arrays, saved['written'], saved['first_row'])


def _lost_rings(rings, bad_files):
    """The paths of the rings with a damaged segment and of those beside them."""
    damaged = [path for path, ring in rings.items() if any(s['file'] in bad_files for s in ring['segments'])]
    parents = {path.rpartition('.')[0] for path in damaged}
    return [path for path in rings if path.rpartition('.')[0] in parents]


def _what_is_left(generation):
    """The manifest as a base for the next save: what was lost is not built upon."""
    manifest = dict(generation.manifest)
    manifest['rings'] = {p: r for p, r in manifest['rings'].items() if p not in generation.lost_rings}
    if generation.lost_best:
        manifest['best'] = None
    return manifest


def _used_without(generation):
    lost = [f'{path} (it starts empty)' for path in generation.lost_rings]
    lost += ['the best nets'] if generation.lost_best else []
    return f', and as no complete one is left, it is used without {", ".join(lost)}'


# --- files


class _Unreadable(Exception):
    """A manifest that cannot be used."""


def _read_manifest(path):
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _Unreadable('is missing (deleted, or the save was cut short)') from None
    except OSError as e:
        raise _Unreadable(f'cannot be read: {e.strerror}') from None
    except ValueError:
        raise _Unreadable('is not valid JSON') from None
    version = manifest['format']
    if version != FORMAT:
        raise _Unreadable(f'has format {version}, and this version of the lab reads format {FORMAT}')
    if manifest.pop('sha256') != _checksum(manifest):
        raise _Unreadable('has another checksum than when it was written')
    return manifest


def _newer_format(path):
    """The names that a manifest of a format yet to come lists, its own included; None for any other manifest."""
    try:
        manifest = json.loads(path.read_bytes())
        return {path.name, *manifest['files']} if manifest['format'] > FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(manifest):
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash_stream(file):
    sha = hashlib.sha256()
    while block := file.read(2**20):
        sha.update(block)
    return sha.hexdigest()


def _writes_elsewhere(pid):
    """Whether a temporary file belongs to another process that lives."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _versions():
    return {
        'python': platform.python_version(),
        'torch': torch.__version__,
        'numpy': np.__version__,
        'gymnasium': importlib.metadata.version('gymnasium'),
        'slm_lab': slm_lab.__version__,
    }

"""Later processes find in a folder the segments of their text, and of no other text.

The helper `request` checks that reused rows are those of the request's text.
"""

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation.caches import PrefixCache
from mlx_speculation.caches.files.safetensors_reader import FlawError
from mlx_speculation.caches.prefix.segment_folder import KEY_BYTES, SegmentFolder
from mlx_speculation.errors import InvalidRequestError
from support.caches.prefix_roles import EVERY, RING, ROW, ROWS, Kind, bound, request

Kinds = tuple[Kind, ...]
KINDS: dict[str, Kinds] = {
    "rows": (ROWS, ROWS, Kind(lag=1), Kind(lag=3)),
    "rings": (RING, RING, Kind(lag=2)),
    "ring and rows": (RING, ROWS, Kind(lag=1)),
}
TEXTS = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=14), min_size=1, max_size=6
)
PLAYED = [[1] * 9 + [2] * 5, [1] * 9 + [0] * 6, [2, 0] * 8, [1] * 4 + [2] * 9]


def play(prefixes: PrefixCache, tokens: list[int], kinds: Kinds) -> list[int]:
    """Play a request with a role of each kind; return how many tokens each reused."""
    roles = {which: (kind, 0) for which, kind in enumerate(kinds)}
    return [reused for reused, _ in request(prefixes, tokens, roles).values()]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def filled(folder: Path, kinds: Kinds) -> str:
    """Fill a folder with some texts; return the fingerprint of the model."""
    prefixes, _owners = bound(1 << 30, *kinds, folder=folder)
    for tokens in PLAYED:
        play(prefixes, tokens, kinds)
    prefixes.flush()
    return prefixes._roles[0].mark


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=8)
@given(texts=TEXTS, spare=st.none() | st.integers(0, 60))
def test_another_process_finds_what_memory_has(
    name: str, texts: list[list[int]], spare: int | None
) -> None:
    """The other process can have less memory than the segments need."""
    kinds = KINDS[name]
    with TemporaryDirectory() as place:
        folder = Path(place, "made", "here")
        first, _first_owners = bound(1 << 30, *kinds, folder=folder)
        for tokens in texts:
            play(first, tokens, kinds)
            first.flush()
        size = 1 << 30 if spare is None else spare * ROW
        second, _owners = bound(size, *kinds, folder=folder)
        for tokens in reversed(texts):
            wanted = play(first, [*tokens, 9], kinds)
            reused = play(second, [*tokens, 9], kinds)
            assert second.nbytes <= size
            if spare is None:
                assert reused == wanted
                assert reused[0] > 0
            first.flush()
            second.flush()


@pytest.mark.parametrize("name", KINDS)
def test_of_a_text_too_long_for_memory_what_fits_is_used(
    name: str, tmp_path: Path
) -> None:
    kinds, folder, tokens = KINDS[name], tmp_path / "own", [2, 0] * 20
    first, _first_owners = bound(1 << 30, *kinds, folder=folder)
    play(first, tokens, kinds)
    nodes = list(first._tree.nodes())
    rows = sum(each.nbytes for node in nodes for each in node.rows.values())
    states = sum(each.nbytes for each in nodes[-1].points.values())
    play(first, [*tokens[:17], 1, 1], kinds)  # a node ends at 17, without states
    first.flush()
    for size in range(0, rows + states, 5 * ROW):
        later, _owners = bound(size, *kinds, folder=folder)
        later.fetch(tokens)
        assert later.nbytes <= size
        for node in later._tree.nodes():
            assert node.ways or node.points or not (node.resident and states)
        reused = later.lookup(0, tokens)
        place = len(tokens) * (size - states) / rows
        stop = 0 if reused is None else reused.stop
        assert place - 2 * EVERY <= stop <= max(0, place) + 2 * EVERY
        later.flush()


def test_processes_share_a_folder_while_they_run(tmp_path: Path) -> None:
    one, _one_owners = bound(1 << 30, ROWS, folder=tmp_path / "shared")
    two, _two_owners = bound(1 << 30, ROWS, folder=tmp_path / "shared")
    assert play(one, PLAYED[0], (ROWS,)) == [0]
    one.flush()
    assert play(two, PLAYED[1], (ROWS,)) == [9]  # the texts differ inside a segment
    two.flush()
    assert play(one, [*PLAYED[1], 2], (ROWS,)) == [len(PLAYED[1])]
    one.flush()


def test_other_models_find_nothing_and_remove_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    filled(folder, (ROWS,))
    before = files(folder)
    other, _owners = bound(1 << 30, RING, folder=folder)
    assert play(other, PLAYED[0], (RING,)) == [0]
    other.flush()
    assert set(before) <= set(files(folder))


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    filled(folder, (ROWS,))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    folder.chmod(0o750)
    with pytest.raises(InvalidRequestError, match="mode 0750"):
        PrefixCache(1, folder=folder)
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o700)
    with pytest.raises(InvalidRequestError, match="0700"):
        PrefixCache(1, folder=tmp_path / "link")
    (folder / "key").write_bytes(b"short")
    with pytest.raises(InvalidRequestError, match="its key has 5 bytes"):
        PrefixCache(1, folder=folder)


def test_the_key_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes can make a key at the same moment."""
    barrier, link = threading.Barrier(4), os.link

    def link_together(source: Path, place: Path) -> None:
        barrier.wait(60)
        link(source, place)

    monkeypatch.setattr(os, "link", link_together)
    folder = tmp_path / "own"
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(SegmentFolder, folder, 1.0) for _ in range(4)]
    assert len({each.result()._key for each in made}) == 1
    assert [each.name for each in folder.iterdir()] == ["key"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    looked_at = SegmentFolder(folder, 1.0)
    looked_at.serve(filled(folder, (ROWS,)))
    segments = looked_at.new_segments()
    for file in files(folder):
        moved = tmp_path / file.name
        file.rename(moved)
        file.symlink_to(moved)
    for segment in segments:
        with pytest.raises(FlawError):
            looked_at.read(segment)
    prefixes, _owners = bound(1 << 30, ROWS, folder=folder)
    assert play(prefixes, PLAYED[0], (ROWS,)) == [0]
    prefixes.flush()
    assert all(file.is_symlink() is False for file in files(folder))
    (folder / "key").rename(tmp_path / "key")
    (folder / "key").symlink_to(tmp_path / "key")
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        PrefixCache(1, folder=folder)


def test_the_disk_has_a_bound_too_and_keeps_what_leads_to_others(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "own"
    filled(folder, (ROWS,))
    most = 20 * max(file.stat().st_size for file in files(folder))
    prefixes, _owners = bound(1 << 30, ROWS, folder=folder, disk_gigabytes=most / 1e9)
    long = [2, 1] * 10
    for number in range(3):
        play(prefixes, [number, *[0, 1, 1] * 4], (ROWS,))
        play(prefixes, long, (ROWS,))
        prefixes.flush()
        assert sum(file.stat().st_size for file in files(folder)) <= most
    later, _later_owners = bound(1 << 30, ROWS, folder=folder)
    assert play(later, [*long, 1], (ROWS,)) == [20]
    later.flush()


def test_requests_go_on_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_started, go_on, write = (
        threading.Event(),
        threading.Event(),
        SegmentFolder.write,
    )

    def waiting(*args: Any, **options: Any) -> Any:
        write_started.set()
        assert go_on.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(SegmentFolder, "write", waiting)
    prefixes, _owners = bound(1 << 30, ROWS, folder=tmp_path / "own")
    reused = []
    for tokens in (*PLAYED, [*PLAYED[0], 1]):
        reused += play(prefixes, tokens, (ROWS,))
        assert write_started.wait(60)
    assert reused == [0, 9, 0, 4, 14]
    assert not files(tmp_path / "own")
    go_on.set()
    prefixes.flush()
    assert len(files(tmp_path / "own")) == len(list(prefixes._tree.nodes()))


def test_a_full_disk_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "own"
    prefixes, _owners = bound(1 << 30, ROWS, folder=folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with caplog.at_level(logging.WARNING, "mlx_speculation.caches"):
            for tokens in PLAYED:
                play(prefixes, tokens, (ROWS,))
                prefixes.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.message[:43] for record in caplog.records] == [
        "the prefix cache continues in memory only: "
    ]
    assert [each.name for each in folder.iterdir()] == ["key"]
    assert play(prefixes, [*PLAYED[0], 0], (ROWS,)) == [len(PLAYED[0])]
    prefixes.flush()
    assert files(folder)


def damage(draw: random.Random, folder: Path, foreign: Path) -> Path:
    """Damage a file, or write one that holds another's content; return its path."""
    all_files = files(folder)
    file = draw.choice(all_files)
    content = bytearray(file.read_bytes())
    kind = draw.randrange(7)
    if kind == 0:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del content[draw.randrange(1, len(content)) :]
    elif kind == 2:
        content = bytearray(draw.choice(all_files).read_bytes())
    elif kind == 3:
        content = bytearray(draw.choice(files(foreign)).read_bytes())
    elif kind == 4:
        start = draw.randrange(len(content))
        content[start : start + 40] = draw.randbytes(draw.randrange(60))
    elif kind == 5:
        name = f"{file.name[:33]}{draw.randbytes(32).hex()}.safetensors"
        file = folder / name
    else:
        start = draw.randrange(len(content))
        content[start : start + 8] = bytes(8)
    file.write_bytes(content)
    return file


def two_folders(place: Path, kinds: Kinds) -> tuple[Path, Path, str]:
    """Fill two folders of known keys; return them and the model's fingerprint."""
    folders = place / "own", place / "foreign"
    for number, folder in enumerate(folders):
        folder.mkdir(mode=0o700)
        (folder / "key").write_bytes(bytes([number]) * KEY_BYTES)
        mark = filled(folder, kinds)
    return *folders, mark


def contents(
    folder: Path, mark: str, names: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """Return what each file claims to hold, and its content, or None if unreadable."""
    segments = SegmentFolder(folder, 1.0)
    segments.serve(mark)
    result: dict[str, tuple[Any, Any]] = {}
    for each in segments.new_segments():
        if each.name in names:
            result[each.name] = astuple(each), None
            with suppress(FlawError):
                arrays, plan = segments.read(each)
                values = {name: array.tolist() for name, array in arrays.items()}
                result[each.name] = astuple(each), (values, plan)
    return result


@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=pytest.mark.slow)], ids=str
)
def test_a_changed_file_is_read_as_it_was_or_not_at_all(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "mlx_speculation.caches")
    folder, foreign, mark = two_folders(tmp_path, KINDS["ring and rows"])
    whole = {file: file.read_bytes() for file in files(folder)}
    written = contents(folder, mark, {file.name for file in whole})
    draw, refused = random.Random(7), 0
    for _ in range(count):
        changed = {damage(draw, folder, foreign) for _ in range(draw.randrange(1, 4))}
        names = {file.name for file in changed}
        read_back = contents(folder, mark, names)
        for name, (said, content) in read_back.items():
            assert said == written[name][0]
            assert content in (None, written[name][1])
        refused += sum(
            each not in read_back or not read_back[each][1] for each in names
        )
        for file in changed:
            file.unlink(missing_ok=True)
            if file in whole:
                file.write_bytes(whole[file])
        assert all(file.exists() for file in whole)
    assert refused > count


def spoil(folder: Path, prefixes: PrefixCache, start: int, stop: int) -> None:
    """Change the data of the file that holds the tokens [start, stop) of a text."""
    (name,) = {
        node.file.name
        for node in prefixes._tree.nodes()
        if node.file and (node.file.start, node.file.stop) == (start, stop)
    }
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["rings", "ring and rows"])
def test_what_is_before_a_damaged_file_is_used(name: str, tmp_path: Path) -> None:
    kinds, folder, tokens = KINDS[name], tmp_path / "own", [2, 0] * 7
    first, _first_owners = bound(1 << 30, *kinds, folder=folder)
    play(first, tokens, kinds)
    first.flush()
    spoil(folder, first, 12, 14)
    later, _later_owners = bound(1 << 30, *kinds, folder=folder)
    assert play(later, [*tokens, 9], kinds)[0] == 12
    later.flush()


def test_what_comes_after_a_damaged_file_is_used_again(tmp_path: Path) -> None:
    """Later files are used once the model has read the tokens of the damaged ones."""
    kinds, folder, tokens = KINDS["ring and rows"], tmp_path / "own", [2, 0] * 7
    first, _first_owners = bound(1 << 30, *kinds, folder=folder)
    play(first, tokens, kinds)
    first.flush()
    spoil(folder, first, 0, 4)
    spoil(folder, first, 12, 14)
    later, _later_owners = bound(1 << 30, *kinds, folder=folder)
    assert play(later, tokens[:6], kinds)[0] == 0
    assert play(later, [*tokens, 9], kinds)[0] == 12
    later.flush()
    last, _last_owners = bound(1 << 30, *kinds, folder=folder)
    assert play(last, [*tokens, 9, 9], kinds)[0] == 15
    last.flush()


@pytest.mark.parametrize(
    "count", [8, pytest.param(100, marks=pytest.mark.slow)], ids=str
)
def test_requests_after_damage_find_their_own_text_and_then_all_of_it(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first request that needs a damaged file is affected by it."""
    kinds = KINDS["ring and rows"]
    folder, foreign, _ = two_folders(tmp_path, kinds)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    draw = random.Random(5)
    for _ in range(count):
        for file in folder.iterdir():
            file.unlink()
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        caplog.clear()
        damaged = draw.randrange(1, 4)
        for _ in range(damaged):
            damage(draw, folder, foreign)
        for turn in range(damaged + 1):
            known = len(caplog.records)
            prefixes, _owners = bound(1 << 30, *kinds, folder=folder)
            ends = [9] * (turn + 1)
            reused = [play(prefixes, [*tokens, *ends], kinds)[0] for tokens in PLAYED]
            prefixes.flush()
            if len(caplog.records) == known:
                break
        assert len(caplog.records) <= damaged
        assert reused == [len(tokens) + turn for tokens in PLAYED]


WRITER = """
import sys
from pathlib import Path
from test_segment_folder import KINDS, play
from support.caches.prefix_roles import bound

kinds = KINDS["ring and rows"]
prefixes, owners = bound(1 << 20, *kinds, folder=Path(sys.argv[1]))
print("ready", flush=True)
for number in range(int(sys.argv[2]), 10**6):
    digits = [number // 3**place % 3 for place in range(9)]
    play(prefixes, digits * 2, kinds)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    folder, draw = tmp_path / "own", random.Random(3)
    kinds = KINDS["ring and rows"]
    for number in range(20):
        command = [sys.executable, "-c", WRITER, str(folder), str(40 * number)]
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        writer = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0, 3))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        prefixes, _owners = bound(1 << 30, *kinds, folder=folder)
        for text in range(max(0, 40 * number - 40), 40 * number + 20):
            digits = [text // 3**place % 3 for place in range(9)]
            play(prefixes, digits * 2, kinds)
        prefixes.flush()
    assert len(files(folder)) > 100


def test_places_of_segments_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """The table of places stays small while segments come and go."""
    folder = tmp_path / "shared"
    one, _one_owners = bound(1 << 30, ROWS, folder=folder)
    two, _two_owners = bound(1 << 30, ROWS, folder=folder)
    sizes = []
    for turn in range(6):
        play(one, [turn, *PLAYED[0]], (ROWS,))
        one.flush()
        assert two.fetch([turn, *PLAYED[0]]) == 0
        disk: Any = two._disk
        sizes.append(len(disk._places))
        for file in files(folder):
            file.unlink()
        for node in list(disk._tree.nodes()):
            disk._tree._cut_off(node)
    assert len(set(sizes)) == 1

"""A prefix store in files: other processes hit, and no damage, crash or race makes a wrong text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from test_prefix import ARGUMENTS, QUESTIONS, ROOM, SYSTEM, cold
from test_storage import gemma3, llama

from hf_kvcache import KVCache, PrefixStore
from hf_kvcache.prefix import files

ROOT = Path(__file__).resolve().parent.parent
MAKES = {
    "plain": (llama, None),
    "windows": (gemma3, None),
    "codec": (llama, lambda m: KVCache(m, codec="kivi-4")),
}
over_kinds = pytest.mark.parametrize("kind", MAKES)
LONG = torch.cat([SYSTEM, SYSTEM.flip(1), SYSTEM, SYSTEM.roll(1, 1)], dim=1)  # enough for a codec to pack some


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def question(n):
    return torch.cat([LONG, QUESTIONS[n : n + 1]], dim=1)


def store_at(path, kind="plain", **arguments):
    store = PrefixStore(ROOM, path=path, cache=MAKES[kind][1], **arguments)
    store.rescan_seconds = 0.0
    return store


def own_run(model, kind, n):
    """The same cache that read the prefix in a call of its own, without a store."""
    make = MAKES[kind][1] or KVCache
    cache = make(model)
    with torch.no_grad():
        model(LONG, past_key_values=cache)
    return cold(model, question(n), lambda m: cache)


def entry_files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


@over_kinds
def test_a_restarted_process_hits_from_disk(kind, tmp_path) -> None:
    model = MAKES[kind][0]()
    first = store_at(tmp_path, kind)
    first.warm(model, LONG)
    expected = own_run(model, kind, 0)
    assert torch.equal(first.generate(model, question(0), **ARGUMENTS), expected)
    second = store_at(tmp_path, kind)
    assert second.nbytes == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert torch.equal(second.generate(model, question(0), **ARGUMENTS), expected)
        assert torch.equal(second.generate(model, question(1), **ARGUMENTS), own_run(model, kind, 1))
    assert second.stats()["hits"] == 2 and second.stats()["tokens_saved"] >= 2 * 280
    assert all(path.suffix == ".safetensors" for path in entry_files(tmp_path))


def test_another_process_hits(tmp_path) -> None:
    code = f"""
    import sys
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import torch
    torch.set_num_threads(1)
    from test_prefix_files import *
    store = store_at({str(tmp_path)!r})
    print(store.generate(llama(), question(0), **ARGUMENTS).tolist(), store.stats()["tokens_saved"])
    """
    said = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout.rsplit(" ", 1))
    assert said[0][0] == said[1][0]
    assert [int(s[1]) for s in said] == [0, 291]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))


def flip_header(path):
    data = bytearray(path.read_bytes())
    at = data.index(b"tokens") + 20
    data[at] ^= 1
    path.write_bytes(bytes(data))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def huge_header(path):
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def noise(path):
    path.write_bytes(os.urandom(2000))


HARM = (flip, flip_header, truncate, empty, huge_header, noise)


@pytest.mark.parametrize("harm", HARM, ids=lambda f: f.__name__)
@over_kinds
def test_a_damaged_file_is_a_miss_and_a_warning(kind, harm, tmp_path) -> None:
    model = MAKES[kind][0]()
    store_at(tmp_path, kind).warm(model, LONG)
    for path in entry_files(tmp_path):
        harm(path)
    expected = own_run(model, kind, 0) if kind != "codec" else cold(model, question(0), MAKES[kind][1])
    store = store_at(tmp_path, kind)
    with pytest.warns(RuntimeWarning, match="PrefixStore"):
        assert torch.equal(store.generate(model, question(0), **ARGUMENTS), expected)
    assert store.stats()["hits"] == 0 and store.stats()["damaged_files"] >= 1
    # What was computed anew takes the place of what was damaged.
    store.warm(model, LONG)
    again = store_at(tmp_path, kind)
    assert torch.equal(again.generate(model, question(1), **ARGUMENTS), own_run(model, kind, 1))
    assert again.stats()["tokens_saved"] == 280


@over_kinds
def test_a_file_that_vanishes_is_a_miss(kind, tmp_path) -> None:
    model = MAKES[kind][0]()
    store_at(tmp_path, kind).warm(model, LONG)
    store = store_at(tmp_path, kind)
    cache = store.new_cache(model)
    store.matched(model, cache, question(0)[0], {})  # it knows of the files now
    for path in entry_files(tmp_path):
        path.unlink()
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        store.generate(model, question(0), **ARGUMENTS)
    assert store.stats()["hits"] == 0


def test_a_file_under_another_name_or_key_is_left_out(tmp_path) -> None:
    model = llama()
    store_at(tmp_path).warm(model, LONG)
    store_at(tmp_path).warm(llama(seed=1), LONG)
    one, other = entry_files(tmp_path)
    one.write_bytes(other.read_bytes())
    other.rename(other.with_name("rows-" + "0" * 40 + ".safetensors"))
    for seed in (0, 1):
        model = llama(seed=seed)
        store = store_at(tmp_path)
        with pytest.warns(RuntimeWarning, match="PrefixStore"):
            assert torch.equal(store.generate(model, question(0), **ARGUMENTS), cold(model, question(0)))
        assert store.stats()["hits"] == 0


def test_a_missing_run_in_the_middle_ends_the_prefix(tmp_path) -> None:
    model = llama()
    store = store_at(tmp_path)
    for length in (100, 200, 280):
        store.warm(model, LONG[:, :length])
    paths = sorted(
        entry_files(tmp_path), key=lambda p: files.describe(store.folder, str(p.relative_to(tmp_path)))["start"]
    )
    assert len(paths) == 3
    flip(paths[1])
    store = store_at(tmp_path)
    with pytest.warns(RuntimeWarning, match="checksum"):
        cache = store.get(model, question(0))
    assert cache.get_seq_length() == 100
    assert torch.equal(cold(model, question(0), lambda m: cache), cold(model, question(0)))


CRASHES = {
    "before the file is whole": "os.fsync = lambda *a: os._exit(9)",
    "before it has its name": "os.replace = lambda *a: os._exit(9)",
}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_process_killed_while_writing_leaves_nothing_half(crash, tmp_path, monkeypatch) -> None:
    code = f"""
    import os, sys
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import torch
    torch.set_num_threads(1)
    from test_prefix_files import *
    store = store_at({str(tmp_path)!r})
    store.warm(llama(), SYSTEM)
    {CRASHES[crash]}
    store.warm(llama(), LONG)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr[-2000:]
    assert len(entry_files(tmp_path)) == 2  # the first entry, and half of the second
    model = llama()
    store = store_at(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert store.get(model, question(0)).get_seq_length() == 70
        assert torch.equal(store.generate(model, question(0), **ARGUMENTS), cold(model, question(0)))
    monkeypatch.setattr(files, "_ORPHAN_SECONDS", -1.0)
    assert store_at(tmp_path).get(model, question(0)).get_seq_length() == 291
    assert all(path.suffix == ".safetensors" for path in entry_files(tmp_path))


def test_two_processes_write_one_entry(tmp_path) -> None:
    code = f"""
    import sys
    sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
    import torch
    torch.set_num_threads(1)
    from test_prefix_files import *
    sys.stdin.readline()
    for _ in range(20):
        store = store_at({str(tmp_path)!r})
        store.folder.exists = lambda name: False  # both write, every time
        store._scan = lambda *a: None
        store.warm(llama(), LONG)
        store = store_at({str(tmp_path)!r})
        assert store.get(llama(), question(0)).get_seq_length() == 280
    """
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        _, error = process.communicate()
        assert process.returncode == 0, error[-2000:]
    assert len(entry_files(tmp_path)) == 1


def test_a_full_disk_keeps_entries_in_memory(tmp_path, monkeypatch) -> None:
    model = llama()
    store = store_at(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        store.warm(model, SYSTEM)
        store.warm(model, LONG)
    assert len([w for w in caught if "No space" in str(w.message)]) == 1
    assert entry_files(tmp_path) == []
    assert store.get(model, question(0)).get_seq_length() == 280


def test_what_leaves_memory_comes_back_from_files(tmp_path) -> None:
    model = llama()
    store = store_at(tmp_path)
    store.warm(model, LONG, pin=False)
    for n in range(3):
        store.generate(model, question(n), **ARGUMENTS)
    expected = {n: cold(model, question(n)) for n in range(3)}
    whole, store.max_bytes = store.nbytes, 1
    store.get(model, SYSTEM)
    assert store.nbytes == 0 and store.stats()["filed"] == 4
    store.max_bytes = whole
    for n in range(3):
        before = store.stats()["tokens_saved"]
        assert torch.equal(store.generate(model, question(n), **ARGUMENTS), expected[n])
        assert store.stats()["tokens_saved"] - before == 291


def test_runs_that_were_cut_come_back_too(tmp_path) -> None:
    """Files hold runs as they were computed; the tree has cut them since."""
    model = llama()
    store = store_at(tmp_path)
    store.generate(model, question(0), **ARGUMENTS)
    store.get(model, question(1))
    store.generate(model, question(1), **ARGUMENTS)  # cuts the first run
    store.generate(model, SYSTEM[:, :40], **ARGUMENTS)
    for limit in (store.nbytes - 1, 1):
        room, store.max_bytes = store.max_bytes, limit
        store.get(model, SYSTEM)
        store.max_bytes = room
        for n in (1, 0):
            assert torch.equal(store.generate(model, question(n), **ARGUMENTS), cold(model, question(n)))
    fresh = store_at(tmp_path)
    for n in (1, 0, 2):
        assert torch.equal(fresh.generate(model, question(n), **ARGUMENTS), cold(model, question(n)))
    assert fresh.stats()["tokens_saved"] == 291 + 291 + 280


def test_the_disk_has_its_limit_too(tmp_path) -> None:
    model = llama()
    store = store_at(tmp_path, max_disk_bytes=1)
    store.warm(model, SYSTEM)
    assert entry_files(tmp_path) == []
    store = store_at(tmp_path, max_disk_bytes=1 << 30)
    store.warm(model, SYSTEM)
    assert len(entry_files(tmp_path)) == 1


# ---------------------------------------------------------------------- fsspec


@pytest.fixture
def bucket():
    """The URL of an object store: whole objects, no rename."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class BucketFileSystem(MemoryFileSystem):
        protocol = ("bucket", "s3")
        store: dict = {}
        pseudo_dirs = [""]

        def mv(self, *args, **kwargs):
            raise NotImplementedError("objects have no rename")

        @classmethod
        def _strip_protocol(cls, path):
            return MemoryFileSystem._strip_protocol(str(path).removeprefix("bucket://"))

    fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
    yield "bucket://shop/prefixes"
    BucketFileSystem.store.clear()
    BucketFileSystem.clear_instance_cache()


@over_kinds
@pytest.mark.parametrize("where", ["memory", "s3", "file"])
def test_stores_behind_urls(kind, where, bucket, tmp_path) -> None:
    url = {"memory": f"memory://{tmp_path.name}-{kind}", "s3": bucket, "file": f"file://{tmp_path}"}[where]
    model = MAKES[kind][0]()
    store_at(url, kind).warm(model, LONG)
    store = store_at(url, kind)
    assert torch.equal(store.generate(model, question(0), **ARGUMENTS), own_run(model, kind, 0))
    assert store.stats()["tokens_saved"] == 280
    late = store_at(url, kind)
    late.get(model, SYSTEM)
    store.warm(model, torch.cat([LONG, LONG], dim=1))
    assert late.get(model, torch.cat([LONG, LONG, SYSTEM], dim=1)).get_seq_length() == 560, "another machine's entry"


def test_a_place_that_moves_files_instead_of_putting_them(tmp_path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.local import LocalFileSystem

    class Slow(LocalFileSystem):
        protocol = "slow"

        @classmethod
        def _strip_protocol(cls, path):
            return LocalFileSystem._strip_protocol(str(path).removeprefix("slow://"))

    fsspec.register_implementation("slow", Slow, clobber=True)
    model = llama()
    store_at(f"slow://{tmp_path}").warm(model, LONG)
    assert store_at(tmp_path).get(model, question(0)).get_seq_length() == 280
    assert len(entry_files(tmp_path)) == 1


def test_without_fsspec_a_url_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"hf-kvcache\[prefix\]"):
        PrefixStore(ROOM, path="s3://bucket/prefixes")

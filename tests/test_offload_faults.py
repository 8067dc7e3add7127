"""Pages on disk when things go wrong: no wrong token, no lost token, no stale file."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from contract.common import feed, generate
from test_offload import IDS, MASK, SMALL, deep, one_thread  # noqa: F401 (fixtures)

from hf_kvcache import CPUOffloadedCache, KVCache
from hf_kvcache.codecs import Rotated
from hf_kvcache.offload import disk as disk_tier

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(os, "preadv"), reason="the disk tier needs POSIX"),
]
ROOT = Path(__file__).resolve().parent.parent
CODECS = pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
ATTEND = pytest.mark.parametrize("attend", ["fetch", "compute"])


def files(folder) -> list[Path]:
    return sorted(Path(folder).rglob("*.pages"))


def offloaded(model, folder, **more):
    return CPUOffloadedCache(model, **SMALL | dict(disk=folder, host_bytes=0, attend="fetch") | more)


@pytest.fixture
def reference(deep):  # noqa: F811
    deep.set_attn_implementation("sdpa")

    def logits(codec, steps, start=0):
        cache = KVCache(deep, codec=codec)
        if start:
            feed(deep, cache, IDS, MASK, [start])
        return feed(deep, cache, IDS, MASK, steps, start=start)

    return logits


@CODECS
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
@pytest.mark.parametrize("good", [0, 3])
def test_a_full_disk_keeps_the_tokens_in_memory_and_says_so_once(
    deep,  # noqa: F811
    reference,
    codec,
    call,
    good,
    tmp_path,
    monkeypatch,
):
    steps = [100, *[1] * 40]
    real, calls = getattr(os, call), [0]

    def full(*arguments):
        calls[0] += 1
        if calls[0] > good:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    cache = offloaded(deep, tmp_path, codec=codec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = feed(deep, cache, IDS, MASK, steps)
    assert torch.equal(ours, reference(codec, steps))
    mine = [w for w in caught if "hf_kvcache" in str(w.message)]
    assert len(mine) == 1 and "Nothing is lost" in str(mine[0].message)
    assert cache.nbytes_by_tier()["host"] > 0 and calls[0] == good + 1
    assert (cache.nbytes_by_tier()["disk"] > 0) == (good > 0)
    # There is room again: the next prompt is written.
    monkeypatch.setattr(os, call, real)
    cache.reset()
    assert torch.equal(feed(deep, cache, IDS, MASK, steps), ours)
    assert cache.nbytes_by_tier()["disk"] > 0


def test_half_a_write_is_not_believed(deep, reference, tmp_path, monkeypatch):  # noqa: F811
    real, calls = os.pwrite, [0]

    def short(fd, data, offset):
        calls[0] += 1
        if calls[0] % 2:
            return real(fd, data[: len(data) // 3], offset)  # short writes are continued
        if calls[0] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    steps = [60, *[1] * 40]
    with pytest.warns(UserWarning, match="Nothing is lost"):
        assert torch.equal(feed(deep, offloaded(deep, tmp_path), IDS, MASK, steps), reference(None, steps))


@CODECS
@ATTEND
def test_a_deleted_file_still_gives_its_tokens(deep, reference, codec, attend, tmp_path):  # noqa: F811
    cache = offloaded(deep, tmp_path, codec=codec, attend=attend)
    feed(deep, cache, IDS, MASK, [150])
    assert files(tmp_path)
    for path in files(tmp_path):
        path.unlink()
    ours = feed(deep, cache, IDS, MASK, [1] * 20, start=150)
    assert float((ours - reference(codec, [1] * 20, 150)).abs().max()) <= (0 if attend == "fetch" else 2e-5)


DAMAGE = {
    "a bit": lambda f: _write(f, 4096 // 3, bytes([f.read_bytes()[4096 // 3] ^ 1])),
    "zeros": lambda f: _write(f, 0, bytes(64)),
    "cut": lambda f: os.truncate(f, 100),
    "emptied": lambda f: os.truncate(f, 0),
}


def _write(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@CODECS
@ATTEND
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_an_error_and_never_a_token(deep, reference, name, codec, attend, tmp_path):  # noqa: F811
    cache = offloaded(deep, tmp_path, codec=codec, attend=attend)
    feed(deep, cache, IDS, MASK, [150])
    for path in files(tmp_path):
        DAMAGE[name](path)
    with pytest.raises(RuntimeError, match="altered|cut short"):
        feed(deep, cache, IDS, MASK, [1], start=150)
    cache.reset()
    ours = feed(deep, cache, IDS, MASK, [150, 1])
    assert float((ours - reference(codec, [150, 1])).abs().max()) <= (0 if attend == "fetch" else 2e-5)


def test_chosen_pages_are_verified_too(deep, tmp_path):  # noqa: F811
    cache = offloaded(deep, tmp_path, top_pages=0.3)
    feed(deep, cache, IDS, MASK, [150])
    for path in files(tmp_path):
        _write(path, 0, bytes(os.path.getsize(path)))
    with pytest.raises(RuntimeError, match="altered"):
        feed(deep, cache, IDS, MASK, [1], start=150)


@CODECS
def test_files_go_with_the_cache(deep, codec, tmp_path):  # noqa: F811
    cache = offloaded(deep, tmp_path, codec=codec)
    twin = copy.deepcopy(cache)
    feed(deep, cache, IDS, MASK, [150, *[1] * 30])
    shared = copy.deepcopy(cache)
    gc.disable()
    try:
        held = files(tmp_path)
        del cache
        assert files(tmp_path) == held, "the copy needs them"
        del shared
        assert files(tmp_path) == [], "at once, without the garbage collector"
        assert len(os.listdir(tmp_path)) == 1  # the folder, which `twin` may write to
        del twin
        assert os.listdir(tmp_path) == []
    finally:
        gc.enable()


def test_files_go_with_the_tokens(deep, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(disk_tier, "FILE_BYTES", 2000)
    cache = offloaded(deep, tmp_path)
    feed(deep, cache, IDS, MASK, [60, *[1] * 40])
    many = len(files(tmp_path))
    cache.crop(-60)
    assert 0 < len(files(tmp_path)) < many
    cache.reset()
    assert files(tmp_path) == []


@pytest.mark.parametrize("codec", [None, Rotated(4, residual_length=16)], ids=["exact", "packed"])
def test_an_exception_in_the_middle_of_generate(deep, codec, tmp_path):  # noqa: F811
    class Stop(Exception):
        pass

    calls = [0]

    def hook(*_):
        calls[0] += 1
        if calls[0] > 25:
            raise Stop

    def run() -> None:
        cache = offloaded(deep, tmp_path, codec=codec)
        handle = deep.model.layers[2].register_forward_hook(hook)
        try:
            generate(deep, cache, IDS[:, :120], MASK[:, :120], max_new_tokens=60)
        finally:
            handle.remove()
            assert files(tmp_path)

    with pytest.raises(Stop):
        run()
    gc.collect()  # the traceback held the cache
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- other processes

PROGRAM = """
    import os, sys, time
    sys.path[:0] = [{root!r}, {tests!r}]
    import torch
    torch.set_num_threads(1)
    from contract.common import batch, feed, model_of
    from hf_kvcache import CPUOffloadedCache, KVCache
    model = model_of("llama")
    ids, mask = batch(3, more=40)
    cache = CPUOffloadedCache(model, resident_length=4, page=4, disk={folder!r}, host_bytes=0, attend="fetch")
    expected = feed(model, KVCache(model), ids, mask, [18] + [1] * 20)
"""


def start(folder, body: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(root=str(ROOT), tests=str(ROOT / "tests"), folder=str(folder))
    program = textwrap.dedent(program) + textwrap.dedent(body)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


FEED = "assert torch.equal(feed(model, cache, ids, mask, [18] + [1] * 20), expected)\n"
WAIT = FEED + "print('ready', flush=True)\nsys.stdin.readline()\n"


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError('x')", "keep = [cache]; keep.append(keep)"])
def test_a_process_that_ends_leaves_nothing(end, tmp_path):
    process = start(tmp_path, FEED + f"assert os.listdir({str(tmp_path)!r})\n" + end)
    _, errors = process.communicate()
    assert process.returncode == {"sys.exit(3)": 3, "raise RuntimeError('x')": 1}.get(end, 0), errors
    assert os.listdir(tmp_path) == []


def test_two_processes_in_one_folder_and_one_is_killed(deep, tmp_path):  # noqa: F811
    first, second = start(tmp_path, WAIT + FEED_AGAIN), start(tmp_path, WAIT)
    try:
        assert first.stdout.readline() == "ready\n" and second.stdout.readline() == "ready\n"
        assert len(os.listdir(tmp_path)) == 2
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
        stale = set(os.listdir(tmp_path))
        assert len(stale) == 2, "a killed process cannot clean up"
        own = offloaded(deep, tmp_path)  # the next run does, and leaves the living one alone
        left = set(os.listdir(tmp_path))
        assert len(left) == 2 and len(left & stale) == 1
        assert files(tmp_path), "those of the living process"
        _, errors = first.communicate("\n")
        assert first.returncode == 0, errors
        assert len(os.listdir(tmp_path)) == 1
        del own
        assert os.listdir(tmp_path) == []
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


FEED_AGAIN = """
cache.crop(-10)
again = feed(model, cache, ids, mask, [1] * 10, start=28)
assert torch.equal(again, expected[:, -10:])
"""


def test_a_limit_of_the_system_on_file_sizes_is_a_full_disk(tmp_path):
    body = """
        import resource, warnings
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(feed(model, cache, ids, mask, [18] + [1] * 20), expected)
        assert sum("Nothing is lost" in str(w.message) for w in caught) == 1, caught
        assert cache.nbytes_by_tier()["host"] > 0
    """
    process = start(tmp_path, body)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_files_of_its_own_and_removes_no_others(tmp_path):
    body = """
        feed(model, cache, ids, mask, [18])
        before = os.listdir({folder!r})
        child = os.fork()
        if not child:
            ours = feed(model, cache, ids, mask, [1] * 20, start=18)
            assert torch.equal(ours, expected[:, 1:]) and len(os.listdir({folder!r})) == 2
            del cache  # and ends like any process
        else:
            assert os.waitpid(child, 0)[1] == 0
            assert os.listdir({folder!r}) == before
            assert torch.equal(feed(model, cache, ids, mask, [1] * 20, start=18), expected[:, 1:])
    """.format(folder=str(tmp_path))
    process = start(tmp_path, body)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert os.listdir(tmp_path) == []


def test_only_our_own_folders_are_swept(tmp_path):
    for name in ("hf_kvcache-mine", "other", "hf_kvcache-full"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "lock").touch()
    (tmp_path / "hf_kvcache-full" / "lock").touch()
    (tmp_path / "hf_kvcache-full" / "notes.txt").touch()
    (tmp_path / "hf_kvcache-full" / "x.pages").touch()
    (tmp_path / "hf_kvcache-file").touch()
    (tmp_path / "hf_kvcache-link").symlink_to(tmp_path / "other")
    disk_tier.sweep(str(tmp_path))
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    kept = {"other", "other/lock", "hf_kvcache-full", "hf_kvcache-full/notes.txt", "hf_kvcache-file", "hf_kvcache-link"}
    assert left == kept


def test_a_folder_that_cannot_be_written(deep, tmp_path, monkeypatch):  # noqa: F811
    def refuse(*arguments, **more):
        raise PermissionError("read-only")

    monkeypatch.setattr(disk_tier.tempfile, "mkdtemp", refuse)
    with pytest.raises(ValueError, match="cannot make a locked folder"):
        offloaded(deep, tmp_path)

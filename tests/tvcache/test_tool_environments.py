"""Directories, databases and containers: copies are independent, failures leave nothing behind."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from tvcache import Cache, Snapshots, Tool, TvcacheError
from tvcache.environments import Environment, Fingerprinted, size_bytes
from tvcache.environments.container import ContainerEnvironment, image_digest
from tvcache.environments.directory import DirectoryEnvironment
from tvcache.environments.sqlite import SqliteEnvironment

DOCKER = Path(__file__).parent / "docker_of_directories.sh"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    (made / "a.txt").write_text("one\n")
    (made / "link").symlink_to("a.txt")
    return made


def test_copies_of_a_directory_are_independent_and_keep_times(source: Path, tmp_path: Path) -> None:
    first = DirectoryEnvironment.copy_of(source, tmp_path)
    second = first.fork()
    first.execute("write_file", {"name": "a.txt", "text": "two\n"})
    assert second.execute("read_file", {"name": "link"}) == "one\n"
    assert (second.path / "a.txt").stat().st_mtime_ns == (source / "a.txt").stat().st_mtime_ns
    assert first.fingerprint() != second.fingerprint() == DirectoryEnvironment(source).fingerprint()
    assert size_bytes(first) > 0
    for environment in (first, second, first):
        environment.close()
    assert [found.name for found in tmp_path.iterdir()] == ["source"]


def test_an_output_does_not_name_the_copy(source: Path, tmp_path: Path) -> None:
    first = DirectoryEnvironment.copy_of(source, tmp_path)
    found = [environment.execute("shell", {"command": "pwd; ls; ls none"}) for environment in (first, first.fork())]
    assert found[0] == found[1]
    assert found[0]["output"].startswith("/workspace\na.txt\nlink\n")
    assert found[0]["code"] == 2


def test_a_command_sees_no_variables_of_this_process(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    environment = DirectoryEnvironment.copy_of(source)
    assert "secret" not in environment.execute("shell", {"command": "env"})["output"]
    environment.close()


def test_a_command_that_times_out_is_killed_and_not_stored(source: Path, tmp_path: Path) -> None:
    with Cache(audit=0.0) as cache:
        rollout = cache.rollout("t", lambda: DirectoryEnvironment.copy_of(source, tmp_path))
        with rollout, pytest.raises(TimeoutError, match=r"took more than 0\.05 s"):
            rollout.call("shell", {"command": "sleep 60", "timeout_s": 0.05})
        assert rollout.private


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_files_outside_a_directory_are_refused(source: Path, name: str) -> None:
    with pytest.raises(TvcacheError, match="outside"):
        DirectoryEnvironment(source).execute("write_file", {"name": name, "text": ""})


def test_a_copy_that_fails_half_way_leaves_nothing(source: Path, tmp_path: Path) -> None:
    environment = DirectoryEnvironment.copy_of(source, tmp_path)
    shutil.rmtree(environment.path)
    with pytest.raises(OSError, match="copying"):
        environment.fork()
    assert [found.name for found in tmp_path.iterdir()] == ["source"]


def database(path: Path) -> Path:
    made = sqlite3.connect(path)
    made.executescript("create table t (a, b); insert into t values (1, 'x'), (2, x'00ff'), (null, 2.5);")
    made.close()
    return path


@pytest.mark.parametrize("in_memory", [True, False])
def test_copies_of_a_database_are_independent(tmp_path: Path, in_memory: bool) -> None:
    source = database(tmp_path / "source.sqlite")
    first = SqliteEnvironment.copy_of(source, None if in_memory else tmp_path)
    second = first.fork()
    first.execute("sql", {"statement": "insert into t values (?, ?)", "parameters": [3, "y"]})
    assert first.execute("sql", {"statement": "select count(*) from t"}) == [[4]]
    rows = second.execute("sql", {"statement": "select * from t order by rowid"})
    assert rows == [[1, "x"], [2, {"blob": "AP8="}], [None, 2.5]]
    assert first.fingerprint() != second.fingerprint() == SqliteEnvironment.copy_of(source).fingerprint()
    assert size_bytes(first) >= 4096
    for environment in (first, second, first):
        environment.close()
    assert [found.name for found in tmp_path.iterdir()] == ["source.sqlite"]


def test_a_missing_or_closed_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TvcacheError, match="no such database"):
        SqliteEnvironment.copy_of(tmp_path / "none.sqlite")
    closed = SqliteEnvironment()
    closed.close()
    with pytest.raises(sqlite3.ProgrammingError):
        closed.fork()


@pytest.mark.parametrize("kind", ["directory", "sqlite", "container"])
def test_rollouts_on_every_environment(kind: str, source: Path, tmp_path: Path, docker: str) -> None:
    """Two endings after one beginning: the second is forked, and both end as without a cache."""
    statements = {
        "sqlite": [("sql", {"statement": text}) for text in ("create table n (a)", "insert into n values (1)")],
    }.get(kind, [("shell", {"command": text}) for text in ("echo x > b.txt", "cat a.txt >> b.txt; sleep 0.01")])
    endings = {
        "sqlite": [("sql", {"statement": f"insert into n values ({n})"}) for n in (2, 3)],
    }.get(kind, [("shell", {"command": f"echo {n} >> b.txt; cat b.txt"}) for n in (2, 3)])

    def make() -> Environment:
        if kind == "directory":
            return DirectoryEnvironment.copy_of(source, tmp_path)
        return SqliteEnvironment() if kind == "sqlite" else ContainerEnvironment(str(source), runtime=docker)

    def marked(environment: Any) -> str:
        if isinstance(environment, Fingerprinted):
            return environment.fingerprint()
        return str(environment.execute("shell", {"command": "cat b.txt"}))

    with Cache(audit=0.0, snapshots=Snapshots(policy="always")) as cache:
        for ending in (*endings, *endings):
            plain = make()
            expected = [plain.execute(*call) for call in (*statements, ending)]
            with cache.rollout("t", make) as rollout:
                assert [rollout.call(*call) for call in (*statements, ending)] == expected
                assert marked(rollout.environment()) == marked(plain)
            plain.close()
        assert cache.counters.hits == 2 + 3 + 3
        assert cache.counters.replayed == 0


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command with Docker's words whose containers are directories; the real one is not needed for the tests."""
    target = tmp_path / "bin" / "docker"
    target.parent.mkdir()
    target.write_bytes(DOCKER.read_bytes())
    target.chmod(target.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CONTAINERS", str(tmp_path / "containers"))
    return str(target)


def test_a_container_leaves_nothing_behind(docker: str, source: Path, tmp_path: Path) -> None:
    first = ContainerEnvironment(str(source), runtime=docker)
    second = first.fork()
    first.execute("shell", {"command": "echo changed > a.txt"})
    assert second.execute("shell", {"command": "cat a.txt"}) == {"output": "one\n", "code": 0}
    with pytest.raises(TimeoutError):
        second.execute("shell", {"command": "sleep 60", "timeout_s": 0.05})
    for environment in (first, second, first):
        environment.close()
    assert list((tmp_path / "containers").rglob("tvcache*/*")) == []


def test_a_container_that_cannot_start_is_an_error(docker: str) -> None:
    with pytest.raises(OSError, match="no such image"):
        ContainerEnvironment("/none", runtime=docker)
    with pytest.raises(TvcacheError, match="install Docker"):
        ContainerEnvironment("x", runtime="/no/docker")
    with pytest.raises(TvcacheError, match="Pull it first"):
        image_digest("/none", runtime=docker)


def test_a_wrongly_declared_command_is_found_in_a_directory(source: Path, tmp_path: Path) -> None:
    with Cache(tools=[Tool("shell", "reads")], audit=1.0) as cache:
        for _ in range(2):
            with cache.rollout("t", lambda: DirectoryEnvironment.copy_of(source, tmp_path)) as rollout:
                rollout.call("shell", {"command": "touch new"})
        cache.audit.drain()
        assert cache.counters.differences == {"shell": 1}

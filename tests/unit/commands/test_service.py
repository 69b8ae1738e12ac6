"""`engined install-service` and `engined uninstall`, below a prefix of the test."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.__main__ import _parser, main
from engine.commands import service

PROGRAM = Path("/opt/engined/bin/engined")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An engine's directory of state."""
    path = tmp_path / "root"
    (path / "layers/1").mkdir(parents=True)
    (path / "state.db").write_bytes(b"")
    return path


def install(prefix: Path) -> list[str]:
    return list(service.install(prefix, PROGRAM, _parser()))


def files(prefix: Path) -> dict[str, str]:
    return {
        str(path.relative_to(prefix)): hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
        for path in sorted(prefix.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_every_file_is_written_and_printed(prefix: Path) -> None:
    *lines, after = install(prefix)
    assert {*files(prefix)} == {
        "bin/engined",
        "etc/engined/engined.toml",
        "lib/systemd/system/engined.service",
        "lib/systemd/system/engined.socket",
        "share/bash-completion/completions/engined",
        "share/engined/installed.json",
        "share/fish/vendor_completions.d/engined.fish",
        "share/man/man1/engined.1",
        "share/zsh/site-functions/_engined",
    }
    printed = {line.split(" -> ")[0] for line in lines}
    assert printed == {str(prefix / name) for name in files(prefix)} - {str(prefix / service.LIST)}
    assert "systemctl enable --now engined" in after


def test_the_unit_has_the_paths_of_this_installation(prefix: Path) -> None:
    list(service.install(prefix, Path("/srv/venv/bin/engined"), _parser()))
    text = (prefix / "lib/systemd/system/engined.service").read_text()
    assert f"ExecStart=/srv/venv/bin/engined serve --config {prefix}/etc/engined/engined.toml" in text
    assert "/opt/" not in text


@pytest.mark.parametrize("prefix", ["/usr", "/usr/local"])
def test_the_configuration_of_the_system(prefix: str) -> None:
    assert service.configuration(Path(prefix)) == Path("/etc/engined/engined.toml")


def test_nothing_is_left(prefix: Path) -> None:
    install(prefix)
    assert list(service.uninstall(prefix, None, prefix))
    assert not prefix.exists()


def test_what_others_have_there_stays(prefix: Path) -> None:
    other = prefix / "share/man/man1/other.1"
    other.parent.mkdir(parents=True)
    other.write_text("x")
    install(prefix)
    list(service.uninstall(prefix, None, prefix))
    assert [*files(prefix)] == ["share/man/man1/other.1"]


def test_twice_is_as_once(prefix: Path) -> None:
    once = install(prefix)
    content = files(prefix)
    assert install(prefix) == once
    assert files(prefix) == content
    list(service.uninstall(prefix, None, prefix))
    assert not prefix.exists()


def test_an_edited_configuration_is_kept(prefix: Path) -> None:
    install(prefix)
    settings = prefix / "etc/engined/engined.toml"
    settings.write_text('log_level = "debug"\n')
    assert f"{settings}: kept as it is" in install(prefix)
    assert f"{settings}: kept, because it was edited" in list(service.uninstall(prefix, None, prefix))
    assert [*files(prefix)] == ["etc/engined/engined.toml"]


def test_a_program_that_is_there_already_is_kept(prefix: Path) -> None:
    other = prefix / "bin/engined"
    other.parent.mkdir(parents=True)
    other.write_text("of another installation")
    install(prefix)
    list(service.uninstall(prefix, None, prefix))
    assert other.read_text() == "of another installation"


def test_files_of_an_earlier_version_are_removed(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a file that is no unit now
    monkeypatch.setattr(service, "UNITS", (*service.UNITS, "engined.1"))
    install(prefix)
    monkeypatch.undo()
    old = prefix / "lib/systemd/system/engined.1"
    assert f"{old}: removed, because this version has no such file" in install(prefix)
    assert not old.exists()


def test_state_and_edited_configuration_are_removed(prefix: Path, root: Path, tmp_path: Path) -> None:
    install(prefix)
    (prefix / "etc/engined/engined.toml").write_text("# edited\n")
    lines = list(service.uninstall(prefix, root, tmp_path / "run"))
    assert lines[-1] == f"{root}: removed"
    assert not prefix.exists() and not root.exists()


def uninstalled(prefix: Path, root: Path, run: Path) -> int:
    return main(["uninstall", "--state", f"--prefix={prefix}", f"--root={root}", f"--run={run}"])


def of_an_engine_that_runs(root: Path, run: Path) -> Iterator[str]:
    run.mkdir()
    (run / "engined.pid").write_text("1")
    yield f"stop it first (engined stop --run {run})"


def of_an_engine_with_another_run_directory(root: Path, run: Path) -> Iterator[str]:
    with open(root / "state.db", "rb"):
        yield f"process {os.getpid()} has files of {root} open"


def that_is_no_engines(root: Path, run: Path) -> Iterator[str]:
    (root / "state.db").unlink()
    yield "it is not the directory of an engine"


@pytest.mark.parametrize("state", [of_an_engine_that_runs, of_an_engine_with_another_run_directory, that_is_no_engines])
def test_state_that_is_not_removed(
    state: Callable[[Path, Path], Iterator[str]],
    prefix: Path,
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(prefix)
    before = files(prefix)
    for reason in state(root, tmp_path / "run"):
        assert uninstalled(prefix, root, tmp_path / "run") == 1
        assert reason in capsys.readouterr().err
    assert root.exists() and files(prefix) == before


def test_nothing_to_uninstall(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall", f"--prefix={prefix}"]) == 1
    assert "nothing is installed below" in capsys.readouterr().err


def test_a_prefix_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["install-service", f"--prefix={tmp_path}/file"]) == 1
    assert capsys.readouterr().err == f"engined: {tmp_path}/file/share/engined/installed.json: not a directory\n"


def test_links_of_an_enabled_unit_are_removed(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ENABLED", tmp_path / "etc")
    wants = tmp_path / "etc/multi-user.target.wants"
    wants.mkdir(parents=True)
    install(prefix)
    (wants / "engined.service").symlink_to(prefix / "lib/systemd/system/engined.service")
    (wants / "engined.other").symlink_to("/nowhere")
    list(service.uninstall(prefix, None, prefix))
    assert os.listdir(wants) == ["engined.other"]


@pytest.mark.parametrize(
    "line, expected", [("engined install-s", "install-service"), ("engined serve --log-le", "--log-level")]
)
def test_bash_completes(line: str, expected: str) -> None:
    script = service.completions(_parser())["bash"]
    words = line.split()
    ask = (
        f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n"
        f"_shtab_engined\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]


def test_completions_know_files_and_words() -> None:
    fish = service.completions(_parser())["fish"]
    assert "strict lenient" in fish
    if shutil.which("zsh"):
        zsh = service.completions(_parser())["zsh"]
        subprocess.run(["zsh", "-n"], input=zsh, text=True, check=True)

"""Scripts find what lies beside them, as under plain Python: `__file__` is absolute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from automodel.config.errors import UserError


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["t.py"])
    monkeypatch.setattr(sys, "path", sys.path[:])


def where_it_is(way, script: Path) -> None:
    from automodel.trainer import old_script
    from automodel.trainer.check_migration import script_losses
    from automodel.trainer.stand_in import run_script

    if way == "run":
        run_script(script, [])
    elif way == "child":
        sys.argv = ["old_script", str(script)]
        old_script.main()
    else:
        with pytest.raises(UserError, match=r"never called Trainer\.train"):
            script_losses(script, Path("losses"), 1)


@pytest.mark.parametrize("way", ["run", "child", "check"])
def test_the_file_of_a_script_is_absolute_and_its_name_as_typed(way, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.py").write_text(
        "import os, sys\nfrom pathlib import Path\nos.chdir('/')\nhere = Path(__file__).parent\n"
        "(here / 'said').write_text(__file__ + ' ' + sys.argv[0])\n"
    )
    where_it_is(way, Path("sub/t.py"))
    assert (tmp_path / "sub" / "said").read_text() == f"{tmp_path}/sub/t.py sub/t.py"


def test_a_failing_script_given_by_a_relative_path_shows_its_own_lines_alone(tmp_path, monkeypatch, capsys):
    from automodel.cli.main import main

    (tmp_path / "t.py").write_text("import os\nos.chdir('/')\nraise ValueError('mine')\n")
    monkeypatch.setattr(sys, "argv", ["automodel", "run", "t.py"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert f'File "{tmp_path}/t.py", line 3' in said
    assert "runpy" not in said

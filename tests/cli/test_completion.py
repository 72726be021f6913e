import shutil
import subprocess

import pytest

from megatron_dynapipe.cli import main


def test_a_shell_completes_commands_and_flags(capsys, tmp_path):
    assert main.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    asked = (
        f"source {script}; COMP_WORDS=(megatron-dynapipe report --comp); COMP_CWORD=2;"
        " COMP_LINE='megatron-dynapipe report --comp'; COMP_POINT=${#COMP_LINE};"
        " f=$(complete -p megatron-dynapipe | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    said = subprocess.run([bash, "-c", asked], capture_output=True, text=True, timeout=30)
    assert said.stdout.split() == ["--comparison"], said.stderr


def test_an_unknown_shell_is_refused(capsys):
    assert main.main(["completion", "fish"]) == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err

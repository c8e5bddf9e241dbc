"""Launch scripts are read, never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.importers.shell import ScriptError, read_script

RUN = "python3 -m verl.trainer.main_ppo"


def words(text: str) -> list[str]:
    return read_script(text, "verl").overrides


def test_lines_that_go_on_and_comments_between_them() -> None:
    assert words(f"# a\n{RUN} \\\n  a.b=1 \\\n  # c=2 \\\n  d=3 $@\necho done=1") == ["a.b=1", "d=3"]


def test_variables_are_followed_in_order() -> None:
    text = f'A=1\nB="x y"\nA=2\nexport C=${{A}}z\n{RUN} a=$A b="$B" c=$C d=${{D:-4}} e=$HOME/f g=$A$A\nA=3'
    assert words(text) == ["a=2", "b=x y", "c=2z", "d=4", "e=${oc.env:HOME}/f", "g=22"]


def test_fallbacks_may_hold_variables() -> None:
    text = f'A=${{A:-"${{HOME}}/verl"}}\nB=${{B:-"${{A}}/data.parquet"}}\n{RUN} b="${{B}}" c=${{C:-16}}'
    assert words(text) == ["b=${oc.env:HOME}/verl/data.parquet", "c=16"]


def test_single_quotes_keep_dollars() -> None:
    assert words(f"A=1\n{RUN} a='$A' b=\"'$A'\"") == ["a=$A", "b='1'"]


def test_a_value_without_quotes_is_several_words() -> None:
    text = 'A="a=1 \\\nb=2"\nD="-m verl.trainer.main_ppo"\npython3 ${D} $A c="$A"'
    assert words(text) == ["a=1", "b=2", "c=a=1 b=2"]


def test_processes_of_torchrun_are_settings() -> None:
    run = "torchrun --nnodes=1 --nproc-per-node $N -m verl.trainer.fsdp_sft_trainer a=1 engine=fsdp optim=fsdp"
    found = read_script(f"N=4\n{run}", "verl_sft").overrides
    assert found == ["a=1", "engine.strategy=fsdp", "trainer.nnodes=1", "trainer.n_gpus_per_node=4"]


def test_sums_are_of_whole_numbers() -> None:
    assert words(f"A=3\n{RUN} a=$((A * (2 + 1))) b=$(($A - 5)) c=$((10 / 4))") == ["a=9", "b=-2", "c=2"]


@pytest.mark.parametrize("sum", ["__import__('os').getpid()", "2 ** 10000", "1 / 0", "[1]"])
def test_nothing_but_sums_is_computed(sum: str) -> None:
    found = read_script(f"{RUN} a=$(({sum}))", "verl")
    assert all(word.startswith("a=$((") for word in found.overrides)


def test_arrays_become_words() -> None:
    text = f'A=(\n  a=1\n  b="x y"   # note\n)\nA+=(c=3)\nB=(d=4 e=5)\n{RUN} "${{A[@]}}" ${{B[@]}} "$@"'
    assert words(text) == ["a=1", "b=x y", "c=3", "d=4", "e=5"]


def test_what_a_shell_computes_is_left_out_with_a_note(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    found = read_script(f"{RUN} a=$(touch {witness}) b=`touch {witness}` c=1", "verl")
    assert found.overrides == ["c=1"]
    assert [note.partition(":")[0] for note in found.notes] == ["a", "b"]
    assert not witness.exists()


def test_the_named_configuration_is_found() -> None:
    found = read_script(f"D=$PWD\n{RUN} --config-path=$D/config --config-name 'mine' a=1 2>&1 | tee x=y", "verl")
    assert found.config == "${oc.env:PWD}/config/mine"
    assert found.overrides == ["a=1"]
    assert (
        read_script("python a/chatlearn/entrypoint.py grpo --config-file t.yaml x.y=1", "chatlearn").config == "t.yaml"
    )


BRANCHES = """
BACKEND=$1
ENGINE=megatron
N=2
if [[ $ENGINE == "megatron" ]]; then
    NAME=first
    if [ "${USE_LORA:-0}" = "1" ]; then EXTRA=lora; else EXTRA=none; fi
elif [ -n "$HOME_OF_NOBODY" ]
then
    NAME=second
else
    NAME=third
    if [ -f a_file ]; then NAME=fourth; fi
fi
if [ $N -gt 2 ]; then
    N=9
elif [[ ! $ENGINE == fsdp* ]]; then
    N=$((N * 4))
fi
if [ -z "$BACKEND" ]; then BACKEND=unset; fi
"""


def test_branches_are_chosen_by_the_variables_of_the_script() -> None:
    found = read_script(f"{BRANCHES}{RUN} a=$NAME b=$EXTRA c=$N d=$BACKEND", "verl")
    assert found.overrides == ["a=first", "b=none", "c=8", "d=unset"] and not found.notes
    other = read_script(f"{BRANCHES.replace('ENGINE=megatron', 'ENGINE=fsdp2')}{RUN} a=$NAME c=$N", "verl")
    assert other.overrides == ["a=fourth", "c=2"], "a file that only a shell can look for: the last line counts"
    assert "only a shell can choose" in other.notes[0]
    once = read_script(f"A=x/y/x\nif [ $A = b ]; then\n{RUN} a=1\nelse\n{RUN} b=${{A//x/z}} c=${{A/x/z}}\nfi", "verl")
    assert once.overrides == ["b=z/y/z", "c=z/y/x"]


@pytest.mark.parametrize("line", ["if [ $RANK = 0 ]; then", "if grep -q x y; then", "for A in 1 2; do"])
def test_what_only_a_shell_can_choose_is_told(line: str) -> None:
    end = "done" if line.startswith("for") else "fi"
    found = read_script(f"A=0\n{line}\n  A=1\n{end}\n{RUN} a=$A", "verl")
    assert found.overrides == ["a=1"] and "branches" in found.notes[0]


@pytest.mark.parametrize("text", ["", "echo a=1", "python train.py a=1", f"# {RUN} a=1"])
def test_a_script_without_the_command_is_refused(text: str) -> None:
    with pytest.raises(ScriptError, match="no command that starts"):
        read_script(text, "verl")

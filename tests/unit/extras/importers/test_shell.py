"""Launch scripts are read, never run."""

import os
import subprocess
from pathlib import Path

import pytest

from roll.extras.importers.bash import Bash
from roll.extras.importers.reading import ScriptError, Unread, read_script

RUN = "python3 -m verl.trainer.main_ppo"
FUNCTIONS = f'train() {{\n  local name="$1"\n  shift\n  {RUN} a=$name "$@"\n}}\nfunction set_b {{ B=2; }}\nset_b\n'

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

CASES = """
MODE=${1:-small}
while [[ $# -gt 0 ]]; do
  case $1 in
    --mode) MODE="$2"; shift 2 ;;
    *) shift ;;
  esac
done
case "$MODE" in
  small|tiny) A=1; B=2 ;;
  big) A=9 ;;
  *) echo "no $MODE"; exit 1 ;;
esac
[ -z "$C" ] && C=unset
[[ "$MODE" == "big" ]] && A=10
[ -n "${D:-}" ] || D=3
"""

SEVERAL = "the script starts several runs: the first is read"
# A script, the words of its command, what of them only a shell can tell, and notes.
SCRIPTS = {
    "lines that go on": (f"# a\n{RUN} \\\n  a.b=1 \\\n  d=3 $@\necho done=1", ["a.b=1", "d=3"]),
    "its last line goes on": (f"{RUN} \\\n  a.b=1 \\\n  d=3 \\\n", ["a.b=1", "d=3"], {}, ["line 4 cannot be read: "]),
    "a script that ends in the middle of a line": (f"{RUN} a.b=1 d=3 \\", ["a.b=1", "d=3"], {},
        ["line 1 cannot be read: \\"]),
    "variables in order": (f'A=1\nA=2\nexport C=${{A}}z\n{RUN} a=$A c=$C e=$HOME/f g=$A$A\nA=3',
        ["a=2", "c=2z", "e=${oc.env:HOME}/f", "g=22"]),
    "variables in fallbacks":
        (f'A=${{A:-"${{HOME}}/verl"}}\nB=${{B:-"${{A}}/data.parquet"}}\n{RUN} b="${{B}}" c=${{C:-16}}',
         ["b=${oc.env:HOME}/verl/data.parquet", "c=16"]),
    "a value without quotes": ('A="a=1 \\\nb=2"\nD="-m verl.trainer.main_ppo"\npython3 ${D} $A c="$A"',
        ["a=1", "b=2", "c=a=1 b=2"]),
    "arguments of the script": (f'A=(\n  a=1\n  b="x y"   # note\n)\n{RUN} "${{A[@]}}" "$@"', ["a=1", "b=x y"]),
    "branches that end the script":
        (f'N=1\nif [ -z "$M" ]; then echo "M is missing"; exit 1; fi\n[ -f "$M" ] || exit 2\n{RUN} a=$N m=$M',
         ["a=1", "m=${oc.env:M}"]),
    "a variable that must be set": (f'{RUN} e=${{O:+set}} f="${{P:?no P}}"', ["e=", "f=${oc.env:P}"]),
    "the first round of a loop": (f"for lr in 1e-6 5e-6; do\n  {RUN} lr=$lr\ndone", ["lr=1e-6"], {}, [SEVERAL]),
    "the first of several calls": (f"run() {{\n  {RUN} a=$1\n}}\nrun 1\nrun 2", ["a=1"], {}, [SEVERAL]),
    "a do right behind the values of a loop":
        ('rates=(1e-3 1e-4)\nfor rate in "${rates[@]}";do\nif [ "$A" = b ];then\nX=1;fi'
         f"\n{RUN} a=${{rate}}\\\n  b=2\ndone", ["a=1e-3", "b=2"], {}, [SEVERAL]),
    "a document that is run": (f"python - <<'PY'\nprint(\"it's\")\nPY\nbash <<EOF\n{RUN} a=1\nEOF\n", ["a=1"]),
    "a document that is no command": (f"cat > note.txt <<-END\n  don't\n  END\n{RUN} b=2", ["b=2"]),
    "branches": (f"{BRANCHES}{RUN} a=$NAME b=$EXTRA c=$N d=$BACKEND", ["a=first", "b=none", "c=8", "d=unset"]),
    "branches that only a shell can choose":
        (f"{BRANCHES.replace('ENGINE=megatron', 'ENGINE=fsdp2')}{RUN} a=$NAME c=$N", ["c=2"],
         {"a": Unread("second or fourth or third", ("HOME_OF_NOBODY",))}),
    "parts of a variable":
        (f"A=x/y/x\nif [ $A = b ]; then\n{RUN} a=1\nelse\n{RUN} b=${{A//x/z}} c=${{A/x/z}}\nfi",
         ["b=z/y/z", "c=z/y/x"]),
    "a rank": (f"A=0\nif [ $RANK = 0 ]; then\n  A=1\nfi\n{RUN} a=$A b=2", ["b=2"], {"a": Unread("1 or 0", ("RANK",))}),
    "another command": (f"A=0\nif grep -q x y; then\n  A=1\nfi\n{RUN} a=$A b=2", ["b=2"], {"a": Unread("1 or 0", ())}),
    "a loop": (f"A=0\nwhile [ $RANK ]; do\n  A=1\ndone\n{RUN} a=$A b=2", ["b=2"], {"a": Unread("1 or 0", ("RANK",))}),
    "of several commands a shell chooses one":
        (f"if [ $A ]; then\n  {RUN} a=1 n=2\nelse\n  {RUN} a=1 n=3\nfi", ["a=1"], {"n": Unread("2 or 3", ("A",))}),
    "of several values the last decides": (f"if [ $A ]; then N=1; else N=2; fi\n{RUN} n=$N n=3", ["n=3"]),
    "a last value that nobody knows":
        (f"if [ $A ]; then N=1; else N=2; fi\n{RUN} n=3 n=$N", [], {"n": Unread("1 or 2", ("A",))}),
    "paths of the script itself":
        ('HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\nM=Qwen/Qwen3-8B\n' + f'{RUN} a="$HERE/data" '
         'b=$(basename $M) c=${M##*/} d=${M%%/*} e=`dirname $M` f="$(dirname "$0")/x"',
         ["a=work/data", "b=Qwen3-8B", "c=Qwen3-8B", "d=Qwen", "e=Qwen", "f=work/scripts/x"]),
    **{f"a command in a variable, {start}":
        (f'A="[\'x y\', \'z\']"\nCMD="{RUN} \\\n  a=\\"$A\\" b=1 \\$@"\necho "now: $CMD"\n{start}',
         ["a=['x y', 'z']", "b=1"])
        for start in ("eval $CMD", 'bash -c "$CMD"', 'ray job submit -- bash -lc "$CMD"', 'eval "$CMD"')},
    "functions are read where they are called": (f"{FUNCTIONS}train one b=$B c=3", ["a=one", "b=2", "c=3"]),
    "a function that another file calls": (FUNCTIONS, ["a="]),
    "cases and lists": (f"{CASES}{RUN} a=$A b=$B d=$D", ["a=1", "b=2", "d=3"]),
    "other cases": (f"{CASES.replace(':-small', ':-big')}{RUN} a=$A d=$D", ["a=10", "d=3"]),
    **{f"a script that ends without its arguments: {check}":
        (f'{check}\nprocesses=$1\nshift\n{RUN} a=1 trainer.n_gpus_per_node=$processes b=${{2:-3}} "$@"',
         ["a=1", "b=3"], {"trainer.n_gpus_per_node": Unread("$(echo $1)")})
        for check in ('if [ "$#" -lt 2 ]; then\n  echo "Usage: $0 <processes> <folder>"\n  exit 1\nfi',
                      "[ $# -ge 2 ] || { echo usage; exit 1; }", '[ -z "$1" ] && exit 1',
                      'if [[ -z "${1:-}" ]]; then exit 2; fi')},
}  # fmt: skip


@pytest.mark.parametrize("what", SCRIPTS)
def test_words_of_a_script(what):
    script, *expected = SCRIPTS[what]
    found = read_script(script, "verl", "work/scripts/run.sh")
    assert [found.overrides, found.unread, found.notes] == expected + [[], {}, []][len(expected) :]


@pytest.mark.parametrize("line", ["a.b=1 \\\n  # c=2 \\\n  d=3", "a.b=1 \\ \n  d=3", "\\\n  a.b=1\n  c.d=3"])
def test_what_ends_a_command_unseen_is_noted(line):
    found = read_script(f"{RUN} {line}", "verl")
    assert found.overrides == ["a.b=1"], "as bash has it"
    assert "ends the command" in found.notes[0]


def test_processes_of_torchrun_are_settings():
    run = "torchrun --nnodes=1 --nproc-per-node $N -m verl.trainer.fsdp_sft_trainer a=1 engine=fsdp optim=fsdp"
    found = read_script(f"N=4\n{run}", "verl_sft").overrides
    assert found == ["a=1", "engine.strategy=fsdp", "trainer.nnodes=1", "trainer.n_gpus_per_node=4"]


@pytest.mark.parametrize("sum", ["__import__('os').getpid()", "2 ** 10000", "1 / 0", "[1]"])
def test_nothing_but_sums_is_computed(sum):
    found = read_script(f"{RUN} a=$(({sum}))", "verl")
    assert all(word.startswith("a=$((") for word in found.overrides)


def test_what_a_shell_computes_is_never_run_and_told(tmp_path):
    witness = tmp_path / "ran"
    found = read_script(f"{RUN} a=$(touch {witness}) b=`touch {witness}` c=1", "verl")
    assert found.overrides == ["c=1"]
    assert list(found.unread) == ["a", "b"]
    assert not witness.exists()
    found = read_script(f'N="run_$(date +%Y%m%d)"\n{RUN} x.experiment_name=$N x.dir=out/$N', "verl")
    assert found.overrides == ["x.experiment_name=run"] and list(found.unread) == ["x.dir"]
    found = read_script("torchrun --nnodes=$(nproc) --nproc_per_node=4 -m verl.trainer.sft_trainer a=1", "verl_sft")
    assert list(found.unread) == ["trainer.nnodes"] and "trainer.n_gpus_per_node=4" in found.overrides


def test_the_named_configuration_is_found():
    found = read_script(f"D=$PWD\n{RUN} --config-path=$D/config --config-name 'mine' a=1 2>&1 | tee x=y", "verl")
    assert (found.config, found.overrides) == ("${oc.env:PWD}/config/mine", ["a=1"])
    found = read_script("python a/chatlearn/entrypoint.py grpo --config-file t.yaml x.y=1", "chatlearn")
    assert found.config == "t.yaml"


DEVICES = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
ARGS=(a=1 b=2)
if [ "$DEVICE" = npu ]; then
  N=4
  ARGS+=(c=3)
else
  N=16
fi
"""


def test_variables_of_the_environment_decide():
    command = f'{DEVICES}{RUN} "${{ARGS[@]}}" n=$N d=$DEVICE'
    asked = read_script(command, "verl")
    assert asked.overrides == ["a=1", "b=2"]
    assert asked.unread["n"] == Unread("4 or 16", ("DEVICE",)) and asked.unread["c"] == Unread("3", ("DEVICE",))
    gpu = read_script(command, "verl", variables={"DEVICE": "gpu"})
    assert gpu.overrides == ["a=1", "b=2", "n=16", "d=gpu"] and not gpu.unread
    npu = read_script(command, "verl", variables={"DEVICE": "npu"})
    assert npu.overrides == ["a=1", "b=2", "c=3", "n=4", "d=npu"]


def test_variables_of_files_that_the_script_reads_and_those_that_it_sets_itself(tmp_path):
    (tmp_path / "base.sh").write_text("export NUM=8\nif [ $NUM -gt 4 ]; then BIG=yes; fi\n")
    text = f"source scripts/base.sh\n{RUN} n=$NUM b=$BIG"
    found = read_script(text, "verl", find=lambda path: tmp_path / Path(path).name)
    assert found.overrides == ["n=8", "b=yes"]
    absent = read_script(text, "verl")
    assert absent.overrides == ["n=${oc.env:NUM}", "b=${oc.env:BIG}"] and "base.sh" in absent.notes[0]
    found = read_script(f"N=4\n{RUN} n=$N", "verl", variables={"N": "8"})
    assert found.overrides == ["n=4"] and "--set N=8: the script itself sets N to 4" in found.notes


AS_BASH = {
    "arrays": """
L=2
A=(
  n=$((L + L))
  m=$(( L*3 )) # note
  "t=x y" k=16
)
A+=(z=1)
run "${A[@]}" "${A[@]:1:2}" q=${#A[@]} w=${A[$L]}
""",
    "quotes": """x=foo
run a=\\'${x}\\' b='$x' c="'$x'" d="\\$x" e=$x$x"$x y" f=a\\ b g=$'a\\tb'""",
    "splitting": """O="a=1 b=2"\nrun $O "$O" pre$O""",
    "defaults": """
A=${A:-"x y"}
: ${B:=4} "${C:=d e}"
run a="$A" b=$B c="$C" d=${D-e} e=${A:+set} f=${Z:-${B}0}
""",
    "changes": """M=Org/Qwen3-8B.tar.gz
run a=${M##*/} b=${M%%.*} c=${M%.*} d=${M/e/E} f=${M,,} g=${M:4:4} h=${#M} i=${M//[0-9]/_}""",
    "maps": "declare -A P=([a]=1 [b]=2)\nP[c]=3\nk=b\nrun x=${P[a]} y=${P[$k]} z=${P[c]}",
    "sums": "a=7 b=2\nrun $((a/b)) $((-a/b)) $((a%b)) $((a**b)) $(( a>b ? 1+a : b )) $((a>3 && b<3)) $((!a))",
    "loops": """
S=
for i in 1 2 3
do A+=(k$i=$i)
done
n=3
while [ $n -gt 1 ]
do n=$((n-1))
[ $n = 2 ] && continue
S=$S$n
done
run "${A[@]}" $S
""",
    "cases": "M=big\ncase $M in\n small|tiny) A=1 ;;\n b*) A=2; B=3 ;;\n *) A=4 ;;\nesac\nrun a=$A b=$B",
    "tests": """
A=fsdp2
[[ ! $A == meg* && ( -n $A || $A < b ) ]] && B=1
[ "$A" != x -a 2 -le 3 ] || B=2
((3 > 4)) && B=3
if ! [ -z "${Q:-}" ]; then B=4; elif test $A = fsdp2; then C=5; fi
run b=$B c=$C
""",
    "functions": """
f() { local n=$1; shift; G="$n:$*"; return 0; G=no; }
function g { f "$@" z; }
g 1 "2 3"
run "$G" ${undefined:-none}
""",
    "arguments": 'set -- a "b c" d\nshift\nrun "$@" $# "$1" ${2} "${@:2}"',
    "texts": """C="run a=1 \\\n  'b=x y'"\neval "$C" """,
    "indirect": 'N=M\nM=5\nrun a=${!N} b="${M}"',
    "lists": "true && A=1 || A=2\nfalse || B=3\nrun $A $B",
}


@pytest.mark.parametrize("name", AS_BASH)
def test_words_are_those_that_bash_makes(name, tmp_path):
    script = tmp_path / "run.sh"
    start = "shopt -u extglob; run() { printf '%s\\0' \"$@\"; }\n"
    script.write_text(start + AS_BASH[name])
    shell = subprocess.run(
        ["bash", script], env={"PATH": os.environ["PATH"]}, capture_output=True, timeout=20, check=True
    )
    bash = Bash(lambda words: words[0] == "run")
    bash.follow(AS_BASH[name])
    assert [word.text for word in bash.commands[0]][1:] == shell.stdout.decode().split("\0")[:-1]
    assert not any(word.undecided for word in bash.commands[0]) and not bash.notes


@pytest.mark.parametrize("text", ["", "echo a=1", "python train.py a=1", f"# {RUN} a=1"])
def test_a_script_without_the_command_is_refused(text):
    with pytest.raises(ScriptError, match="no command that starts"):
        read_script(text, "verl")

"""Check of shell commands that do something else than they seem to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from ddp_hpc.lint.bash_syntax import is_reached
from ddp_hpc.lint.blocks import reads_pipe
from ddp_hpc.lint.check_registry import Problem, Subject, check, plain, shown, table
from ddp_hpc.lint.launch_commands import single_quoted
from ddp_hpc.lint.parse_script import Command, Script
from ddp_hpc.lint.placeholders import is_template

_NAME = r"[A-Za-z_]\w*"
# A launcher with options whose values are known to end, and a container up to its image.
_LAUNCH = (
    r"(?:srun|mpirun|mpiexec)\s+"
    r"(?:(?:-\w+\s+\d+|--(?!(?:export|g?env|x|comment|wckey)\s)[\w-]+(?:=\S+)?|-[lu])\s+)*"
)
_IMAGE = r"\S*\.(?:sif|simg|sqsh|img)"
# Blanks, and line breaks that continue a command. The values of these options may have the names of images.
_GAP = r"(?:\s|\\\n)+"
_VALUED = r"(?:-[BHSWo]|--(?:overlay|bind|mount|home|workdir|scratch|pwd|cwd|env-file))"
_OWN_IMAGE = _IMAGE.replace(r"\S", r"[^\s\\]")
_EXEC = (
    rf"(?:singularity|apptainer){_GAP}exec{_GAP}(?:{_VALUED}{_GAP}[^\s\\]+{_GAP}|(?!{_VALUED}[\s\\])-[^\s\\]+{_GAP}"
    rf"(?:(?!{_OWN_IMAGE}(?:[\s\\]|$))[^\s\\-][^\s\\]*{_GAP})?)*[^-\s=:,\\]{_OWN_IMAGE}(?:\s|\\\n)*"
)
_PYTHON = r"[^'\"#]*\bpython[\d.]*\s+(?:-u\s+)?"
_ANY = r"(?!echo|printf)[^'\"#]*"
# Rows: the beginning of a command, what is wrong with it, what to write instead, and the severity of those
# that depend on who runs the job. Indented lines continue a row, and <NAME> stands for an expression below.
_TEXT = r"""
\$?SBATCH\s+- @ # is missing, so bash runs this line as a command
    @ write #SBATCH at the beginning of the line, above the first command
\$?PBS\s+- @ # is missing, so bash runs this line as a command
    @ write #PBS at the beginning of the line, above the first command
setenv\s+\w+\s @ setenv is a command of csh, and bash has none @ write export NAME=VALUE
set\s+(?P<read><NAME>)\s*= @ in bash, set does not assign a value to a variable @ write export NAME=VALUE
(?:source|\.)\s+\S+[./]t?csh(?:\s|$) @ bash cannot source a csh script @ source its version for bash
(?:export\s+)?\$\{?(?P<name><NAME>)\}?= @ this does not set the variable @ omit the $
export\s+<NAME>=\s+(?!<NAME>=)[^#\s]|<NAME>=\s+(?:\d|(["'])[^"']*\1\s*(?:#|$))
    @ the blank after = ends the assignment @ write no blank after =
export\s+<NAME>\s+[\d/~"'] @ this does not set the variable @ write export NAME=VALUE
(?:unset|export)\s+<NAME>[.,:;](?:\s|$) @ this is not the name of a variable @ omit the mark
(?:(?:if|elif|while)\s+!?\s*)?\[{1,2}[$"-] @ the blank after [ is missing
    @ write blanks after [ and before ]
export\s+\w+=[^\s"']+,\s+\w+= @ the comma is a part of the value @ omit it
(?P<detached>)(?:screen\s+-\w*d|tmux\s+new\S*\s[^#]*-d) @ the job ends while this runs @ start it directly
<PYTHON>[\w./-]+\.sh(?:\s|$) @ Python cannot run a shell script @ start it with bash, or name a .py file
(?:<LAUNCH>)?(?:ba)?sh\s+[\w./-]+\.py(?:\s|$) @ bash cannot run Python @ use python
<ANY>\s2&?>1(?:\s|$) @ the errors go to a file with the name 1 @ write 2>&1
(?:cd|mkdir|source)\s[^"'(`]*'[^'\n]*\$\{?[A-Z] @ in single quotes, $ is only a character @ write "
(?:export\s+)?<NAME>=\$\{?\w+\}?\*(?:\d+|\$\w+)$ @ bash does not compute it @ write $(( ))
[^#]*--rdzv[-_]endpoint[= ]"?\w+:// @ the endpoint is HOST:PORT, without a protocol @ omit it
cd\s+[^\s'"\\$;&|-][^\s'"\\;&|]*\s+[A-Za-z][\w.-]*$ @ cd takes one directory @ quote its name
(?:apt|apt-get|yum|dnf)\s+(?:-\w+\s+)*install\s @ users cannot do this in a job @ use a container @ note
\$\s+[a-z] @ the prompt of a terminal is not part of a command @ omit the $ @ note
(source|python3?|module|conda|cd|torchrun)\s+\1\s @ this word is written twice @ omit one
(?:source|\.)\s+(?:conda|mamba|env|pip|module)\s+[a-z] @ source opens such a file @ omit it
<LAUNCH><NAME>=\S @ the launcher takes this for a program @ write env before it
<EXEC>$ @ no command follows the image, so nothing starts @ write it on the same line
<EXEC><NAME>= @ the container takes this for a program @ write env before it
horovodrun\s[^#]*-H\s+\S+:\d+\s+[\w.-]+:\d+\s @ the hosts need commas @ write HOST:N,HOST:N
<LAUNCH>--mpi[= ](?!["']?(?:none|list|pmi|psp|openmpi|cray|lam|mpich|mvapich|hydra|exa|\S*\$))
    @ Slurm has no such type of MPI @ use --mpi=pmix, or a type that srun --mpi=list prints
(?:\w+=\S+\s+)*sbatch\s+[Nnc]\d+\s+- @ sbatch takes this for the script @ write - before it
sbatch\s(?:[^#]*\s)?--(dependency|export)[= ](?:(?!\$\(|\.(?:sh|slurm|sbatch|job)\s)[^#])*\s--\1[= ]
    @ only the last counts @ join both
(?P<alone>)ssh\s+(?:-[oipl]\s+\S+\s+)*[\w.@"'${}][\w.@"'${}\[\]-]*$
    @ ssh without a command does not run the lines below on that host @ write ssh HOST 'COMMANDS'
[^#]*\bgmx_mpi\w*\s+mdrun\s[^#]*-nt(?:mpi)?\s @ gmx_mpi has no thread-MPI
    @ write -ntomp for -nt, and mpirun -np for -ntmpi
rm\s+(?:-\w+\s+)+(["'])(?:\$\{\w+\}|[^"'\n{(`])*\*[^"'\n]*\1
    @ in quotes, * is only a character, so this deletes nothing @ write the * outside the quotes
for\s+\w+\s+in\s+\{\w*\.\.\$ @ bash expands braces before variables @ use $(seq FIRST LAST)
for\s+\w+\s+in\s+(?:\d+\.\.\d+|\{\d+-\d+\})\s*$ @ this is one word, not a list @ write {FIRST..LAST}
(?!(?:lscpu|uname|hostname|date)\b|env\s+2>)(?:[^'"#|(`]|\([^()'"#|`]*\))*\s2>&1 +>>? *(?!/dev/null)[\w./$]
    @ standard error does not go to the file, as 2>&1 comes before its name
    @ write 2>&1 after it, as in > FILE 2>&1
<ANY>[\s=][\u201c\u201d] @ bash does not treat these quotes as quotes @ write " @ note
(?!(?:ssh|pdsh|clush|parallel|xargs|echo|printf)\s)[^'"#]*\s\\&\\&\s
    @ the escaped ampersands are arguments of this command @ write &&
(?:(?:if|elif|while)\s+)?\[\s(?!.*\|\s*bc\b)(?:[^\]"'(]|"[^"]*"|'[^']*')*\s>=?\s*[\d$]
    @ in [ ], > redirects output to a file instead of comparing @ write -gt for >, or -ge for >=
(?:(?:if|elif|while)\s+)?\[\s(?!.*\|\s*bc\b)(?:[^\]"'(`<]|"[^"]*"|'[^']*')*\s<=?\s*[\d$]
    @ in [ ], < reads from a file instead of comparing @ write -lt for <, or -le for <=
(?:export\s+)?(?!PATH=)<NAME>=["']~/ @ bash does not expand ~ in quotes @ write "$HOME/..." @ note
(?:export\s+)?(LD_LIBRARY_PATH|PYTHONPATH)=(?!.*\$\{?\1\b).*:\$\{?PATH\b
    @ PATH contains the directories of programs, and the former value is lost
    @ write the variable's own name at the end @ note
cd\s+(?:\S*["'/])?(?:PBS_O_WORKDIR|SLURM_SUBMIT_DIR)\b|(?:mpi|srun)[^'"#$]*\s-np?\s+(?:SLURM|PBS)_[A-Z]
    @ the $ of the variable is missing @ write $ before its name
(?:export\s+)?(?P<read><NAME>)=(?:SLURM|PBS)_(?:ARRAY|JOB|NTASKS|CPUS|NNODES|NODE|O_)\w*\s*$
    @ the $ of the variable is missing @ write $ before its name
(?:module|ml)\s+(?:load|add)\s[^#\n]*?(?:\w,(?:\s|$)|\s/\s)
    @ module takes this comma or slash for a part of a name, or for a name @ omit the comma, or the blanks
(?:<LAUNCH>|<EXEC>)(?:source|\.|cd|export|module|eval|(?:conda|mamba) (?:de)?activate)\s
    @ a launcher or container starts programs, and this is a command of the shell
    @ omit the launcher or container, or write bash -c '...' around this and what shall run after it
(?!echo|printf|which|(?:for|type|hash|ls|ml|command|spack)\s|\S*(?:conda|mamba|pip|module)\b)
    <PYTHON>(?:torchrun|accelerate|mpirun|srun)\s
    @ Python opens a file of this name @ omit python
<PYTHON>-m\s+(?:torch\.distributed\.(?!launch\b|run\b|elastic|checkpoint)\w|torchrun\s)
    @ no such module @ write torchrun instead of Python and -m
[^']*\bg?awk\s+(?:-[Fv]\s?\S+\s+)*"(?!BEGIN)[^"']*\{\s*print \$\d
    @ in double quotes, bash expands the $1 of awk @ write \$1, or use awk -v and single quotes @ note
[^#]*--rdzv[-_]backend[= ]\s*(?!['"]?(?:c10d|static|etcd)|[\s"'$]) @ PyTorch has no such backend @ use c10d
[^#]*scontrol\s+show\s+host(?!(?:name)?s?\b|list(?:sorted)?\b)\w+
    @ scontrol does not know this word @ write hostnames
(?:sbatch|srun|mpirun|mpiexec|salloc)\s(?:--[\w-]+=\S+\s+)*["']--?\w[\w-]*\s[^"'$]*["']
    @ the quotes make the option and its value one word @ omit them
<LAUNCH>[^#'"]{,500}sh\s+-\w*c\s+(["'])\s*(?:(?:source|\.)\s
    (?=[^;&|\n]*(?:activate|bashrc|profile|env|setup|setvars|conda|module))
    |conda activate\s|module load\s|export\s)[^;&|\n]*\1\s*$
    @ this changes only the shell that -c starts, which then ends
    @ move it into the script, or start the program in the same shell
srun\s(?:[^#'"]|"\$[^"']*")*\bray\s+start\s(?![^#]*--block)
    @ ray start returns, which ends the step @ add --block, and & at the end
\./etc/profile(?:\.d/\S+)?$ @ the blank after the first dot is missing @ write source /etc/... @ note
(?:(?:ba)?sh )?(?!\./etc/)"?[^\s="]*(?:bin/activate|profile\.d/\w+\.sh)/?"?$
    @ without source, this file changes only its own process, not the shell of the job @ write source FILE
<ANY>\b(?:python[\d.]*|torchrun|accelerate launch)\s(?:-\S+\s)*-m\s+[\w./]+\.py(?:\s|$)
    @ -m takes the name of a module, not of a file @ omit -m, or write PACKAGE.MODULE
<PYTHON>torch\.distributed\.(?:run|launch)\s @ Python opens a file of this name @ write -m first
(?:srun\s.{,300}?)?(?:singularity|apptainer)\s[^#]{,300}?(?:-B|--bind)\s+[^\s:]+\s+/(?!<IMAGE>)\S*\s+<IMAGE>
    @ the second directory is taken for the image @ write SOURCE:DESTINATION
(?:srun|mpirun|mpiexec)\s[^']*sh\s+-\w*c\s+'[^'"]*(?<!["\w])[\w-]*[= ]\\\$\{?[A-Z]{3}
    @ in single quotes, the backslash stays @ omit it
<ANY>\s[\u2013\u2014]\w @ an option begins with a long dash, not a hyphen @ write - or --
<PYTHON>[^'"#]*\s--[\w-]+\s=\s?\S @ = is an argument of its own @ omit the blanks
<EXEC>- @ the container takes this option for the program @ write it before the image
(?:docker|podman)\s+run\s[^#]*\s(?:-v|--volume)\s+[^\s:\\]+\s+/ @ a volume is one word @ write SOURCE:PATH
export\s+<NAME>\s+=\S @ the blank before = is wrong here @ omit it
<NAME>=\$\(\s*wc -l "?\$\{?PBS_NODEFILE\}?"?\s*\) @ wc also prints the name @ write wc -l < $PBS_NODEFILE
<ANY>\s[12]?>>?\s*[^\s'"$]*%[jJaA]\b @ bash does not replace %
    @ write $SLURM_JOB_ID, or $SLURM_ARRAY_TASK_ID for %a
<PYTHON>[^'"#$]*(?<!env)(?<!var)[\s=](?:SLURM|PBS)_(?:ARRAY|JOB|PROC|NTASKS|CPUS)\w*(?:\s|$)
    @ the $ is missing @ write it
rm\s+-\s+[rf]+\s @ the blank after - separates it from the option @ omit the blank after - @ note
<ANY>[ ="]\.\./\$\{?(?:SLURM_SUBMIT_DIR|PBS_O_WORKDIR|HOME|PWD)\b(?![#%])
    @ the value begins with /, so ../ before it makes it another directory
    @ omit ../, or write it after the variable
(?:<LAUNCH>|ibrun\s+)?(?:singularity|apptainer)\s+[\w./-]+\.(?:sif|simg|img)\s @ exec or run is missing
    @ write exec
[^#']*\b(?:ba)?sh\s+-\w*c\s+"(?!\$\x40")[^"]*(?<!\\)\$\x40
    @ the command gets only the first argument @ write $*
[^#']*\b(?:ba)?sh\s+-\w*c\s+"\$\x40" @ only the first argument is the command @ give it one argument @ note
(?!sed|grep)[^#']*[_/=-]\{\$\w+\} @ in {$NAME}, the braces stay in the text @ write ${NAME} @ note
srun\s(?![^#]*--overlap)[^#'"]{,300}sh\s+-\w*c\s+(["'])(?:(?!\1).)*?\bsrun\s
    @ the inner srun waits for the CPUs of the step in which it runs @ omit one srun, or add --overlap @ note
[^#]*\bscontrol\s[^#|]*[^#]*\|\|\s*echo\s+["']?(?:localhost|127)
    @ where scontrol fails, such as in a container, each node waits at itself @ omit || echo @ note
ssh\s(?:[^'"#]|"[^"]*")*'[^']*\$\{?(?:PBS|SLURM)_\w @ ssh passes no variables @ write " for ' @ note
sbatch\s(?=[^#]*(?:--array|-a)[= ])[^'#]*--wrap[= ]?"[^"]*(?<!\\)\$(?:\{?|\(\(\s*)SLURM_ARRAY_TASK_ID
    @ the shell that submits expands this, and it is empty there @ write --wrap='...' @ note
sbatch\s(?:[^#]*\s)?--export[= ]["']?(?!ALL\b|NONE\b|NIL\b)\w+=(?!\S*\bALL\b)
    @ the job steps get no other variables, such as PATH @ write --export=ALL,NAME=VALUE @ note
<ANY>\b(?:torchrun|torch\.distributed\.(?:run|launch))\s[^#]*?\.py\s[^#]*--local[-_]rank[= ]\d
    @ this gives the same local rank to all ranks @ omit it, and read LOCAL_RANK @ note
<ANY>\s--?(?:gpus?|device|gpu[-_]ids?)[= ]"?\$\{?(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES
    @ a program counts the GPUs that it sees from 0 @ write numbers from 0, or omit it @ note
<ANY>\baccelerate\s+launch\s[^#]*--mixed[-_]precision[= ](?!["']?(?:no|fp16|bf16|fp8)\b|\S*\$)
    @ accelerate knows no, fp16, bf16 and fp8 @ write one of them @ note
<ANY>\bdeepspeed\s[^#]*--launcher[= ](?!(?i:["']?(?:pdsh|openmpi|mpich|mvapich|impi|slurm)\b)|\S*\$)
    @ DeepSpeed has no such launcher @ use pdsh, slurm, openmpi, mpich, mvapich or impi @ note
<ANY>(?<!\S)(?:/bin/)?(?:ba|z)?sh\s+-l?c\s+[\w./-]+\s+[^\s;&|<>)]
    @ the shell takes only the first word for the command @ quote the whole command @ note
(?:<LAUNCH>)?accelerate\s+(?:--(?!help|version)\w|[\w./-]+\.py\b)
    @ launch is missing @ write accelerate launch @ note
[^#'"]*\bsbatch\s[^#"']*--wrap[= ]\s*(?:"[^"]*"|'[^']*'|[^\s"'-]\S*)\s+[\w./][\w./-]*(?:\s|$)
    @ sbatch takes no script with --wrap @ quote the whole command, or omit the script @ note
[^#'"]*\bqsub\s[^#'"]*?\.(?:sh|pbs|qsub|job)\s+-[A-Za-z]\s
    @ qsub reads no options after the name of the script @ write them before it @ note
<NAME>=["']?(?:\$\(|`)\s*qsub\s[^#|]*\|\s*cut\s+(?:-[bc]|--ch)
    @ the number of a job has no fixed number of digits @ write cut -d. -f1, or use the whole ID @ note
[^#'"]*\bqsub\s[^#'"]*-[lv]\s+[^\s-][^\s'"]*,\s+\w+= @ the list ends at this blank @ omit it @ note
(?:<LAUNCH>)?(?:singularity|apptainer)<GAP>exec<GAP>
    (?:<VALUED>[= ][^\s\\]+<GAP>|(?!<VALUED>[\s\\])-[^\s\\]+<GAP>)*
    ["']?(?=[^\s"']*(?i:image|img|sif|container|docker:))(?![^\s"']*(?i:opt|arg|flag))[^\s"'=,-][^\s"'=,\\]*["']?<GAP>
    (?:-B|--(?:bind|nv|rocm|cleanenv|containall|env|home|pwd|no-home|overlay|writable-tmpfs))[\s=]
    @ the container takes this option for the program @ write it before the image @ note
trap\s+(["'])(?!.*(?:\$\?|\bif\b|&&|\|\||\[\s))[^\n]{,300}?(?:touch\s|>)[^\n;&|]{,200}?
    (?i:complete|done|success|finish)[^\n;]*?\1\s+(?:\w+\s+)*?(?:EXIT|0)\b
    @ this writes the file even if a program has failed @ write it after the last program has succeeded @ note
(?!echo|printf)[^#]*(?:depend=|--dependency[= ]|\s-d\s?)["']?after\w*:[^\s,?]{,300}?:after\w*:
    @ the second type of dependency is taken for the ID of a job @ write a comma before it @ note
(?!foamJob)(?:\S*/)?(?:\w*(?:Foam|Mesh)|redistributePar)\s[^#|;&]*?(?<=\s)-parallel(?:\s|$)
    @ without mpirun, OpenFOAM stops, as it runs on one processor @ write mpirun -np N before it @ note
(?:\S*/)?matlab\s[^#;|]*\s-(?:batch|r)\s+["']?[A-Za-z]\w*\.m\s*(?:["';,]|\s|$)
    @ MATLAB takes this for the field m of a variable, and fails @ omit .m
[^#]*\bR\s+CMD\s+BATCH\s+(?:-\S+\s+)*[^\s-]\S*\.[Rr]\s+"?\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_?I\w+)\}?"?\s*$
    @ R takes the index for the name of the output file, so the program gets no argument
    @ write Rscript FILE.R ARGUMENT @ note
(?P<alone>)(?:\S*/)?R(?=\s)(?!.*\s(?:-f|-e|CMD|--(?:no-?save|save|vanilla|slave|no-echo|file=\S*))(?:\s|$))[^#<|]*<\s*[^\s<]
    @ without --save, --no-save or --vanilla, R stops if its input is no terminal @ add --no-save
while\s[^#]{,50}\bsqueue\b(?![^#]*(?:grep|\s-[jnp]\b|--(?:jobs?|name)|SLURM_JOB_ID))[^#]*\s-u[^#]*\bwc\b[^#]*(?:-gt|-ne|>|!=)\s*["']?0
    @ the jobs of the user include this one, so this loop does not end
    @ select the others by their name or ID, or use sbatch --wait @ note
(?P<ends>)sleep\s+(?:inf(?:inity)?|\d{6,}|\d+d)\s*$
    @ this keeps the nodes until the walltime, though the programs have ended @ remove it @ note
(?P<alone>)(?:srun\s+|mpirun\s[^#|]*)?(?:\S*/)?gmx(?:_mpi)?\s+(?:trjconv|rms|rmsf|gyrate|energy|genion|hbond|covar|make_ndx)\s(?![^#]*(?:<|--?h(?:elp)?\b))
    @ GROMACS asks for a group here, and a batch job has no input @ write echo GROUP | before it @ note
(?P<left>)(?:\S*/)?(?:abaqus|abq\d\w*)\s(?=[^#]{,500}?\b(?:job=|j=|-?job\s))(?!\s*-?(?:make|python|cae|viewer|odbreport|upgrade|help
    |fetch|terminate|suspend|resume|findkeyword|ascfil|append)\b)(?![^#]*(?:\s-?int(?:e\w*)?(?:\s|$)|\s["']?\$))
    @ abaqus runs in the background, so the job may end before the analysis has finished
    @ add interactive @ note
(?:[^#'"|]{,99}\|\s*)?parallel\s(?=[^#]{,300}?(?:--sshlogin(?:file)?|--slf|-S)[\s=])
    (?![^#]{,500}?(?:--(?:workdir|wd|basefile|transfer|bf)\b|\bcd\s))[^#]{,300}?[\s"']\./\w
    @ on other hosts, GNU parallel runs this in the home directory @ add --workdir "$PWD" @ note
(?:wandb|huggingface-cli|hf auth|hf)\s+login\s*$|accelerate\s+config\s*$
    @ this command may wait for input, which a batch job does not get
    @ run it before submitting, on a login node @ note
(?P<online>)(?:<PYTHON>-m\s+)?(?:pip3?|conda|mamba)\s+install\s(?!.*--(?:no-index|offline)|.*\s-e\s|.*\s\.\S*$)
    |git\s+clone\s+https:|(?:huggingface-cli|hf)\s+download\s
    @ this command needs the internet, which compute nodes of many sites cannot reach
    @ run it before submitting, on a login node @ note
"""
_NAMES = {"NAME": _NAME, "PYTHON": _PYTHON, "LAUNCH": _LAUNCH, "EXEC": _EXEC, "IMAGE": _IMAGE, "ANY": _ANY}
_NAMES |= {"GAP": _GAP, "VALUED": _VALUED}
_ROWS = table(re.sub("<([A-Z]+)>", lambda name: _NAMES[name[1]], _TEXT))
_DOWNLOADS = re.compile(
    r"(?m)^[ \t]*(?:wget|curl)\s|(?i:https?_proxy=)|--no-index|--index-url|PIP_(?:CONFIG|INDEX)_"
)
# With these, another shell or program may expand the ~ of a value, or the name in it.
_EXPANDS_LATER = re.compile(
    r"\b(?:eval(?!\s+[\"']?(?:\$\(|`)\S*(?:conda|mamba)\b)|ssh|rsync|scp"
    r"|matlab|octave|Rscript)\b|sbatch <\(|expanduser|\$\{!|declare -n"
)
_EXPANDS_TEXT = re.compile(r"\beval\b|envsubst|sh\s+-\w*c\b|\bssh\b|\bsed\b|\bawk\b|--wrap")
_SUBMITTED = re.compile(r"(\w+)=[\"']?(?:\$\(|`)\s*sbatch\s(?![^`]*(?:--parsable|\||<<))")
_WRAPPED = re.compile(
    r"\bsbatch\s[^#'\"]{,500}?--wrap[= ]?\"(?:[^\"\\]|\\.)*?"
    r"\$\{?(SLURM_(?:JOB_?ID|CPUS_PER|NTASKS|NNODES|PROCID|LOCALID|NODE)\w*)"
)
_ENDLESS = re.compile(
    r"(?:srun\s[^#|]*\s)?(?:nvidia-smi\s(?!.*\s(?:-c|--count)\b)[^#|]*(?:-l\b|--loop|\bdmon)|"
    r"watch\s(?!.*(?:-g|--chgexit)\b)|tail\s+-[fF]\s(?![^#]*--pid)|"
    r"tensorboard\s+--logdir|vllm\s+serve\s|jupyter(?:\s|-)(?:lab|notebook)\b(?!\s+(?:list|stop|password|build|clean|path|--(?:version|help|generate-config)))|ray\s+start\s[^#]*--block|"
    r"mlflow\s+(?:ui|server)|ollama\s+serve|python\S*\s+-m\s+(?:http\.server|vllm\.ent|sglang\.launch_ser))"
)
_SERVERS = re.compile(r"redis-server\b|(?:\S*/)?(?:mongod|mysqld)\s(?!.*--fork)|nvidia-cuda-mps-control -f")
_FOR_USERS = re.compile(r"jupyter|vllm|ollama|tensorboard|mlflow|http\.server|sglang")
_ENDS_OTHERS = re.compile(
    r"(?:kill|pkill|killall|trap|disown|scancel|set)\b|.*(?:redis-cli\b.*\bshutdown|--shutdown|mysqladmin)"
)
# A program that ends, and none that serves others.
_ENDS_ITSELF = re.compile(
    r"(?i)(?!.*(?<!-)\b\w*(?:server?|worker|scheduler|controller|dask|jupyter)\b)(?!ray start)"
    r"(?:.*[\w}]\.(?:py|sh|jl|r)\b|.*\s\./|.*\sbench\b|python\S*\s+-m\s+(?!pip|venv|ip|http)\w)"
)
_ENDLESS_LOOP = re.compile(
    r"(?m)^while\s+(?:true|:|\[\s+1\s+\])\s*(?:;|\n)\s*do\b(?:(?!^done\b|\bbreak\b|\bexit\b)[\s\S]){,2000}?"
    r"^done\b[^\n#]*&[ \t]*$"
)
_WAITS = re.compile(r"[^#]{,300}(?:\b(?:sleep|wait|while|until)\b|\.lck\b)")
_OF_WAIT = "write the IDs of the other processes after wait, or kill that one first"
_STARTS = re.compile(r"(?:srun|mpirun|mpiexec|torchrun|accelerate|deepspeed|python[\d.]*|bash)\s")
_ENDS = re.compile("|echo|printf|date|kill|wait|sleep|exit|rm|deactivate|conda|module")
_ENDS_WITH_SCREENS = re.compile(
    rf"{_ENDS.pattern}|screen|tmux|for|done|fi|cd|export|source|ls|exec|popd|mv|cp|nvidia-smi|squeue|cat|hostname|env|free|mkdir"
)
_PATH_WITH_SEMICOLON = re.compile(
    r"\s*(?:export\s+)?\w*PATH=[^;#\"']*;(?:/|\$\{?\w+\}?(?:/|$))[^\s;]*(?<!\.sh)\s*"
)
# Shebangs, and lines that their programs do not understand, unless sh is bash.
_OF_OTHER_SHELLS = (
    (r"(?:/|\s)(?:da)?sh\b", r"\s*(?:source\s|\w+=\(|(?:if|while)?\s*\[\[\s)"),
    (r"(?:/|\s)(?:da)?sh\b", r"(?:function|let)\s|set\s+-\w*o\s+pipefail|[^#\"']*\s&>"),
    (r"python", r"(?:module|srun|mpirun|conda)\s+\w|export\s+\w+="),
    (r"(?:/|\s)t?csh(?:\s|$)", r"\s*(?:export\s+\w+=|source\s+\S*/bin/activate(?:\s|$))"),
)
# The command before a here-document without quotes, its last line, and its text.
_DOCUMENT = re.compile(r"(?m)^([^#\n]*)<<-?[ ]?(\w+)[^\n]*\n((?:(?![ \t]*\2[ \t]*$).*\n)*)")
_OF_TASKS = r"(?<!\\)\$\{?(SLURM_(?:PROCID|LOCALID|NODEID))\b"
# Commands in $( ) that print one word.
_ONE_WORD = re.compile(r"(?:head|tail)\s+-(?:n\s*)?1\b|(?:\(|`)\s*hostname\b(?!.*-I)|--parsable|\bwc\s")
_BARE_INDEX = re.compile(r"(?<!\\)\$([A-Za-z_]\w*)\[\$?\{?\w")
_OF_ARRAY = re.compile(r"\$\{?(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX)")


@check("JOB034", "warning", "a shell command that does something else")
def _something_else(subject: Subject) -> Iterator[Problem]:
    script = subject.script
    if match := re.match(r"(?:/usr)?/bin/env\s+(?!-)(\w+\s+-.*)", script.shebang):
        what = f"Linux passes {shown(match[1])} to env as one word, so env looks for a program of that name"
        remedy = f"write #!/usr/bin/env -S {plain(match[1])}, or #! and the path of the program"
        yield Problem(1, what, remedy, "error")
    is_sh = re.search(r"(?:/|\s)sh\b", script.shebang)
    # dash has no command module, except in a login shell: where the script runs, sh is bash.
    has_modules = any(command.name in ("module", "ml") for command in script.commands)
    is_bash = subject.shell == "bash" or (has_modules and not subject.scheduler.reader.starts_login_shell)
    is_known = not script.scheduler or (is_sh and is_bash)
    for shell, code in () if is_known else _OF_OTHER_SHELLS:
        line = next((n for n, text in enumerate(script.lines, 1) if re.match(code, text)), 0)
        if line and re.search(shell, script.shebang) and not script.is_quoted(line):
            program = "where sh is dash, as on Debian and Ubuntu, it" if is_sh else plain(script.shebang)
            what = f"{program} may not know {shown(script.lines[line - 1].strip())}"
            yield Problem(line, what, "write #!/bin/bash in line 1", "note")
    if not re.search(r"\b(?:ba)?sh\b", script.shebang) or is_template(script):
        return
    for document in _DOCUMENT.finditer(script.text):
        is_job = "sbatch" in document[1] and not script.read()
        if name := re.search(r"(?<!\\)\$\{?(SLURM_\w+)" if is_job else _OF_TASKS, document[3]):
            what = f"the shell that writes this expands {name[1]}, which later jobs and tasks set"
            line = script.text.count("\n", 0, document.start(3) + name.start()) + 1
            yield Problem(line, what, "write a backslash before the $", "note")
    notes: set[str] = set()  # one of each kind
    for command in script.commands:
        for what, remedy, *severity in (*_beginnings(script, command), *_not_expanded(script, command)):
            if what not in notes and is_reached(script, command.line):
                notes.update([what] if severity else [])
                yield Problem(command.line, what, remedy, "note" if severity else None)


def _beginnings(script: Script, command: Command) -> Iterator[list[str]]:
    for beginning, *row in _ROWS if command.ends not in ("|", "|&", ")") else ():
        match = re.match(beginning, command.text.rstrip())
        if match is None or ("~/" in match[0] and _EXPANDS_LATER.search(script.text)):
            continue
        if any(name in match.groupdict() and is_meant(script, command) for name, is_meant in _UNLESS.items()):
            continue
        # The variable may contain a name, setenv may be a function, and a branch may be for csh.
        name, read = (match.groupdict().get(group) for group in ("name", "read"))
        sets = rf"(?<![$\w{{]){name}=|\b(?:for|read)\b.*\b{name}\b" if name else r"\bsetenv *\(|\$SHELL.*csh"
        # In arithmetic, such as the index of an array, bash takes a name for the value of its variable.
        is_read = not read or re.search(
            rf"(?m)^(?![ \t]*#|.*\b(?:printenv|eval)\b).*(?<!\[)\$\{{?{read}\b(?![^\n]*\)\))", script.text
        )
        if is_read and not re.search(sets, script.text):
            yield row


def _is_online(script: Script, command: Command) -> bool:
    """Returns whether a command runs only if something is missing, or the job evidently has the internet."""
    is_conditional = command.line in script.conditions or "||" in script.lines[command.line - 1]
    return is_conditional or bool(_DOWNLOADS.search(script.text))


def _is_followed(script: Script, command: Command) -> bool:
    """Returns whether the script goes on, for example with a program that uses a server, or with a loop."""
    after = (c.name for c in script.commands if c.line > command.line)
    return any(name == "sleep" or not _ENDS_WITH_SCREENS.fullmatch(name) for name in after)


@lru_cache(maxsize=8)
def _last_wait(text: str) -> int:
    """Returns the last line that may wait for a program in the background; 0 if there is none."""
    return max((number for number, line in enumerate(text.splitlines(), 1) if _WAITS.match(line)), default=0)


def _is_awaited(script: Script, command: Command) -> bool:
    """Returns whether a command may wait for one that has gone to the background."""
    return command.line < _last_wait(script.text)


def _has_a_purpose(script: Script, command: Command) -> bool:
    """Returns whether no program has run before this command, or others follow."""
    before = any(
        _ENDS_ITSELF.match(c.text[:1000]) and c.ends == "\n" for c in script.commands if c.line < command.line
    )
    return not before or command is not script.commands[-1]


# Groups of expressions, and when what they match is as meant.
_UNLESS = {
    "online": _is_online,
    "detached": _is_followed,
    "alone": reads_pipe,
    "left": _is_awaited,
    "ends": _has_a_purpose,
}


def _keeps_others_waiting(script: Script, command: Command) -> bool:
    """Returns whether a command that does not end runs in the foreground, with others after it."""
    is_last = command.ends != "\n" or command is script.commands[-1]
    if is_last or not _ENDLESS.match(command.text) or re.search(r"\btimeout\b", command.text):
        return False
    line, *following = script.lines[command.line - 1 :]
    following_word = next((text.split()[0] for text in following if text.strip(" \t#")), "")
    # In a function, a loop or a branch, what follows may run without it. After the last program, none waits.
    after = [c for c in script.commands if c.line > command.line and not _ENDS.fullmatch(c.name)]
    if "jupyter" in command.text:  # whose user may end it, so that the script saves the results
        after = [c for c in after if c.name not in ("cp", "rsync", "mv", "tar")]
    is_inside = line[:1].isspace() or re.match(r"else|elif|fi|done|esac|[})]", following_word)
    return bool(after) and not is_inside


def _endless_before(script: Script, wait: Command) -> int:
    """Returns the line of a program in the background that does not end by itself; 0 if there is none."""
    if wait is not next(c for c in script.commands if c.words == ("wait",)):
        return 0
    before = [c for c in script.commands if c.line < wait.line]
    if any(_ENDS_OTHERS.match(c.text) for c in before):
        return 0
    started = [c.line for c in before if c.ends == "&" and _runs_on(c)]
    # A script that only starts servers waits for them on purpose.
    others = [c for c in before if _ENDS_ITSELF.match(c.text[:1000]) and not _runs_on(c)]
    # A user may work with Jupyter or a model after the programs that prepare it.
    is_service = any(c.line in started and _FOR_USERS.search(c.text) for c in before)
    if not others or (is_service and all(c.ends != "&" for c in others)):
        return 0
    text = "\n".join(script.lines[: wait.line - 1])
    loops = (text.count("\n", 0, loop.start()) + 1 for loop in _ENDLESS_LOOP.finditer(text))
    return next((line for line in (*started, *loops) if not script.is_quoted(line)), 0)


def _runs_on(command: Command) -> bool:
    is_stopped = re.search(r"\btimeout\b|--pid|--kill-on-bad-exit|--daemonize", command.text)
    return not is_stopped and (_ENDLESS.match(command.text) or _SERVERS.match(command.text)) is not None


def _not_expanded(script: Script, command: Command) -> Iterator[tuple[str, ...]]:
    outside = re.sub(r"'[^']*'", "", command.text)
    quoted = re.match(r"\"\$\{?(\w+)\}?\"(?=\s|$)", outside)
    literal = re.match(r"(?:export\s+)?(\w+)='[^']*\$\{?([A-Za-z_]\w*)[^']*'$", command.text.rstrip())
    if literal and script.sets(literal[2]) and not _EXPANDS_TEXT.search(script.text):
        yield f"in single quotes, the text ${literal[2]} stays as it is", 'write "', "note"
    wrapped = _WRAPPED.search(command.text) if not script.read() else None
    if wrapped and not script.sets(wrapped[1]):
        yield (
            f"the shell that submits expands ${wrapped[1]}, which is empty there",
            "write --wrap='...'",
            "note",
        )
    directory = re.match(r"cd\s+\"?\$\{?(\w+)\b", outside)
    if directory and script.set_once.get(directory[1]) == "":
        what = f"{directory[1]} is empty, so cd does not go to the directory that is meant"
        yield what, f"write a directory after {directory[1]}=", "note"
    if quoted and re.match(r"(?:\w\S*\s+-|python\S*\s|srun\s)", script.set_once.get(quoted[1], "")):
        yield f"the quotes make all words of {quoted[0]} the name of one program", "omit the quotes"
    if re.search(r"\bscontrol\s+requeue\b", command.text) and script.value("--no-requeue") is not None:
        yield "with --no-requeue, Slurm refuses this", "write --requeue", "note"
    if command.name == "exit" and command.line == script.end:
        later = enumerate(script.lines[command.line :], command.line + 1)
        if line := next((n for n, text in later if _STARTS.match(text) and not script.is_quoted(n)), 0):
            yield f"the script ends here, and never reaches line {line}", "remove this line", "note"
    if re.match(r"tail\s+-[fF]\s(?!.*--pid)", outside) and command.ends == "\n" and script.scheduler:
        yield "this command does not end before the walltime", "write --pid=$!, or & at its end", "note"
    elif command.words == ("wait",) and (endless := _endless_before(script, command)):
        yield f"this also waits for the process of line {endless}, which does not end", _OF_WAIT
    elif _keeps_others_waiting(script, command):
        yield "this command does not end, so the next one never starts", "write & at its end"
    if _PATH_WITH_SEMICOLON.fullmatch(script.lines[command.line - 1]) and "=" in command.text:
        yield "the semicolon ends the value, and bash runs the directory after it", "write : instead"
    submits = _SUBMITTED.match(outside)
    if submits and submits[1] in script.set_once:
        waits = rf"\s(?:-d|--dep\w*)[= ][\"']?\w+:[\"']?\$\{{?{submits[1]}\b(?!\}}?[#%/])"
        is_given = re.search(r"(?m)^(?![ \t]*#|.*[(`]\s*sbatch).*--parsable", script.text)
        if re.search(waits, script.text) and not is_given:  # in a variable or a function
            yield "sbatch prints a sentence, not only the job ID", "add --parsable after sbatch"
    is_quoted = _OF_ARRAY.search(single_quoted(command.text)) and not _OF_ARRAY.search(outside)
    if is_quoted and (tool := re.search(r"\b(?:sed|g?awk)\b", outside)):
        what = f"bash expands no variable in the single quotes of {tool[0]}"
        yield what, "end the quotes before the variable, and begin them again after it"
    yield from _indices(script, command, outside)


def _indices(script: Script, command: Command, outside: str) -> Iterator[tuple[str, ...]]:
    """Yields indices of strings, and indices without braces."""
    for name, index in re.findall(r"\$\{(\w+)\[(\d+|\$?\{?\w+\}?)\]\}", outside):
        value = script.set_once.get(name, "")
        is_one = index == "0" and _ONE_WORD.search(value)
        if (
            re.match(r"\$\(|`", value)
            and not is_one
            and not re.search(rf"(?:-\w*a |\b(?:mapfile|readarray)\b.*){name}\b", script.text)
        ):
            name = plain(name)
            what = f"{name} is a string, not an array, so ${{{name}[0]}} is all of it"
            is_shown = command.name == "echo" and command.ends == "\n" and ">" not in outside
            yield what, f"write {name}=($(...)) where it is set", *(("note",) if is_shown else ())
    for name in _BARE_INDEX.findall(outside):
        if re.search(rf"(?m)^[ \t]*(?:declare -a\s+)?{name}=\(", script.text):
            yield (
                f"${plain(name)}[ ] is the first element and the index in brackets",
                f"write ${{{name}[INDEX]}}",
            )

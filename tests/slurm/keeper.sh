#!/bin/bash
# Owns one test cluster: keeper.sh ROOT NODE_PREFIX PARENT
#
# Everything of the cluster lives in one PID namespace, whose first process is
# started here. When that process is killed, the kernel kills all the others.
# It happens on SIGTERM, which `Cluster.down` sends, and which the kernel sends
# when the process that made the cluster dies in whatever way (PR_SET_PDEATHSIG).
# Should this script itself be killed, the kernel ends the cluster all the same,
# and only its files and empty cgroups stay.
set -u
root=$1 prefix=$2 parent=$3
folder=$(cd "$(dirname "$0")" && pwd)

stop=no
trap 'stop=yes' TERM
# The parent may have died before the kernel was asked to watch it.
[[ $PPID == "$parent" ]] || stop=yes

setpriv --pdeathsig KILL \
    unshare --net --uts --ipc --mount --propagation private --pid --fork --kill-child=KILL --mount-proc \
    bash "$folder/node_init.sh" "$root" head &
outer=$!
while [[ $stop == no ]] && kill -0 "$outer" 2>/dev/null; do
    wait "$outer"
done

cgroups() {
    find /sys/fs/cgroup -mindepth 2 -maxdepth 2 -type d -name "slurm_${prefix}[0-9]*" 2>/dev/null
}

# unshare ends when the namespace is empty, for the kernel lets its first process
# end last. A frozen task (slurmd freezes a step in order to kill it) cannot die.
for _ in {1..200}; do
    kill -0 "$outer" 2>/dev/null || break
    read -ra inits <"/proc/$outer/task/$outer/children"
    ((${#inits[@]})) && kill -KILL "${inits[@]}"
    for group in $(cgroups); do
        find "$group" -name freezer.state -exec sh -c 'echo THAWED >"$1"' _ {} \; 2>/dev/null
    done
    sleep 0.05
done
kill -KILL "$outer" 2>/dev/null

for _ in {1..100}; do
    groups=$(cgroups)
    [[ -n $groups ]] || break
    for group in $groups; do
        find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
    done
    sleep 0.05
done
rm -rf -- "$root"

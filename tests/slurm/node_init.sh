#!/bin/bash
# The first process of a node: node_init.sh ROOT NAME
#
# It finds itself in fresh network, host name, IPC, mount and PID namespaces and
# makes a host of them; then it reaps orphans. Killing it ends the node.
set -eu
root=$1 name=$2
node=$root/nodes/$name
exec </dev/null

# Not every kernel has it; it only keeps the nodes' process numbers apart.
cat "$node/first_pid" >/proc/sys/kernel/ns_last_pid || true
hostname "$name"
for file in hosts hostname resolv.conf; do
    if [[ -e /etc/$file ]]; then mount --bind "$node/$file" "/etc/$file"; fi
done
# /sys shows the interfaces of the network namespace that it was mounted in.
mkdir -p "$node/cgroup"
mount --rbind /sys/fs/cgroup "$node/cgroup"
mount -t sysfs sysfs /sys
mount --move "$node/cgroup" /sys/fs/cgroup
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
ip link set lo up
: >"$root/run/ready-$name"

trap 'exit 0' TERM
while :; do
    sleep infinity &
    wait $!
done

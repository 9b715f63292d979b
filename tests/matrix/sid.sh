#!/usr/bin/env bash
# Runs a command in this checkout inside a chroot of Debian sid, which has Python 3.14.
#
#     bash tests/matrix/sid.sh FOLDER python3 -m tests.matrix --rows python-3.14
#
# It needs root and debootstrap, and makes the chroot in FOLDER if FOLDER is not there.  All mounts
# are in a mount namespace of their own, so they are gone when the command has ended.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
checkout=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(realpath -m "$1")
shift

packages=python3,python3-venv,python3-pip,python3-dev,ca-certificates,git,g++,openssh-client,procps
if [ ! -e "$folder/made" ]; then
    debootstrap --variant=minbase --include=$packages sid "$folder"
    touch "$folder/made"
fi

# pip has the same settings as on this machine, but no constraint of this machine's Python.
export PIP_CONSTRAINT=
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf"; do
    [ ! -e "$file" ] || install -D "$file" "$folder$file"
done
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
    install -D "$file" "$folder$file"
done
indexes=$(pip config list 2>/dev/null | grep -o 'file://[^ '"'"']*' | sed 's,^file://,,;s,/simple$,,') || true

export checkout folder indexes
exec unshare --mount bash -c '
    set -e
    mount --make-rprivate /
    mount -t proc proc "$folder/proc"
    mount --rbind /sys "$folder/sys"
    mount --rbind /dev "$folder/dev"
    mount -t tmpfs -o size=6g tmpfs "$folder/dev/shm"
    for each in "$checkout" $indexes $PIP_FIND_LINKS; do
        mkdir -p "$folder$each"
        mount --bind "$each" "$folder$each"
    done
    exec chroot "$folder" env -C "$checkout" "$@"' sid "$@"

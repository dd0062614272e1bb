# First program of a build's namespaces: hides the host, then runs "$@".
#
# It starts as root of a fresh user namespace (an unprivileged uid of the host)
# with mount, PID, IPC, UTS and network namespaces of its own. Descriptor 3 says
# "go" when our side is ready; when our side dies first, it says nothing, and
# this ends. SPACE_SCRATCH is the size of the only writable file system.
set -eu
read -r word <&3 || exit 90
[ "$word" = go ] || exit 90
exec 3<&-

new=/tmp
mount --make-rprivate /
mount -t tmpfs -o "mode=0755,nosuid,nodev,size=$SPACE_SCRATCH" tmpfs $new
cd $new
mkdir -p dev/pts dev/shm proc etc tmp var/tmp var/lib/dpkg var/cache root run .old

# The tools of the host, read-only. Only what everybody may read is in there,
# and of /etc only what the tools need.
for dir in usr bin sbin lib lib32 lib64 libx32; do
	if [ -L "/$dir" ]; then
		ln -s "$(readlink "/$dir")" "$dir"
	elif [ -d "/$dir" ]; then
		mkdir "$dir"
		mount --bind "/$dir" "$dir"
		mount -o remount,bind,ro,nosuid,nodev "$dir"
	fi
done
for file in alternatives ld.so.cache ld.so.conf ld.so.conf.d perl ssl ca-certificates.conf; do
	[ ! -e "/etc/$file" ] || cp -RL "/etc/$file" etc/ 2>/dev/null || true
done
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n' >etc/passwd
printf 'root:x:0:\ntty:x:5:\nnogroup:x:65534:\n' >etc/group
printf '127.0.0.1 localhost\n' >etc/hosts
mkdir -p etc/apt/apt.conf.d etc/apt/trusted.gpg.d etc/apt/preferences.d etc/dpkg/dpkg.cfg.d
: >var/lib/dpkg/status
chmod 1777 tmp var/tmp

for node in null zero full random urandom tty; do
	: >"dev/$node"
	mount --bind "/dev/$node" "dev/$node"
done
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t proc -o nosuid,nodev,noexec proc proc

pivot_root . .old
cd /
umount -l /.old
rmdir /.old
hostname build 2>/dev/null || true
umask 022

# Not exec: this shell is PID 1, and every process left over dies with it.
setpriv --no-new-privs -- "$@"

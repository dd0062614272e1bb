#!/bin/sh
# Installs what SPACE needs on a Debian or Ubuntu machine that has Go, git and make.
#
#   scripts/setup.sh [run|test|dev]
#
#   run   what a machine needs to build templates and run sandboxes (default)
#   test  run, and what the tests start (PostgreSQL, Python, ...)
#   dev   test, and what the race detector and work on the project need
#
# It may be repeated: what is there already is left alone, and nothing is
# fetched when nothing is missing.
set -eu

level=${1:-run}
user=space

say()  { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Without recommends: a recommended compiler or mail server is not ours to install.
run_packages="mmdebstrap squashfs-tools-ng e2fsprogs iproute2 mount util-linux ca-certificates debian-archive-keyring"
test_packages="postgresql python3 procps curl"
dev_packages="gcc libc6-dev strace jq"

case $level in
run)  packages=$run_packages ;;
test) packages="$run_packages $test_packages" ;;
dev)  packages="$run_packages $test_packages $dev_packages" ;;
-h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
*) fail "unknown level '$level': use run, test or dev" ;;
esac

[ "$(uname -s)" = Linux ] || fail "SPACE runs on Linux; this is $(uname -s)"

command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1 || fail \
"this machine has no apt: install these by hand, then run 'make build': $packages"

missing=
for p in $packages; do
	state=$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)
	[ "$state" = installed ] || missing="$missing $p"
done
if ! getent passwd "$user" >/dev/null; then need_user=yes; else need_user=; fi

if [ "$(id -u)" != 0 ] && { [ -n "$missing" ] || [ -n "$need_user" ]; }; then
	printf 'setup: this needs root and you are %s.\n' "$(id -un)" >&2
	[ -z "$missing" ] || printf 'setup: missing packages:%s\n' "$missing" >&2
	[ -z "$need_user" ] || printf "setup: missing system user '%s'\n" "$user" >&2
	printf 'setup: run:  sudo %s %s\n' "$0" "$level" >&2
	exit 1
fi

if [ -n "$missing" ]; then
	export DEBIAN_FRONTEND=noninteractive
	log=$(mktemp)
	trap 'rm -f "$log"' EXIT
	say "reading package lists (apt-get update)"
	apt-get update -q >"$log" 2>&1 || { cat "$log" >&2; fail "apt-get update failed: see above"; }
	say "installing:$missing"
	# A server package must not start a service on the machine of whoever builds.
	policy=/usr/sbin/policy-rc.d
	if [ ! -e "$policy" ]; then
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod 0755 "$policy"
		trap 'rm -f "$log" "$policy"' EXIT
		trap 'exit 130' INT TERM
	fi
	# shellcheck disable=SC2086 # a list of words
	apt-get install -q -y --no-install-recommends $missing >"$log" 2>&1 ||
		{ cat "$log" >&2; fail "apt-get install failed: see above"; }
else
	say "packages for '$level' are installed"
fi

if [ -n "$need_user" ]; then
	say "creating system user '$user' (no login, no home)"
	if command -v useradd >/dev/null 2>&1; then
		useradd --system --user-group --no-create-home --home-dir /nonexistent \
			--shell /usr/sbin/nologin "$user"
	else
		fail "useradd is missing: install the package 'passwd'"
	fi
else
	say "system user '$user' exists"
fi
say "ok"

#!/bin/bash
# Shows what SPACE does, on this machine, with bin/space.
#
#   scripts/demo.sh            as root; `make demo` builds first
#   scripts/demo.sh --clean    remove what the demo keeps for its next run
#
# It keeps built templates in $SPACE_DEMO_DIR (/var/lib/space-demo), so that only
# the first run builds them. Everything else that it starts or makes is gone when
# it ends. Its own server listens on free loopback ports and shares nothing with
# one that runs already.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
data=${SPACE_DEMO_DIR:-/var/lib/space-demo}
run=${SPACE_DEMO_RUN_DIR:-/run/space-demo}
space=$root/bin/space
server=
work=

die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "sandboxes need mounts and namespaces: run it as root (sudo make demo)"
if [ "${1:-}" = --clean ]; then
	rm -rf --one-file-system "$data" "$run"
	echo "demo: removed $data and $run"
	exit 0
fi
[ -x "$space" ] || die "there is no bin/space: run 'make build' first"

# What the commands below talk to.
export SPACE_DATA_DIR=$data SPACE_RUN_DIR=$run
unset SPACE_API_URL SPACE_API_KEY SPACE_TEMPLATES_DIR SPACE_STORE

mkdir -p "$data"
exec 9>"$data/demo.lock"
flock -n 9 || die "another demo runs in $data"

# stop_server ends the server and waits; what it would not end is killed.
stop_server() {
	local pid=$server
	[ -n "$pid" ] || return 0
	server=
	kill -TERM "$pid" 2>/dev/null || true
	for _ in $(seq 300); do
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	if kill -0 "$pid" 2>/dev/null; then
		echo "demo: the server did not end within 30 s" >&2
		kill -KILL "$pid" 2>/dev/null || true
		wait "$pid" 2>/dev/null || true
		return 1
	fi
	wait "$pid"
}

# Only a demo that was killed with SIGKILL leaves its server behind.
if [ -e "$data/host/lock" ] && ! flock -n "$data/host/lock" true; then
	server=$(cat "$data/host/lock")
	echo "demo: ending the server of an earlier demo (process $server)"
	kill -TERM "$server"
	flock -w 40 "$data/host/lock" true || die "process $server does not end"
	server=
fi

end() {
	code=$?
	trap - EXIT INT TERM
	set +e
	if [ -n "$server" ]; then # something failed or was interrupted
		timeout 60 "$space" rm --all >/dev/null 2>&1
		stop_server 2>/dev/null
	fi
	if grep -q " $run/" /proc/self/mountinfo; then
		echo "demo: mounts are left below $run" >&2
		[ "$code" != 0 ] || code=1
	fi
	if [ "$code" = 0 ]; then
		rm -rf --one-file-system "$run" "$data/state" "$data/host/gvisor" "$data/host/room" "$data/host/lock"
	elif [ -n "$work" ] && [ -s "$work/log" ]; then
		echo "demo: the end of the server's log:" >&2
		grep -v 'admin key, shown once' "$work/log" | tail -n 40 >&2
	fi
	[ -z "$work" ] || rm -rf "$work"
	if [ "$code" = 0 ]; then echo "demo: ok"; else echo "demo: failed" >&2; fi
	exit "$code"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

work=$(mktemp -d)
bold=; dim=; off=
if [ -t 1 ]; then bold=$(printf '\033[1m'); dim=$(printf '\033[2m'); off=$(printf '\033[0m'); fi

title() { printf '\n%s── %s%s\n' "$bold" "$*" "$off"; }

# quoted prints a command as one would type it.
quoted() {
	local a s=
	for a in "$@"; do
		case $a in
		'' | *[!A-Za-z0-9_./:=@%+,-]*) s+=" '${a//\'/\'\\\'\'}'" ;;
		*) s+=" $a" ;;
		esac
	done
	printf '%s' "${s# }"
}

# show prints a command of ours and runs it.
show() {
	printf '%s$ space %s%s\n' "$dim" "$(quoted "$@")" "$off"
	"$space" "$@"
}

# start_session starts a command in the background and leaves its session's id in $sid.
start_session() {
	show exec -d "$@" >"$work/sid"
	cat "$work/sid"
	sid=$(tail -n 1 "$work/sid")
}

expect() { # what got want
	[ "$2" = "$3" ] || die "$1: got '$2', want '$3'"
}

# numbers checks that a file holds 1..N, each once and in order.
numbers() {
	seq "$2" | cmp -s - "$1" || { head -c 400 "$1" >&2; die "the numbers 1 to $2 did not arrive once each, in order"; }
}

free_port() {
	local p
	for _ in $(seq 50); do
		p=$((20000 + RANDOM % 10000))
		[ -n "$(ss -Htln "sport = :$p")" ] || { echo "$p"; return; }
	done
	die "no free port was found"
}

title "Can this machine run sandboxes?"
show doctor

api=$(free_port)
plane=$api
while [ "$plane" = "$api" ]; do plane=$(free_port); done
title "A server: the host room as root, everything else as user space"
printf '%s$ space up --listen 127.0.0.1:%s --listen-data 127.0.0.1:%s --stop-on-exit &%s\n' "$dim" "$api" "$plane" "$off"
[ -d "$data/host/templates/names" ] || echo "(the first run builds the templates from signed Debian packages; this takes some minutes)"
"$space" up --listen "127.0.0.1:$api" --listen-data "127.0.0.1:$plane" --stop-on-exit >"$work/log" 2>&1 9>&- &
server=$!
seen=0
for i in $(seq 12000); do
	# The progress of a build is the server's to tell.
	if [ $((i % 10)) = 1 ]; then
		total=$(wc -l <"$work/log")
		sed -n "$((seen + 1)),${total}s/^space: \(template .*\)/  \1/p" "$work/log"
		seen=$total
	fi
	[ ! -e "$run/serve/endpoint.json" ] || { "$space" ls >/dev/null 2>&1 && break; }
	kill -0 "$server" 2>/dev/null || die "the server ended before it was ready"
	[ "$i" != 12000 ] || die "the server was not ready after 20 minutes"
	sleep 0.1
done
echo "serving"
"$space" rm --all >/dev/null 2>&1 || true # of a demo that was killed

title "What sandboxes are made from"
show templates

title "A sandbox: a machine with its own kernel boundary and disk"
show create --name demo --timeout 30m

title "It runs Python; its kernel is not ours"
show exec demo -- python3 -c 'import platform; print("python", platform.python_version(), "says 6*7 =", 6*7)'
printf '%s$ uname -a%s\n' "$dim" "$off"
uname -a
show exec demo -- uname -a
[ "$("$space" exec demo -- uname -v)" != "$(uname -v)" ] || die "the sandbox runs on our own kernel"

title "Files are kept from one command to the next"
show exec demo -- sh -c 'echo "written by one command" > note.txt'
show exec demo -- cat note.txt
expect "the file" "$("$space" exec demo -- cat note.txt)" "written by one command"

title "A command's exit code is ours"
code=0
show exec demo -- sh -c 'exit 7' || code=$?
echo "exit code: $code"
expect "the exit code" "$code" 7

title "A reader that is cut comes back, and nothing is lost or repeated"
start_session demo -- sh -c 'for i in $(seq 1 20); do echo $i; sleep 0.1; done'
printf '%s$ timeout -s KILL 1 space --json attach %s%s\n' "$dim" "$sid" "$off"
{ timeout -s KILL 1 "$space" --json attach "$sid" >"$work/first" || true; } 2>/dev/null
tail -n 3 "$work/first"
last=$(sed -n 's/^{"id":"\([0-9.]*\)".*}$/\1/p' "$work/first" | tail -n 1)
[ -n "$last" ] || die "nothing was read before the cut"
echo "(the reader was killed; the last event it saw is $last)"
printf '%s$ space attach --after %s %s%s\n' "$dim" "$last" "$sid" "$off"
"$space" attach --after "$last" "$sid" >"$work/rest"
{
	sed -n 's/^{"id":"[0-9.]*","type":"stdout","text":"\(.*\)"}$/\1/p' "$work/first" | while read -r text; do printf '%b' "$text"; done
	cat "$work/rest"
} >"$work/all"
numbers "$work/all" 20
echo "read before the cut: $(($(wc -l <"$work/all") - $(wc -l <"$work/rest"))) lines, after it: $(wc -l <"$work/rest"); together 1 to 20, each once"

title "Pause: in memory, not scheduled"
show exec demo -- sh -c 'nohup sh -c "while :; do date +%s%N > tick; sleep 0.05; done" >/dev/null 2>&1 &'
show pause demo
show ls
show resume demo
show exec demo -- sh -c 'a=$(cat tick); sleep 0.3; [ "$(cat tick)" != "$a" ] && echo "the program goes on"'

title "kill -9 of the whole unprivileged side while a command prints"
start_session demo -- sh -c 'for i in $(seq 1 30); do echo $i; sleep 0.1; done'
printf '%s$ space attach %s &%s\n' "$dim" "$sid" "$off"
"$space" attach "$sid" >"$work/stream" 9>&- &
reader=$!
for _ in $(seq 100); do
	[ "$(wc -l <"$work/stream")" -lt 5 ] || break
	sleep 0.1
done
pid=$(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$run/serve/endpoint.json")
[ -n "$pid" ] && [ "$(stat -c %U "/proc/$pid")" = space ] || die "process '$pid' is not the unprivileged side"
printf '%s$ kill -9 %s     # after line %s%s\n' "$dim" "$pid" "$(wc -l <"$work/stream")" "$off"
kill -9 "$pid"
code=0
wait "$reader" || code=$?
expect "the reader's exit code" "$code" 0
numbers "$work/stream" 30
echo "the same reader got 1 to 30, each once, and the true exit code $code"

title "The end: nothing is left but who did what"
show rm demo
show ls
show audit
printf '%s$ kill %s     # the server%s\n' "$dim" "$server" "$off"
stop_server
show audit verify
